"""Which rows see which, cut for the backward: own chain, and every branch against what lies above it.

A row sees the rows of its own chain up to itself, and, for every chain on its path that was left at a branch, that
chain's own rows up to the branch. All rows below one branch are contiguous, and so are the chain's rows above it: one
sequence without a mask, many queries long, where path-gathered chains would read the same keys once per chain. No
query is below two branches of one level, so a level is one call; there are as many as chains nest (1 to 6 on the
bundled workloads).

Shape suffixes: C chains; a suffix 1 is one more entry.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from harts.blocks import BlockTree
from harts.layout import PackedTree

__all__ = ["BackwardCall", "Rows", "backward_calls"]

Rows = slice | Tensor
"""Rows of a call: a range, or int64 indices."""

KEY_CAP = 262_144
"""Keys gathered for one call; a single longer sequence is its own call."""

FEW_KEYS = 1.25
"""Up to this many path-gathered keys per row, chains run with their whole paths, in fewer calls."""


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


@dataclass
class _Branch:
    """Rows `start:stop` below a branch that see rows `first_key:last_key + 1` of the chain above."""

    start: int
    stop: int
    first_key: int
    last_key: int


_CALLS: "WeakKeyDictionary[PackedTree, tuple[BackwardCall, ...]]" = WeakKeyDictionary()


def backward_calls(packed: PackedTree) -> tuple[BackwardCall, ...]:
    """Calls that cover every visible pair once: all chains by themselves first, then the branches, level by level.

    Where chains share little, whole paths instead, group by group as in the forward.
    """
    if packed not in _CALLS:
        few = packed.blocks.gathered_keys <= FEW_KEYS * packed.num_rows
        _CALLS[packed] = tuple(_path_calls(packed) if few else _branch_calls(packed))
    return _CALLS[packed]


def _path_calls(packed: PackedTree) -> list[BackwardCall]:
    calls = []
    for group in packed.key_groups:
        own = slice(group.row_start, group.row_stop)
        calls.append(
            BackwardCall(
                queries=own,
                keys=own if group.key_row_K is None else group.key_row_K,
                query_lengths=group.query_lengths,
                key_lengths=group.key_lengths,
                cu_queries_C1=group.cu_queries_C1,
                cu_keys_C1=group.cu_keys_C1,
                causal=True,
            )
        )
    return calls


def _branch_calls(packed: PackedTree) -> list[BackwardCall]:
    start_C1 = packed.blocks.own_start_C1.tolist()
    chains = [_Branch(start, stop, start, stop - 1) for start, stop in pairwise(start_C1)]
    calls = [_call(chains, packed.device, causal=True)]
    for level in _branches(packed.blocks):
        first, keys = 0, 0
        for at, branch in enumerate(level):
            length = branch.last_key + 1 - branch.first_key
            if at > first and keys + length > KEY_CAP:
                calls.append(_call(level[first:at], packed.device, causal=False))
                first, keys = at, 0
            keys += length
        calls.append(_call(level[first:], packed.device, causal=False))
    return calls


def _branches(blocks: BlockTree) -> list[list[_Branch]]:
    """Branches by level, in row order: at level l, those that leave a chain which l other chains were left for."""
    start = blocks.own_start_C1.tolist()
    parent_row = blocks.parent_row_C.tolist()
    parent = (np.searchsorted(blocks.own_start_C1, blocks.parent_row_C, side="right") - 1).tolist()
    stop = start[1:]
    depth = [0] * blocks.num_chains
    for chain in range(blocks.num_chains):
        if parent_row[chain] >= 0:
            depth[chain] = depth[parent[chain]] + 1
    for chain in range(blocks.num_chains - 1, -1, -1):
        if parent_row[chain] >= 0:
            stop[parent[chain]] = max(stop[parent[chain]], stop[chain])
    levels: list[list[_Branch]] = [[] for _ in range(max(depth))]
    last_at: dict[int, _Branch] = {}  # by row above the branch
    for chain in range(blocks.num_chains):
        above = parent_row[chain]
        if above < 0:
            continue
        sibling = last_at.get(above)
        if sibling is not None and sibling.stop == start[chain]:
            sibling.stop = stop[chain]
            continue
        last_at[above] = _Branch(start[chain], stop[chain], start[parent[chain]], above)
        levels[depth[chain] - 1].append(last_at[above])
    return levels


def _call(branches: Sequence[_Branch], device: torch.device, *, causal: bool) -> BackwardCall:
    queries = [(branch.start, branch.stop) for branch in branches]
    keys = [(branch.first_key, branch.last_key + 1) for branch in branches]
    query_lengths, key_lengths = (tuple(stop - start for start, stop in ranges) for ranges in (queries, keys))
    return BackwardCall(
        queries=_rows(queries, device),
        keys=_rows(keys, device),
        query_lengths=query_lengths,
        key_lengths=key_lengths,
        cu_queries_C1=_cumulative(query_lengths, device),
        cu_keys_C1=_cumulative(key_lengths, device),
        causal=causal,
    )


def _rows(ranges: Sequence[tuple[int, int]], device: torch.device) -> Rows:
    """One range where the ranges join, else their rows."""
    if all(before[1] == after[0] for before, after in pairwise(ranges)):
        return slice(ranges[0][0], ranges[-1][1])
    rows = np.concatenate([np.arange(start, stop, dtype=np.int64) for start, stop in ranges])
    return torch.from_numpy(rows).to(device)


def _cumulative(lengths: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor(np.append(0, np.cumsum(lengths)), dtype=torch.int32, device=device)
