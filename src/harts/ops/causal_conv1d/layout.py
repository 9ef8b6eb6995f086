"""What a short convolution reads of a tree: the ancestors of every row, a few steps up.

Shape suffixes: T rows, A rows outside that are read, W taps, P rows whose readers are listed, Q entries in their lists.
A suffix 1 is one more entry.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from harts.layout import PackedTree
from harts.transfer import to_int64

__all__ = ["ConvLayout", "Readers", "conv_layout", "outside_rows"]

Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Readers:
    """Rows, and everything that reads them from below.

    Attributes:
        row_P: int64 [P]: the rows, ascending.
        offset_P1: int64 [P + 1]: entries of row p in the lists.
        reader_Q, above_Q: int64: a row that reads it, and how far above the reader it lies (1 or more); by distance,
            then by reader.
    """

    row_P: Tensor
    offset_P1: Tensor
    reader_Q: Tensor
    above_Q: Tensor


@dataclass(frozen=True, eq=False)
class ConvLayout:
    """Ancestors of the rows of a layout.

    Attributes:
        ancestor_WT: int64 [W - 1, T]: the rows 1, 2, ... above each row: own rows `0:T`, row i of those outside as
            `T + i`, and `T + A` where there is none.
        num_outside: A, host side.
    """

    ancestor_WT: Tensor
    num_outside: int

    @cached_property
    def across(self) -> Readers:
        """Own rows with a reader that does not lie right behind them; those that do are in the lists too."""
        taps, rows = self.ancestor_WT.shape
        above_W1 = torch.arange(1, taps + 1, device=self.ancestor_WT.device)[:, None]
        behind_WT = torch.arange(rows, device=above_W1.device) - above_W1
        return self._readers(self.ancestor_WT[(self.ancestor_WT < rows) & (self.ancestor_WT != behind_WT)])

    @cached_property
    def outside(self) -> Readers:
        """All rows outside."""
        rows = self.ancestor_WT.shape[1]
        return self._readers(torch.arange(rows, rows + self.num_outside, device=self.ancestor_WT.device))

    def _readers(self, rows_X: Tensor) -> Readers:
        with torch.inference_mode(False):
            listed = torch.zeros(
                self.ancestor_WT.shape[1] + self.num_outside + 1, dtype=torch.bool, device=rows_X.device
            )
            listed[rows_X] = True
            row_P = listed.nonzero().squeeze(1)
            above_Q, reader_Q = listed[self.ancestor_WT].nonzero().unbind(1)
            row_Q, order_Q = torch.sort(self.ancestor_WT[above_Q, reader_Q], stable=True)
            offset_P = torch.searchsorted(row_Q, row_P)
            return Readers(
                row_P=row_P,
                offset_P1=torch.cat([offset_P, offset_P.new_tensor([len(row_Q)])]),
                reader_Q=reader_Q[order_Q].contiguous(),
                above_Q=(above_Q[order_Q] + 1).contiguous(),
            )


def outside_rows(packed: PackedTree, taps: int) -> Ints:
    """int64 [A]: the rows outside that a convolution of so many taps reads, as rows of the tree, ascending."""
    return packed.outside_D[_read(packed, taps)[1]]


def conv_layout(packed: PackedTree, taps: int) -> ConvLayout:
    """A layout (`PackedTree.layout`): the `taps - 1` ancestors of every row."""
    ancestor_WT, read_A = _read(packed, taps)
    outside, rows = packed.num_outside, packed.num_rows
    place_D = np.full(outside + 1, rows + len(read_A), np.int64)  # the last one is "none", -1
    place_D[read_A] = rows + np.arange(len(read_A))
    mapped = np.where(ancestor_WT >= outside, ancestor_WT - outside, place_D[np.minimum(ancestor_WT, outside)])
    return ConvLayout(to_int64(mapped, packed.device), len(read_A))


def _read(packed: PackedTree, taps: int) -> tuple[Ints, Ints]:
    """Ancestors of every row, numbered as in `harts.chains` (-1: none), and those outside that are read."""
    outside = packed.num_outside
    above = np.concatenate([np.arange(-1, outside - 1), packed.chains.parent_T, [-1]])  # the last one is read for -1
    ancestors: list[Ints] = []
    for _ in range(taps - 1):
        ancestors.append(above[ancestors[-1]] if ancestors else packed.chains.parent_T)
    ancestor_WT = np.stack(ancestors) if ancestors else np.zeros((0, packed.num_rows), np.int64)
    read = ancestor_WT[(ancestor_WT >= 0) & (ancestor_WT < outside)]
    return ancestor_WT, np.unique(read)
