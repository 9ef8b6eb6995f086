"""Which rows see which, cut for the backward: keys are read once for many chains, or once for each of them.

A row sees the rows of its own chain up to itself, and, for every chain on its path that was left at a branch, that
chain's own rows up to the branch. Of a chain's branches, the deepest come first in row order, so that the rows below
all branches from some depth on are contiguous, and so are the chain's rows above them: one sequence without a mask,
many queries long, in which every key is read once. Or those keys are gathered for every chain below, in front of that
chain's other keys: more keys, but no query is read a second time. A gradient is a sum over keys, so each part of a
chain may go the cheaper way.

Shared parts run level by level, as no query has two parts of one level.

Shape suffixes: T rows, D rows outside, C chains; a suffix 1 is one more entry.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from harts.chains import Chains
from harts.layout import PackedTree
from harts.ops.attention.calls import Call, Range, Rows, Seen, capped_calls, joined, window_paths
from harts.ops.rows import RowIndex

__all__ = ["BackwardPlan", "Stage", "plan_backward"]

QUERY_COST = 1.2
"""A pass over a query costs as much as so many gathered keys (benchmarks/gpu_ops.py --only attend_backward)."""

GATHERED_QUERY_COST = 2.4
"""The same where queries are gathered, for kernels that cannot leave rows between sequences out."""

PART_COST = 4096
"""Keys that a shared part has to save beyond that: a call has launches of its own. Not fitted to anything."""


@dataclass(frozen=True, eq=False)
class Stage:
    """Calls whose gradients of keys are added up at once.

    Attributes:
        calls: one after the other.
        keys: rows of all their keys, among D + T; None where these are all rows, each once, in order.
    """

    calls: tuple[Call, ...]
    keys: RowIndex | None


@dataclass(frozen=True, eq=False)
class BackwardPlan:
    """Calls that cover every visible pair once.

    Attributes:
        stages: chains with the keys that are gathered for them, then what chains share, level by level.
        queries: rows of the queries of all calls, T for a row in a gap; None where these are all rows, each once, in
            order.
    """

    stages: tuple[Stage, ...]
    queries: RowIndex | None


@dataclass
class _Branch:
    """Chains that leave one chain behind row `last_key`; their rows and those of chains below are `start:stop`."""

    start: int
    stop: int
    last_key: int
    members: list[int]
    chains: int  # with those below


def plan_backward(packed: PackedTree, gaps: bool = False, window: int | None = None) -> BackwardPlan:
    """A layout (`PackedTree.layout`): the calls of the backward.

    Args:
        packed: the rows.
        gaps: the kernel can leave out rows between sequences; see `harts.ops.attention.calls.capped_calls`.
        window: rows of its path that a row sees at most, itself included. With one, each chain gathers what its rows
            see above it, fewer than `window` rows, and nothing is shared.
    """
    calls = tuple(_calls(packed, gaps) if window is None else _window_calls(packed, window))
    rows = packed.num_outside + packed.num_rows
    stages = []
    for part in _stages(calls, packed.key_cap, rows):
        keys = _all_rows([call.keys for call in part], rows, packed.device)
        stages.append(Stage(part, None if keys is None else RowIndex(keys, rows)))
    return BackwardPlan(tuple(stages), _query_rows(calls, packed))


def _stages(calls: Sequence[Call], key_cap: int, rows: int) -> Iterator[tuple[Call, ...]]:
    """All calls at once, where their gradients of keys (of 16 bits) take no more room than fp32 sums and one call's.

    Else as many calls as have no more keys than one call may have, or than there are rows.
    """
    cap, first, keys = max(key_cap, rows), 0, 0
    if sum(call.num_keys for call in calls) <= key_cap + 2 * rows:
        yield tuple(calls)
        return
    for at, call in enumerate(calls):
        if at > first and keys + call.num_keys > cap:
            yield tuple(calls[first:at])
            first, keys = at, 0
        keys += call.num_keys
    yield tuple(calls[first:])


def _all_rows(parts: Sequence[Rows], num_rows: int, device: torch.device) -> Tensor | None:
    """Rows of several calls, one after the other; None where these are all rows in order."""
    if len(parts) == 1 and isinstance(parts[0], Tensor):
        return parts[0]
    ranges = [(part.start, part.stop) for part in parts if isinstance(part, slice)]
    if len(ranges) == len(parts) and joined(ranges) == (0, num_rows):
        return None
    rows = torch.arange(num_rows, device=device)
    return torch.cat([rows[part] if isinstance(part, slice) else part for part in parts])


def _query_rows(calls: Sequence[Call], packed: PackedTree) -> RowIndex | None:
    """Rows of the queries of several calls, one after the other, T for a row in a gap."""
    rows = _all_rows([call.queries for call in calls], packed.num_rows, packed.device)
    if rows is None and any(call.used_queries_C is not None for call in calls):
        rows = torch.arange(packed.num_rows, device=packed.device)
    if rows is None:
        return None
    ends = np.cumsum([call.num_queries for call in calls])
    for call, end in zip(calls, ends.tolist(), strict=True):
        if call.used_queries_C is not None:
            part = rows[end - call.num_queries : end]
            place = torch.arange(len(part), device=part.device)
            sequence = torch.searchsorted(call.cu_queries_C1, place, right=True) - 1
            used = place - call.cu_queries_C1[sequence] < call.used_queries_C[sequence]
            part.masked_fill_(~used, packed.num_rows)
    return RowIndex(rows, packed.num_rows)


def _calls(packed: PackedTree, gaps: bool) -> Iterator[Call]:
    """Chains, then what they share; under the cap."""
    chains, shared = _sequences(packed.chains, QUERY_COST if gaps else GATHERED_QUERY_COST)
    yield from capped_calls(chains, packed.key_cap, packed.device, causal=True)
    for level in sorted(shared):
        yield from capped_calls(sorted(shared[level]), packed.key_cap, packed.device, causal=False, gaps=gaps)


def _window_calls(packed: PackedTree, window: int) -> Iterator[Call]:
    paths = window_paths(packed.chains, window)
    return capped_calls(paths, packed.key_cap, packed.device, causal=True, window=window)


def _sequences(chains: Chains, query_cost: float) -> tuple[list[Seen], dict[int, list[Seen]]]:
    """Chains with all keys that they do not share, and shared keys by level with all rows below."""
    outside, chains = chains.outside, chains.with_outside()
    own_C = list(pairwise(chains.start_C1.tolist()))
    above_C: list[list[Range]] = [[] for _ in own_C]
    level_C = [0] * len(own_C)
    shared: dict[int, list[Seen]] = {}
    for chain, branches in enumerate(_branches(chains)):
        for branch, keys, level in _share(branches, own_C[chain][0], level_C[chain], shared, query_cost):
            for member in branch.members:
                above_C[member] = above_C[chain] + keys
                level_C[member] = level

    def queries(rows: Range) -> Range:
        return rows[0] - outside, rows[1] - outside

    paths = [(queries(own), [*above, own]) for own, above in zip(own_C, above_C, strict=True) if own[0] >= outside]
    return paths, {level: [(queries(rows), keys) for rows, keys in sequences] for level, sequences in shared.items()}


def _share(
    branches: Sequence[_Branch], first_key: int, level: int, shared: dict[int, list[Seen]], query_cost: float
) -> Iterator[tuple[_Branch, list[Range], int]]:
    """Decides which rows of a chain, from `first_key` on, the chains below its branches share.

    The part that saves most is shared first: keys up to a branch, for it and all deeper ones. Both sides of it go on:
    deeper branches with the keys behind it, the others with all keys.

    Yields:
        Each branch, the keys to be gathered for it, and the level from which on chains below may share more.
    """
    key_stop = np.array([branch.last_key + 1 for branch in branches])
    query_stop = np.array([branch.stop for branch in branches])
    chains = np.cumsum([0] + [branch.chains for branch in branches])
    parts = [(0, len(branches), first_key, level)] if branches else []
    while parts:
        first, last, start, depth = parts.pop()
        saved = (chains[first + 1 : last + 1] - chains[first] - 1) * (key_stop[first:last] - start)
        gain = saved - query_cost * (query_stop[first:last] - branches[first].start) - PART_COST
        best = first + int(gain.argmax())
        if gain[best - first] > 0:
            stop = int(key_stop[best])
            shared.setdefault(depth, []).append(((branches[first].start, branches[best].stop), [(start, stop)]))
            yield branches[best], [], depth + 1
            if first < best:
                parts.append((first, best, stop, depth + 1))
            if best + 1 < last:
                parts.append((best + 1, last, start, depth))
        elif last - first > 1:
            parts += [(each, each + 1, start, depth) for each in range(first, last)]
        else:
            yield branches[first], [(start, int(key_stop[first]))], depth


def _branches(chains: Chains) -> list[list[_Branch]]:
    """Branches of every chain, in row order: the deepest first."""
    start = chains.start_C1.tolist()
    parent_row = chains.parent_row_C.tolist()
    parent = chains.parent_C.tolist()
    stop, below = start[1:], [1] * chains.num_chains
    for chain in range(chains.num_chains - 1, -1, -1):
        if parent_row[chain] >= 0:
            stop[parent[chain]] = max(stop[parent[chain]], stop[chain])
            below[parent[chain]] += below[chain]
    branches_C: list[list[_Branch]] = [[] for _ in parent]
    for chain, last_key in enumerate(parent_row):
        if last_key < 0:
            continue
        branches = branches_C[parent[chain]]
        if not branches or branches[-1].last_key != last_key:
            branches.append(_Branch(start[chain], stop[chain], last_key, [], 0))
        branches[-1].stop = stop[chain]
        branches[-1].members.append(chain)
        branches[-1].chains += below[chain]
    return branches_C
