"""The report: three ways to count the rows, duplicates, near misses, and why rows part in each group.

Shape suffixes: L tokens of a trajectory, T rows of the tree.
"""

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from harts.explain.branches import branches_of
from harts.explain.kinds import REMEDIES
from harts.explain.misses import Miss, find_misses
from harts.explain.rows import build_tree, longest_rows
from harts.formats.decoding import Decoder
from harts.trajectory import Trajectory
from harts.tree import PrefixTree

__all__ = ["Group", "Report", "Sizes", "explain", "sizes_of"]


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Tokens to run, counted three ways, and what they count.

    Attributes:
        calls: model calls: trained spans, each with all that stands before it. A trajectory with nothing trained is
            counted as one call.
        distinct_calls: calls whose tokens no other call has.
        per_call: tokens of (A), one row a model call.
        per_distinct_call: the same, equal calls once.
        prefix: tokens of (B), rows merged while one is a prefix of the next.
        tree: rows of (C), the prefix tree.
    """

    calls: int
    distinct_calls: int
    per_call: int
    per_distinct_call: int
    prefix: int
    tree: int


@dataclass(frozen=True, kw_only=True)
class Group:
    """One group by itself.

    Attributes:
        name: of the group.
        trajectories: how many it has.
        sizes: of its own tree.
        duplicates: trajectories whose tokens an earlier one of the group has.
        partings: reason -> branch points. `sampled`: the model wrote other tokens; `given`: prompts or observations
            differ; `sampled or given`: one continuation was sampled, another given, as where a context is rewritten;
            `keys`: the token is the same, its recorded experts or merge keys are not.
        first_parting: tokens before the first branch point of the group, None where there is none.
        lost: rows that its near misses cost; those between groups are not counted.
    """

    name: str
    trajectories: int
    sizes: Sizes
    duplicates: int
    partings: dict[str, int]
    first_parting: int | None
    lost: int


@dataclass(frozen=True, kw_only=True)
class Report:
    """What `explain` found.

    Attributes:
        sizes: one tree of all trajectories.
        groups: by name, in the order given.
        duplicates: ids of trajectories with the same tokens, first the one that came first.
        misses: near misses, the costliest first.
        tree_mended: rows of the tree built again without any of the differences.
        decoded: whether text was compared; without it retokenised text is not found.
    """

    sizes: Sizes
    groups: tuple[Group, ...]
    duplicates: tuple[tuple[str, ...], ...]
    misses: tuple[Miss, ...]
    tree_mended: int
    decoded: bool

    @property
    def sizes_by_group(self) -> Sizes:
        """Sums of the groups' own sizes: one tree a group."""
        names = [field.name for field in dataclasses.fields(Sizes)]
        return Sizes(**{name: sum(getattr(group.sizes, name) for group in self.groups) for name in names})

    @property
    def num_duplicates(self) -> int:
        """Trajectories whose tokens an earlier one has."""
        return sum(len(ids) - 1 for ids in self.duplicates)

    @property
    def lost_by_kind(self) -> dict[str, int]:
        """Rows that near misses cost, by kind, the costliest first."""
        lost: Counter[str] = Counter()
        for miss in self.misses:
            lost[miss.kind] += miss.rows
        return dict(lost.most_common())

    def to_json(self) -> dict[str, Any]:
        """A JSON-able dictionary."""
        return {
            "sizes": dataclasses.asdict(self.sizes),
            "sizes_by_group": dataclasses.asdict(self.sizes_by_group),
            "tree_mended": self.tree_mended,
            "decoded": self.decoded,
            "duplicates": [list(ids) for ids in self.duplicates],
            "lost_by_kind": self.lost_by_kind,
            "misses": [{**dataclasses.asdict(miss), "remedy": REMEDIES[miss.kind]} for miss in self.misses],
            "groups": [dataclasses.asdict(group) for group in self.groups],
        }


