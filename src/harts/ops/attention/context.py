"""What attention with a window reads of the rows outside a piece: the last ones above each chain that leaves them.

Shape suffixes: D rows outside, W of them that are read.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from harts.layout import PackedTree
from harts.transfer import to_int64

__all__ = ["WindowContext", "window_context", "window_reads"]

Ints = NDArray[np.int64]


def window_reads(packed: PackedTree, window: int) -> Ints:
    """Rows outside, counted from 0, ascending, that own rows see; int64 [W].

    A chain that leaves the rows outside sees the `window - 1` above its first row; chains below it see fewer of them.

    Args:
        packed: a piece.
        window: rows of its path that a row sees at most, itself included.
    """
    parent_row_C = np.unique(packed.chains.parent_row_C)
    last_X = parent_row_C[(parent_row_C >= 0) & (parent_row_C < packed.num_outside)]
    edges_D1 = np.zeros(packed.num_outside + 1, np.int64)
    np.add.at(edges_D1, np.maximum(last_X + 2 - window, 0), 1)
    np.add.at(edges_D1, last_X + 1, -1)
    return np.flatnonzero(np.cumsum(edges_D1[:-1]) > 0) if window > 1 else np.zeros(0, np.int64)


@dataclass(frozen=True, eq=False)
class WindowContext:
    """Where the rows that are read lie among the rows outside.

    Attributes:
        place_W: int64 [W], ascending.
        outside: D.
    """

    place_W: Tensor
    outside: int

    def spread(self, values_WX: Tensor) -> Tensor:
        """Entries of the rows that are read, [W, ...], as those of all rows outside, [D, ...]; zero where none is read.

        Differentiable.
        """
        zeros_DX = values_WX.new_zeros(self.outside, *values_WX.shape[1:])
        return torch.index_copy(zeros_DX, 0, self.place_W, values_WX)


def window_context(packed: PackedTree, window: int) -> WindowContext:
    """A layout (`PackedTree.layout`)."""
    return WindowContext(to_int64(window_reads(packed, window), packed.device), packed.num_outside)
