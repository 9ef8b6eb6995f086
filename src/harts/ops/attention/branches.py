"""Which rows see which, cut for the backward: branch by branch, where keys are read once or once per chain.

A row sees the rows of its own chain up to itself, and, for every chain on its path that was left at a branch, that
chain's own rows up to the branch. All rows below one branch are contiguous, and so are the chain's rows above it: one
sequence without a mask, many queries long, in which every key is read once. Or the keys above the branch are gathered
for every chain below it, in front of that chain's other keys: more keys, but no query is read a second time. A gradient
is a sum over keys, so every branch is free to take the cheaper way.

Branches that are sequences of their own run level by level, as no query is below two branches of one level.

Shape suffixes: C chains, S stages; a suffix 1 is one more entry.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from harts.blocks import BlockTree
from harts.layout import PackedTree

__all__ = ["BackwardCall", "BackwardPlan", "Rows", "Stage", "plan_backward"]

Rows = slice | Tensor
"""Rows of a call: a range, or int64 indices."""

KEY_CAP = 262_144
"""Keys gathered for one call; a single longer sequence is its own call."""

QUERY_COST = 2.4
"""Passes over a query, in gathered keys: a branch is a sequence of its own where that saves so many keys a query."""


@dataclass(frozen=True, eq=False)
class BackwardCall:
    """Sequences of one call of a varlen kernel.

    Attributes:
        queries, keys: their rows.
        query_lengths, key_lengths: per sequence, host side.
        cu_queries_C1, cu_keys_C1: int32 cumulative lengths.
        causal: queries are the last of their keys, and see those up to themselves; else every query sees every key.
    """

    queries: Rows
    keys: Rows
    query_lengths: tuple[int, ...]
    key_lengths: tuple[int, ...]
    cu_queries_C1: Tensor
    cu_keys_C1: Tensor
    causal: bool


@dataclass(frozen=True, eq=False)
class Stage:
    """Calls whose gradients of keys are added up at once.

    Attributes:
        calls: one after the other.
        keys: rows of all their keys; a range only if these are all rows, each once.
    """

    calls: tuple[BackwardCall, ...]
    keys: Rows


@dataclass(frozen=True, eq=False)
class BackwardPlan:
    """Calls that cover every visible pair once.

    Attributes:
        stages: chains with the keys that are gathered for them, then the branches, level by level.
        queries: rows of the queries of all calls; a range only if these are all rows, each once.
    """

    stages: tuple[Stage, ...]
    queries: Rows


@dataclass
class _Branch:
    """Rows `start:stop`, of so many chains, that see rows `first_key:last_key + 1` of the chain above.

    `level` counts the branches above, this one left out, that are sequences of their own.
    """

    start: int
    stop: int
    chains: int
    first_key: int
    last_key: int
    above: "_Branch | None"
    level: int = 0

    @property
    def cut(self) -> bool:
        """Whether it is a sequence of its own."""
        saved = (self.chains - 1) * (self.last_key + 1 - self.first_key)
        return saved > QUERY_COST * (self.stop - self.start)


_PLANS: "WeakKeyDictionary[PackedTree, BackwardPlan]" = WeakKeyDictionary()


def plan_backward(packed: PackedTree) -> BackwardPlan:
    """The calls of a layout's backward; kept as long as the layout lives."""
    if packed not in _PLANS:
        calls = tuple(_calls(packed.blocks, packed.device))
        stages = [Stage(part, _all_rows([call.keys for call in part], packed)) for part in _stages(calls, packed)]
        _PLANS[packed] = BackwardPlan(tuple(stages), _all_rows([call.queries for call in calls], packed))
    return _PLANS[packed]


def _stages(calls: Sequence[BackwardCall], packed: PackedTree) -> Iterator[tuple[BackwardCall, ...]]:
    """As many calls as have no more keys than one call may have, or than there are rows."""
    cap, first, keys = max(KEY_CAP, packed.num_rows), 0, 0
    for at, call in enumerate(calls):
        if at > first and keys + sum(call.key_lengths) > cap:
            yield tuple(calls[first:at])
            first, keys = at, 0
        keys += sum(call.key_lengths)
    yield tuple(calls[first:])


def _all_rows(parts: Sequence[Rows], packed: PackedTree) -> Rows:
    """Rows of several calls, one after the other."""
    ranges = [(part.start, part.stop) for part in parts if isinstance(part, slice)]
    if len(ranges) == len(parts) and _joined(ranges) == (0, packed.num_rows):
        return slice(0, packed.num_rows)
    rows = torch.arange(packed.num_rows, device=packed.device)
    return torch.cat([rows[part] if isinstance(part, slice) else part for part in parts])


