"""Paths as pages of keys, for kernels that read keys page by page: nothing is gathered for each chain.

A page is as many rows as a kernel reads at once, a tile. A tile of a path whose rows follow each other is a page where
they lie, at whatever row it starts: pages overlap, one starts at every row. A tile in which a path goes from one chain
to another is copied behind the rows of the tree; chains below read the same copy. Each chain has at most one such tile
of its own. A tile has the same rows in the same places as in a batch of separate rows, so results have the same bits.

Shape suffixes: T rows (with those outside in front), C chains, P pages of the longest path, X copied rows, N pages, R
rows of a page, G heads, D head size.
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from harts.chains import Chains
from harts.layout import PackedTree
from harts.ops.attention.calls import cumulative
from harts.transfer import to_int32, to_int64

__all__ = ["KeyPages", "key_pages"]

Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class KeyPages:
    """The pages of the paths of consecutive chains.

    Attributes:
        page_rows: rows of a page.
        queries: the chains' own rows.
        copied_X: int64 [X], rows that are copied behind the others, page after page.
        first_row_CP: int32 [C, P], the first row of every page of a chain's path, among rows and copies; 0 behind its
            last page.
        query_lengths, key_lengths: own rows and path length of each chain, host side.
        cu_queries_C1, key_length_C: int32, cumulative own rows, and path lengths.
        window: rows of its path that a row sees at most, itself included; None: all.
    """

    page_rows: int
    queries: slice
    copied_X: Tensor
    first_row_CP: Tensor
    query_lengths: tuple[int, ...]
    key_lengths: tuple[int, ...]
    cu_queries_C1: Tensor
    key_length_C: Tensor
    window: int | None = None

    def view(self, *parts: Tensor) -> Tensor:
        """Keys or values as pages [N, R, G, D], one for every row and copy: overlapping views of one tensor, to which
        the rows are copied once for each part of the chains.

        What lies behind the last copy, and may be read as part of a page but is never seen, is zero.

        Args:
            parts: the T rows in one tensor [T, G, D], or in several, one after the other.
        """
        rows, copied = sum(map(len, parts)), len(self.copied_X)
        filled = parts[0].new_empty(rows + copied + self.page_rows - 1, *parts[0].shape[1:])
        torch.cat(parts, out=filled[:rows])
        torch.index_select(filled[:rows], 0, self.copied_X, out=filled[rows : rows + copied])
        filled[rows + copied :] = 0
        return filled.unfold(0, self.page_rows, 1).movedim(-1, 1)


def key_pages(packed: PackedTree, page_rows: int, window: int | None = None) -> tuple[KeyPages, ...]:
    """A layout (`PackedTree.layout`): the pages of the chains' paths, in row order.

    Chains come in parts, most often one. The copied tiles of a part's own chains have at most as many rows as the
    layout's cap of keys (one tile at least); those of chains above, which it copies again, at most as many as a path.
    """
    chains = packed.chains.with_outside()
    skipped = chains.num_chains - packed.chains.num_chains  # the rows outside ask nothing
    copied_NR, first_row_CP = _lay_pages(chains, page_rows)
    own_C = np.cumsum(chains.depth_C % page_rows > 0)[skipped:] - 1  # last tile copied up to each chain
    part_C = np.maximum(own_C, 0) // max(packed.key_cap // page_rows, 1)
    starts = np.flatnonzero(np.diff(part_C, prepend=-1)).tolist()
    return tuple(
        _part(packed, copied_NR, first_row_CP[skipped:], range(*part), window)
        for part in pairwise([*starts, packed.chains.num_chains])
    )


def _part(packed: PackedTree, copied_NR: Ints, first_row_CP: Ints, part: range, window: int | None) -> KeyPages:
    """The pages of some chains, with the copies that these read."""
    chains, page_rows = packed.chains, copied_NR.shape[1]
    num_rows = packed.num_outside + packed.num_rows
    start_C1, length_C = chains.start_C1[part.start : part.stop + 1], chains.length_C[part.start : part.stop]
    first_row_CP = first_row_CP[part.start : part.stop].copy()
    is_copy = first_row_CP >= num_rows
    read, place = np.unique((first_row_CP[is_copy] - num_rows) // page_rows, return_inverse=True)
    first_row_CP[is_copy] = num_rows + page_rows * place
    query_lengths = tuple(np.diff(start_C1).tolist())
    return KeyPages(
        page_rows=page_rows,
        queries=slice(int(start_C1[0]) - chains.outside, int(start_C1[-1]) - chains.outside),
        copied_X=to_int64(copied_NR[read].reshape(-1), packed.device),
        first_row_CP=to_int32(first_row_CP, packed.device),
        query_lengths=query_lengths,
        key_lengths=tuple(length_C.tolist()),
        cu_queries_C1=cumulative(query_lengths, packed.device),
        key_length_C=to_int32(length_C, packed.device),
        window=window,
    )


def _lay_pages(chains: Chains, page_rows: int) -> tuple[Ints, Ints]:
    """Rows of copied pages, [N, R], and the first row of every page of every chain, [C, P]."""
    num_rows = chains.num_rows
    first_row_CP = np.zeros((chains.num_chains, -(-int(chains.length_C.max()) // page_rows)), np.int64)
    copies: list[Ints] = []
    ranges = zip(*(x.tolist() for x in (chains.start_C1[:-1], chains.depth_C, chains.length_C)), strict=True)
    for chain, (start, depth, length) in enumerate(ranges):
        pages, (page, above) = first_row_CP[chain], divmod(depth, page_rows)
        if depth:
            theirs = first_row_CP[chains.parent_C[chain]]
            pages[:page] = theirs[:page]
        if above:  # rows of the page that lie above the chain
            at = int(theirs[page]) - num_rows
            # what stays `start` lies behind the chain, and is never seen
            copy = np.full(page_rows, start, np.int64)
            copy[:above] = copies[at // page_rows][:above] if at >= 0 else theirs[page] + np.arange(above)
            own = min(length - depth, page_rows - above)
            copy[above : above + own] = start + np.arange(own)
            pages[page] = num_rows + page_rows * len(copies)
            copies.append(copy)
            page += 1
        last = -(-length // page_rows)
        pages[page:last] = start - depth + page_rows * np.arange(page, last)
    return np.array(copies, np.int64).reshape(-1, page_rows), first_row_CP