def explain(trajectories: Sequence[Trajectory], *, decoder: Decoder | None = None) -> Report:
    """Finds out where trajectories stop sharing, why, and what that costs.

    Args:
        trajectories: at least one, as read: whole conversations or one a model call.
        decoder: from `harts.formats.decoding.decoder_for`; None compares token ids only.

    Raises:
        ValueError: no trajectory was given.
    """
    tree = PrefixTree.build(trajectories)
    members: dict[str, list[int]] = defaultdict(list)
    for at, trajectory in enumerate(trajectories):
        members[trajectory.group].append(at)
    rows = longest_rows(tree)
    misses, mended = find_misses(rows, decoder)
    same: dict[int, list[int]] = defaultdict(list)
    last_row_B = tree.row_of_N[tree.offset_B1[1:] - 1]
    for at, row in enumerate(last_row_B.tolist()):
        same[row].append(at)
    duplicates = tuple(tuple(trajectories[at].id for at in some) for some in same.values() if len(some) > 1)
    sizes = _Sizes(tree)
    partings, first = _partings(tree)
    groups = []
    for name, some in members.items():
        groups.append(
            Group(
                name=name,
                trajectories=len(some),
                sizes=sizes.of(some),
                duplicates=len(some) - len({int(last_row_B[at]) for at in some}),
                partings=partings.get(name, {}),
                first_parting=first.get(name),
                lost=sum(miss.rows for miss in misses if miss.groups == (name,)),
            )
        )
    return Report(
        sizes=sizes.of(range(len(trajectories))),
        groups=tuple(groups),
        duplicates=duplicates,
        misses=tuple(misses),
        tree_mended=build_tree(mended).num_rows,
        decoded=decoder is not None,
    )


def sizes_of(tree: PrefixTree) -> Sizes:
    """The sizes of all trajectories of a tree."""
    return _Sizes(tree).of(range(tree.num_trajectories))


class _Sizes:
    """Counts any set of trajectories of one tree without building another."""

    def __init__(self, tree: PrefixTree) -> None:
        self.tree = tree
        self._seen_T = np.full(tree.num_rows, -1, np.int64)
        self._turn = 0

    def of(self, members: Sequence[int]) -> Sizes:
        """The sizes of trajectories `members`."""
        tree, mark = self.tree, self._turn
        self._turn += 1
        calls = per_call = 0
        call_rows: dict[int, int] = {}
        rows = 0
        for at in members:
            path_L = tree.rows_of(at)
            rows += int(np.count_nonzero(self._seen_T[path_L] != mark))
            self._seen_T[path_L] = mark
            ends = _ends_of_calls(tree.trajectories[at].loss_mask)
            calls += len(ends)
            per_call += int((ends + 1).sum())
            call_rows.update(zip(path_L[ends].tolist(), (ends + 1).tolist(), strict=True))
        prefix = PrefixTree.build([tree.trajectories[at] for at in members], share="prefix").num_rows
        return Sizes(
            calls=calls,
            distinct_calls=len(call_rows),
            per_call=per_call,
            per_distinct_call=sum(call_rows.values()),
            prefix=prefix,
            tree=rows,
        )


def _ends_of_calls(mask_L: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Last token of each trained span."""
    ends = np.flatnonzero(mask_L & ~np.append(mask_L[1:], False))
    return ends if len(ends) else np.array([len(mask_L) - 1])


def _partings(tree: PrefixTree) -> tuple[dict[str, dict[str, int]], dict[str, int]]:
    """For each group, branch points by reason, and the depth of the first one."""
    partings: dict[str, Counter[str]] = defaultdict(Counter)
    first: dict[str, int] = {}
    trained, tokens = tree.trained_T[tree.start_S].tolist(), tree.token_ids_T[tree.start_S].tolist()
    for branch in branches_of(tree, range(tree.num_trajectories)):
        sides: dict[str, list[tuple[bool, int]]] = defaultdict(list)
        for segment, below in zip(branch.segments, branch.children, strict=True):
            for name in dict.fromkeys(tree.trajectories[at].group for at in below):
                sides[name].append((trained[segment], tokens[segment]))
        for name, starts in sides.items():
            if len(starts) > 1:
                sampled, ids = zip(*starts, strict=True)
                reason = "sampled" if all(sampled) else "sampled or given" if any(sampled) else "given"
                reason = "keys" if len(set(ids)) == 1 else reason
                partings[name][reason] += 1
                first[name] = min(branch.depth, first.get(name, branch.depth))
    return {name: dict(counts) for name, counts in partings.items()}, first
