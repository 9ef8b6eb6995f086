"""Calls of a varlen kernel: which rows are its queries, and which rows each sequence of them sees.

Queries are own rows of a layout, `0:T`. Keys are numbered as in `harts.chains`: rows outside, `0:D`, then own rows.

Shape suffixes: T rows, D rows outside, C sequences; a suffix 1 is one more entry.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from harts.chains import Chains
from harts.layout import PackedTree
from harts.transfer import send, to_int32

__all__ = [
    "Call",
    "Range",
    "Rows",
    "Seen",
    "capped_calls",
    "chain_paths",
    "cumulative",
    "forward_calls",
    "joined",
    "limits",
    "take",
    "window_paths",
]

Rows = slice | Tensor
"""Rows of a call: a range, or int64 indices."""

Range = tuple[int, int]
"""First row, and the row behind the last one."""

Seen = tuple[Range, list[Range]]
"""A range of queries, and the ranges of keys that it sees."""


@dataclass(frozen=True, eq=False)
class Call:
    """Sequences of one call of a varlen kernel.

    Attributes:
        queries, keys: their rows.
        query_lengths, key_lengths: per sequence, host side.
        cu_queries_C1, cu_keys_C1: int32, where each sequence starts, and the end: cumulative lengths.
        used_queries_C: int32, where the rows of `queries` have gaps between sequences that no sequence uses: their
            lengths, as `cu_queries_C1` then only says where they start. None where there are no gaps.
        causal: queries are the last of their keys, and see those up to themselves; else every query sees every key.
        window: keys that a query of a causal call sees at most, its own the last of them; None: all.
    """

    queries: Rows
    keys: Rows
    query_lengths: tuple[int, ...]
    key_lengths: tuple[int, ...]
    cu_queries_C1: Tensor
    cu_keys_C1: Tensor
    used_queries_C: Tensor | None
    causal: bool
    window: int | None = None

    @property
    def num_queries(self) -> int:
        """Rows of `queries`, those in gaps too."""
        if self.used_queries_C is None:
            return sum(self.query_lengths)
        assert isinstance(self.queries, slice), "gaps are gaps of a range"
        return int(self.queries.stop - self.queries.start)

    @property
    def num_keys(self) -> int:
        """Rows of `keys`."""
        return sum(self.key_lengths)


def forward_calls(packed: PackedTree, window: int | None = None, tile: int = 1) -> tuple[Call, ...]:
    """A layout (`PackedTree.layout`): chains with their whole paths, in row order, under the cap of keys.

    Args:
        packed: the rows.
        window: rows of its path that a row sees at most, itself included; keys that no row of a chain sees are left
            out.
        tile: whole tiles of so many keys are left out, counted from the root. A kernel that reads tiles of as many
            keys then adds up as it does on the whole path.
    """
    paths = chain_paths(packed.chains) if window is None else window_paths(packed.chains, window, tile)
    return tuple(capped_calls(paths, packed.key_cap, packed.device, causal=True, window=window))


def chain_paths(chains: Chains) -> Iterator[Seen]:
    """Own rows of every chain as queries, and its path as keys."""
    above_C: list[list[Range]] = []
    start_C, outside = chains.start_C1.tolist(), chains.outside
    for (start, stop), parent, parent_row in zip(
        pairwise(start_C), chains.parent_C.tolist(), chains.parent_row_C.tolist(), strict=True
    ):
        if parent >= 0:
            above_C.append([*above_C[parent], (start_C[parent], parent_row + 1)])
        else:
            above_C.append([(0, parent_row + 1)] if parent_row >= 0 else [])
        yield (start - outside, stop - outside), [*above_C[-1], (start, stop)]


def limits(window: int | None, *more: int) -> tuple[int, ...]:
    """Options of a layout that has some for a window: none without one, so that it is the same layout as without."""
    return () if window is None else (window, *more)


def window_paths(chains: Chains, window: int, tile: int = 1) -> Iterator[Seen]:
    """`chain_paths` without the keys that lie before the window of a chain's first row; see `forward_calls`."""
    for queries, keys in chain_paths(chains):
        first = sum(stop - start for start, stop in keys) - (queries[1] - queries[0])
        unseen = max(first + 1 - window, 0) // tile * tile
        yield queries, list(_behind(keys, unseen))


