"""Paths as pages of keys, for kernels that read keys page by page: nothing is gathered for each chain.

A page is as many rows as a kernel reads at once, a tile. A tile of a path whose rows follow each other is a page where
they lie, at whatever row it starts: pages overlap, one starts at every row. A tile in which a path goes from one chain
to another is copied behind the rows of the tree; chains below read the same copy. Each chain has at most one such tile
of its own. A tile has the same rows in the same places as in a batch of separate rows, so results have the same bits.

Shape suffixes: T rows, C chains, P pages of the longest path, X copied rows, N pages, R rows of a page, G heads, D head
size.
"""

from dataclasses import dataclass
from itertools import pairwise
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from harts.blocks import BlockTree
from harts.layout import PackedTree
from harts.ops.attention.calls import cumulative
from harts.transfer import send

__all__ = ["KeyPages", "key_pages"]

Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class KeyPages:
    """The pages of the paths of consecutive chains.

    Attributes:
        page_rows: rows of a page.
        queries: the chains' own rows.
        copied_X: int64 [X], rows that are copied behind the tree's rows, page after page.
        first_row_CP: int32 [C, P], the first row of every page of a chain's path, among rows and copies; 0 behind its
            last page.
        query_lengths, key_lengths: own rows and path length of each chain, host side.
        cu_queries_C1, key_length_C: int32, cumulative own rows, and path lengths.
    """

    page_rows: int
    queries: slice
    copied_X: Tensor
    first_row_CP: Tensor
    query_lengths: tuple[int, ...]
    key_lengths: tuple[int, ...]
    cu_queries_C1: Tensor
    key_length_C: Tensor

    def view(self, x_TGD: Tensor) -> Tensor:
        """Keys or values [T, G, D] as pages [N, R, G, D], one for every row and copy: overlapping views of one tensor,
        to which the T rows are copied once for each part of the chains.

        What lies behind the last copy, and may be read as part of a page but is never seen, is zero.
        """
        rows, copied = len(x_TGD), len(self.copied_X)
        filled = x_TGD.new_empty(rows + copied + self.page_rows - 1, *x_TGD.shape[1:])
        filled[:rows] = x_TGD
        torch.index_select(x_TGD, 0, self.copied_X, out=filled[rows : rows + copied])
        filled[rows + copied :] = 0
        return filled.unfold(0, self.page_rows, 1).movedim(-1, 1)


_PAGES: "WeakKeyDictionary[PackedTree, dict[int, tuple[KeyPages, ...]]]" = WeakKeyDictionary()


def key_pages(packed: PackedTree, page_rows: int) -> tuple[KeyPages, ...]:
    """The pages of a layout's paths, in row order; kept as long as the layout lives.

    Chains come in parts, most often one. The copied tiles of a part's own chains have at most as many rows as the
    layout's cap of keys (one tile at least); those of chains above, which it copies again, at most as many as a path.
    """
    kept = _PAGES.setdefault(packed, {})
    if page_rows not in kept:
        copied_NR, first_row_CP = _lay_pages(packed.blocks, page_rows)
        own_C = np.cumsum(packed.blocks.first_depth_C % page_rows > 0) - 1  # last tile copied up to each chain
        part_C = np.maximum(own_C, 0) // max(packed.key_cap // page_rows, 1)
        starts = np.flatnonzero(np.diff(part_C, prepend=-1)).tolist()
        with torch.inference_mode(False):
            kept[page_rows] = tuple(
                _part(packed, copied_NR, first_row_CP, range(*chains))
                for chains in pairwise([*starts, packed.blocks.num_chains])
            )
    return kept[page_rows]


def _part(packed: PackedTree, copied_NR: Ints, first_row_CP: Ints, chains: range) -> KeyPages:
    """The pages of some chains, with the copies that these read."""
    num_rows, page_rows = packed.num_rows, copied_NR.shape[1]
    which = slice(chains.start, chains.stop)
    own_start, length_C = packed.blocks.own_start_C1[chains.start : chains.stop + 1], packed.blocks.length_C[which]
    first_row_CP = first_row_CP[which].copy()
    is_copy = first_row_CP >= num_rows
    read, place = np.unique((first_row_CP[is_copy] - num_rows) // page_rows, return_inverse=True)
    first_row_CP[is_copy] = num_rows + page_rows * place
    query_lengths = tuple(np.diff(own_start).tolist())
    return KeyPages(
        page_rows=page_rows,
        queries=slice(int(own_start[0]), int(own_start[-1])),
        copied_X=send(torch.from_numpy(copied_NR[read].reshape(-1)), packed.device),
        first_row_CP=send(torch.from_numpy(first_row_CP.astype(np.int32)), packed.device),
        query_lengths=query_lengths,
        key_lengths=tuple(length_C.tolist()),
        cu_queries_C1=cumulative(query_lengths, packed.device),
        key_length_C=send(torch.from_numpy(length_C.astype(np.int32)), packed.device),
    )


def _lay_pages(blocks: BlockTree, page_rows: int) -> tuple[Ints, Ints]:
    """Rows of copied pages, [N, R], and the first row of every page of every chain, [C, P]."""
    first_row_CP = np.zeros((blocks.num_chains, -(-int(blocks.length_C.max()) // page_rows)), np.int64)
    copies: list[Ints] = []
    chains = zip(*(x.tolist() for x in (blocks.own_start_C1[:-1], blocks.first_depth_C, blocks.length_C)), strict=True)
    for chain, (start, depth, length) in enumerate(chains):
        pages, (page, above) = first_row_CP[chain], divmod(depth, page_rows)
        if depth:
            theirs = first_row_CP[blocks.parent_C[chain]]
            pages[:page] = theirs[:page]
        if above:  # rows of the page that lie above the chain
            at = int(theirs[page]) - blocks.num_rows
            # what stays `start` lies behind the chain, and is never seen
            copy = np.full(page_rows, start, np.int64)
            copy[:above] = copies[at // page_rows][:above] if at >= 0 else theirs[page] + np.arange(above)
            own = min(length - depth, page_rows - above)
            copy[above : above + own] = start + np.arange(own)
            pages[page] = blocks.num_rows + page_rows * len(copies)
            copies.append(copy)
            page += 1
        last = -(-length // page_rows)
        pages[page:last] = start - depth + page_rows * np.arange(page, last)
    return np.array(copies, np.int64).reshape(-1, page_rows), first_row_CP
