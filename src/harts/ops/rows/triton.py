# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Segment sums: one program per row (or few rows) walks through that row's entries in their order.

Shape suffixes: T rows, K values, X what a row holds.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["segment_sum_triton"]


def segment_sum_triton(values_KX: Tensor, order_K: Tensor, offset_T1: Tensor, out: Tensor | None) -> Tensor:
    """See `harts.ops.rows.segment_sum`."""
    rows = len(offset_T1) - 1
    values_KX = values_KX.contiguous()
    total_TX = values_KX.new_empty(rows, *values_KX.shape[1:]) if out is None else out
    if not total_TX.is_contiguous():
        raise ValueError("segment_sum: expected a contiguous out")
    size = values_KX[:1].numel() if len(values_KX) else total_TX[:1].numel()
    if rows == 0 or size == 0:
        return total_TX
    block_size = min(triton.next_power_of_2(size), 1024)
    block_rows = max(1, 256 // block_size)
    grid = (triton.cdiv(rows, block_rows), triton.cdiv(size, block_size))
    _segment_sum[grid](
        values_KX,
        order_K,
        offset_T1,
        total_TX,
        rows,
        size,
        ADD=out is not None,
        SUM=tl.float64 if values_KX.dtype == torch.float64 else tl.float32,
        BLOCK_T=block_rows,
        BLOCK_X=block_size,
        num_warps=4 if block_size >= 512 else 2,
    )
    return total_TX


@triton.jit(do_not_specialize=["rows"])
def _segment_sum(
    values_ptr,
    order_ptr,
    offset_ptr,
    total_ptr,
    rows,
    size,
    ADD: tl.constexpr,
    SUM: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_X: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    column = tl.program_id(1) * BLOCK_X + tl.arange(0, BLOCK_X)
    inside = (row < rows)[:, None] & (column < size)[None, :]
    start = tl.load(offset_ptr + row, mask=row < rows, other=0)
    stop = tl.load(offset_ptr + row + 1, mask=row < rows, other=0)
    place = row[:, None] * size + column[None, :]
    if ADD:
        inside = inside & (start < stop)[:, None]  # the others stay as they are
        total = tl.load(total_ptr + place, mask=inside, other=0.0).to(SUM)
    else:
        total = tl.zeros([BLOCK_T, BLOCK_X], SUM)
    for entry in range(tl.max(stop - start)):
        here = start + entry < stop
        source = tl.load(order_ptr + start + entry, mask=here, other=0)
        mask = here[:, None] & inside
        value = tl.load(values_ptr + source[:, None] * size + column[None, :], mask=mask, other=0.0)
        total += value.to(SUM)
    tl.store(total_ptr + place, total.to(total_ptr.dtype.element_ty), mask=inside)
