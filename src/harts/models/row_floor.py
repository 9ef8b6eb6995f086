"""Dummy rows that fill a small microbatch up, so that a row's bits do not depend on how many rows come with it.

A BLAS picks the kernel of a matrix product by its number of rows, too, and kernels add in different orders. So a
microbatch of fewer rows than `Kernels.min_rows` runs with dummy rows behind its own. What works row by row runs on all
of them; what looks at other rows (tree ops, router statistics, the head) gets those of the tree alone. Dummy rows read
nothing and are read by nothing, so that their gradients are exactly zero.

Shape suffixes: T rows of the tree, F rows with the dummy ones (T where there are none), X what a row holds.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

__all__ = ["cut_rows", "fill_rows", "repeat_first"]


def cut_rows(x_FX: Tensor, rows: int) -> Tensor:
    """The rows of the tree, [T, ...]: a view; the tensor itself where there are no dummy rows."""
    return x_FX if len(x_FX) == rows else x_FX[:rows]


def fill_rows(x_TX: Tensor, rows: int, *, value: float = 0) -> Tensor:
    """Rows of the tree with dummy rows of one value behind them, [F, ...]; the tensor itself where none is missing."""
    if len(x_TX) == rows:
        return x_TX
    return pad(x_TX, (0, 0) * (x_TX.ndim - 1) + (0, rows - len(x_TX)), value=value)


def repeat_first(x_TX: Tensor, rows: int) -> Tensor:
    """The same with copies of the first row, for a model's inputs: whatever they go through is as finite as that is."""
    if len(x_TX) == rows:
        return x_TX
    return torch.cat([x_TX, x_TX[:1].expand(rows - len(x_TX), *x_TX.shape[1:])])
