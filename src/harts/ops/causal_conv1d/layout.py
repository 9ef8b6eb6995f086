"""What a short convolution reads of a tree: the ancestors of every row, a few steps up.

Shape suffixes: T rows, A rows outside that are read, W taps.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from harts.layout import PackedTree
from harts.transfer import to_int64

__all__ = ["ConvLayout", "conv_layout", "outside_rows"]

Ints = NDArray[np.int64]


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
