"""Duplicating rows, and summing what comes back in a fixed order.

PyTorch's own index backward adds with atomics on a GPU, in an order that changes between runs, or sorts the index anew
in every backward. Here the index is sorted once, and one program per row adds that row's entries in their order.

Shape suffixes: T rows, K gathered rows, X what a row holds. A suffix 1 is one more entry.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from harts.ops.dispatch import choose
from harts.ops.requirements import require_triton
from harts.ops.rows.reference import segment_sum_reference

__all__ = ["RowGroups", "RowIndex", "gather_rows", "group_rows", "segment_sum"]


@dataclass(frozen=True, eq=False)
class RowGroups:
    """Where each row occurs in an index.

    Attributes:
        order_K: int64 [K]: places in the index, by row, those of one row ascending.
        offset_T1: int64 [T + 1]: places of row t are `order_K[offset_T1[t]:offset_T1[t + 1]]`.
    """

    order_K: Tensor
    offset_T1: Tensor

    @property
    def num_rows(self) -> int:
        """T."""
        return len(self.offset_T1) - 1


@dataclass(frozen=True, eq=False)
class RowIndex:
    """Rows to be gathered, and, sorted when first asked for, where each row occurs among them.

    Attributes:
        index_K: int64 [K], entries in [0, T]; T itself means "no row".
        num_rows: T.
    """

    index_K: Tensor
    num_rows: int

    @cached_property
    def groups(self) -> RowGroups:
        """The places of each row; "no row" belongs to no group."""
        with torch.inference_mode(False):
            return group_rows(self.index_K, self.num_rows)

    def __len__(self) -> int:
        return len(self.index_K)


def group_rows(index_K: Tensor, num_rows: int) -> RowGroups:
    """Sorts an index by row, on its device.

    Args:
        index_K: int64 [K], entries in [0, num_rows]; `num_rows` itself means "no row" and belongs to no group.
        num_rows: T.
    """
    sorted_K, order_K = torch.sort(index_K, stable=True)
    rows_T1 = torch.arange(num_rows + 1, device=index_K.device)
    return RowGroups(order_K, torch.searchsorted(sorted_K, rows_T1))


def gather_rows(x_TX: Tensor, index: RowIndex, *, missing: bool = False, impl: str | None = None) -> Tensor:
    """`x_TX.index_select(0, index)` with a backward that adds in a fixed order: equal runs give equal bits.

    Args:
        x_TX: [T, ...].
        index: K entries in [0, T). They are not checked on a GPU.
        missing: entries may be T, which reads a row of zeros.
        impl: `"reference"`: plain PyTorch, any device; `"triton"`: CUDA tensors. None takes the one that is
            deterministic on the device of `x_TX`: `"triton"` on CUDA, else `"reference"`.

    Returns:
        [K, ...].

    Raises:
        ValueError: the index is of another number of rows or device than x_TX, or an unknown `impl`.
        ImportError: `"triton"` without Triton.
    """
    index_K = index.index_K
    if index.num_rows != len(x_TX) or index_K.dtype != torch.int64 or index_K.device != x_TX.device:
        raise ValueError(
            f"gather_rows: expected an int64 index into {len(x_TX)} rows on {x_TX.device}, got one of "
            f"{index_K.dtype} into {index.num_rows} rows on {index_K.device}"
        )
    _takes_triton("gather_rows", impl, x_TX)  # refuses what only the backward would run
    return _GatherRows.apply(x_TX, index, missing, impl)  # type: ignore[no-any-return, no-untyped-call]


def segment_sum(values_KX: Tensor, groups: RowGroups, *, out: Tensor | None = None, impl: str | None = None) -> Tensor:
    """Sum of the values of each row's group, entries added one by one in their order, in fp32 (fp64 for fp64).

    Args:
        values_KX: [K, ...].
        groups: from `group_rows`.
        out: [T, ...], contiguous, added to in place (each row: what it holds, then the entries) and returned.
        impl: as for `gather_rows`.

    Returns:
        [T, ...], in the dtype of the values, or `out`.

    Raises:
        ValueError: values and groups are of different lengths.
    """
    if len(values_KX) != len(groups.order_K):
        raise ValueError(f"segment_sum: expected {len(groups.order_K)} values, got {len(values_KX)}")
    if _takes_triton("segment_sum", impl, values_KX):
        from harts.ops.rows.triton import segment_sum_triton

        return segment_sum_triton(values_KX, groups.order_K, groups.offset_T1, out)
    return segment_sum_reference(values_KX, groups.order_K, groups.offset_T1, out)


def _default(tensor: Tensor) -> str:
    return "triton" if tensor.is_cuda else "reference"


def _takes_triton(op: str, impl: str | None, tensor: Tensor) -> bool:
    impl = _default(tensor) if impl is None else impl
    takes = choose(op, impl, {"reference": False, "triton": True})
    if takes:
        require_triton(op, tensor.device)
    return takes


class _GatherRows(torch.autograd.Function):
    """Keeps the index alone."""

    @staticmethod
    def forward(ctx: Any, x_TX: Tensor, index: RowIndex, missing: bool, impl: str | None) -> Tensor:
        ctx.index, ctx.impl = index, impl
        if missing:
            x_TX = torch.cat([x_TX, x_TX.new_zeros(1, *x_TX.shape[1:])])
        return x_TX.index_select(0, index.index_K)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad_KX: Tensor) -> tuple[Tensor, None, None, None]:
        return segment_sum(grad_KX, ctx.index.groups, impl=ctx.impl), None, None, None
