"""Tree convolution in plain PyTorch: one gather per tap.

Shape suffixes: T rows, D channels, W taps.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad, silu

from harts.layout import PackedTree

__all__ = ["causal_conv1d_reference"]


def causal_conv1d_reference(
    x_TD: Tensor, weight_DW: Tensor, bias_D: Tensor | None, packed: PackedTree, activate: bool
) -> Tensor:
    """See `harts.ops.causal_conv1d`; sums in the dtype of x, at least in fp32."""
    dtype = torch.promote_types(x_TD.dtype, torch.float32)
    taps = weight_DW.shape[1]
    weight_DW = weight_DW.to(dtype)
    padded = pad(x_TD, (0, 0, 0, 1))  # row T is zero: what lies before a root
    y_TD = x_TD * weight_DW[:, taps - 1]
    for above in range(1, taps):
        y_TD = y_TD + padded.index_select(0, packed.ancestor_3T[above - 1]) * weight_DW[:, taps - 1 - above]
    if bias_D is not None:
        y_TD = y_TD + bias_D
    return (silu(y_TD) if activate else y_TD).to(x_TD.dtype)