def _calls(blocks: BlockTree, device: torch.device) -> Iterator[BackwardCall]:
    """Chains, then branches; under the cap."""
    above_C, branches = _branches(blocks)
    own = list(pairwise(blocks.own_start_C1.tolist()))
    chains = [(rows, [*_gathered(above), rows]) for rows, above in zip(own, above_C, strict=True)]
    yield from _capped(chains, device, causal=True)
    cut = sorted((branch for branch in branches if branch.cut), key=lambda branch: branch.level)
    for _, level in groupby(cut, key=lambda branch: branch.level):
        sequences = [((each.start, each.stop), [(each.first_key, each.last_key + 1)]) for each in level]
        yield from _capped(sequences, device, causal=False)


def _branches(blocks: BlockTree) -> tuple[list[_Branch | None], list[_Branch]]:
    """The branch that each chain starts at, if any, and all branches in row order, those above first."""
    start = blocks.own_start_C1.tolist()
    parent_row = blocks.parent_row_C.tolist()
    parent = (np.searchsorted(blocks.own_start_C1, blocks.parent_row_C, side="right") - 1).tolist()
    stop, chains = start[1:], [1] * blocks.num_chains
    for chain in range(blocks.num_chains - 1, -1, -1):
        if parent_row[chain] >= 0:
            stop[parent[chain]] = max(stop[parent[chain]], stop[chain])
            chains[parent[chain]] += chains[chain]
    branch_C: list[_Branch | None] = []
    branches: list[_Branch] = []
    last_at: dict[int, _Branch] = {}  # by row above the branch
    for chain in range(blocks.num_chains):
        above = parent_row[chain]
        branch = last_at.get(above)
        if above < 0:
            branch = None
        elif branch is not None and branch.stop == start[chain]:
            branch.stop, branch.chains = stop[chain], branch.chains + chains[chain]
        else:
            upper = branch_C[parent[chain]]
            branch = _Branch(start[chain], stop[chain], chains[chain], start[parent[chain]], above, upper)
            last_at[above] = branch
            branches.append(branch)
        branch_C.append(branch)
    for branch in branches:
        branch.level = 0 if branch.above is None else branch.above.level + branch.above.cut
    return branch_C, branches


def _gathered(branch: _Branch | None) -> list[tuple[int, int]]:
    """Ranges of keys above a chain that are gathered for it, from the root down."""
    ranges = []
    while branch is not None:
        if not branch.cut:
            ranges.append((branch.first_key, branch.last_key + 1))
        branch = branch.above
    return ranges[::-1]


_Sequence = tuple[tuple[int, int], list[tuple[int, int]]]
"""A range of queries, and ranges of keys."""


def _capped(sequences: Iterable[_Sequence], device: torch.device, *, causal: bool) -> Iterator[BackwardCall]:
    """Calls of as many sequences as the cap allows."""
    part: list[_Sequence] = []
    keys = 0
    for sequence in sequences:
        length = sum(stop - start for start, stop in sequence[1])
        if part and keys + length > KEY_CAP:
            yield _call(part, device, causal=causal)
            part, keys = [], 0
        part.append(sequence)
        keys += length
    yield _call(part, device, causal=causal)


def _call(sequences: Sequence[_Sequence], device: torch.device, *, causal: bool) -> BackwardCall:
    query_lengths = tuple(stop - start for (start, stop), _ in sequences)
    key_lengths = tuple(sum(stop - start for start, stop in keys) for _, keys in sequences)
    return BackwardCall(
        queries=_rows([queries for queries, _ in sequences], device),
        keys=_rows([each for _, keys in sequences for each in keys], device),
        query_lengths=query_lengths,
        key_lengths=key_lengths,
        cu_queries_C1=_cumulative(query_lengths, device),
        cu_keys_C1=_cumulative(key_lengths, device),
        causal=causal,
    )


def _joined(ranges: Sequence[tuple[int, int]]) -> tuple[int, int] | None:
    """The range that ranges join to, if they do."""
    return (ranges[0][0], ranges[-1][1]) if all(before[1] == after[0] for before, after in pairwise(ranges)) else None


def _rows(ranges: Sequence[tuple[int, int]], device: torch.device) -> Rows:
    """One range where the ranges join, else their rows, counted on the device."""
    joined = _joined(ranges)
    if joined is not None:
        return slice(*joined)
    start, stop = np.array(ranges, dtype=np.int64).T
    length = stop - start
    shift = torch.from_numpy(np.stack([start - (np.cumsum(length) - length), length])).to(device)
    total = int(length.sum())
    return torch.repeat_interleave(shift[0], shift[1], output_size=total) + torch.arange(total, device=device)


def _cumulative(lengths: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor(np.append(0, np.cumsum(lengths)), dtype=torch.int32, device=device)