def _behind(ranges: Iterable[Range], rows: int) -> Iterator[Range]:
    """Ranges without their first rows."""
    for start, stop in ranges:
        if stop - start > rows:
            yield start + rows, stop
        rows = max(rows - (stop - start), 0)


def capped_calls(
    sequences: Iterable[Seen],
    key_cap: int,
    device: torch.device,
    *,
    causal: bool,
    gaps: bool = False,
    window: int | None = None,
) -> Iterator[Call]:
    """Calls of as many sequences as the cap allows; a single sequence may have more keys.

    Args:
        sequences: those of a call have no query in common, and come in row order.
        key_cap: most keys of a call.
        device: where the index tensors go.
        causal: see `Call`.
        gaps: the kernel can leave rows between sequences out, so that queries are a view where gaps are small.
        window: see `Call`.
    """
    part: list[Seen] = []
    keys = 0
    for sequence in sequences:
        length = sum(stop - start for start, stop in sequence[1])
        if part and keys + length > key_cap:
            yield _call(part, device, causal, gaps, window)
            part, keys = [], 0
        part.append(sequence)
        keys += length
    yield _call(part, device, causal, gaps, window)


def _call(sequences: Sequence[Seen], device: torch.device, causal: bool, gaps: bool, window: int | None) -> Call:
    ranges = [queries for queries, _ in sequences]
    query_lengths = tuple(stop - start for start, stop in ranges)
    key_lengths = tuple(sum(stop - start for start, stop in keys) for _, keys in sequences)
    first, last = ranges[0][0], ranges[-1][1]
    view = gaps and joined(ranges) is None and last - first <= 2 * sum(query_lengths)
    starts = [start - first for start, _ in ranges]
    return Call(
        queries=slice(first, last) if view else _rows(ranges, device),
        keys=_rows([each for _, keys in sequences for each in keys], device),
        query_lengths=query_lengths,
        key_lengths=key_lengths,
        cu_queries_C1=to_int32([*starts, last - first], device) if view else cumulative(query_lengths, device),
        cu_keys_C1=cumulative(key_lengths, device),
        used_queries_C=to_int32(query_lengths, device) if view else None,
        causal=causal,
        window=window,
    )


def take(x: Tensor, rows: Rows, dim: int = 0) -> Tensor:
    """Rows of a tensor: a view of a range, else gathered."""
    if isinstance(rows, Tensor):
        return x.index_select(dim, rows)
    return x.narrow(dim, rows.start, rows.stop - rows.start)


def joined(ranges: Sequence[Range]) -> Range | None:
    """The range that ranges join to, if they do."""
    return (ranges[0][0], ranges[-1][1]) if all(before[1] == after[0] for before, after in pairwise(ranges)) else None


def _rows(ranges: Sequence[Range], device: torch.device) -> Rows:
    """One range where the ranges join, else their rows, counted on the device."""
    whole = joined(ranges)
    if whole is not None:
        return slice(*whole)
    start, stop = np.array(ranges, dtype=np.int64).T
    length = stop - start
    shift = send(torch.from_numpy(np.stack([start - (np.cumsum(length) - length), length])), device)
    total = int(length.sum())
    return torch.repeat_interleave(shift[0], shift[1], output_size=total) + torch.arange(total, device=device)


def cumulative(lengths: Sequence[int], device: torch.device) -> Tensor:
    """int32 [C+1]: where each sequence starts, and the end."""
    return to_int32(np.append(0, np.cumsum(lengths)), device)
