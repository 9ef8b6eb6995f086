"""Segment sums in plain PyTorch.

Shape suffixes: T rows, K values, X what a row holds.
"""

import torch
from torch import Tensor

__all__ = ["segment_sum_reference"]


def segment_sum_reference(values_KX: Tensor, order_K: Tensor, offset_T1: Tensor, out: Tensor | None) -> Tensor:
    """See `harts.ops.rows.segment_sum`. Deterministic on a CPU, where index_add_ adds one entry after another."""
    dtype = torch.promote_types(values_KX.dtype, torch.float32)
    rows = len(offset_T1) - 1
    if out is None:
        total_TX = values_KX.new_zeros(rows, *values_KX.shape[1:], dtype=dtype)
    else:
        total_TX = out.to(dtype)
    row_K = torch.arange(rows, device=order_K.device).repeat_interleave(offset_T1.diff())
    taken_K = order_K[offset_T1[0] : offset_T1[-1]]
    total_TX = total_TX.index_add(0, row_K, values_KX.index_select(0, taken_K).to(dtype))
    return total_TX.to(values_KX.dtype) if out is None else out.copy_(total_TX)
