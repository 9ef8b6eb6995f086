"""Tree convolution in plain PyTorch: one gather per tap.

Shape suffixes: T rows, A rows outside, D channels, W taps.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad, silu

from harts.ops.causal_conv1d.layout import ConvLayout

__all__ = ["causal_conv1d_reference"]


def causal_conv1d_reference(
    x_TD: Tensor,
    context_AD: Tensor | None,
    weight_DW: Tensor,
    bias_D: Tensor | None,
    layout: ConvLayout,
    activate: bool,
) -> Tensor:
    """See `harts.ops.causal_conv1d`; sums in the dtype of x, at least in fp32."""
    dtype = torch.promote_types(x_TD.dtype, torch.float32)
    taps = weight_DW.shape[1]
    weight_DW = weight_DW.to(dtype)
    read = x_TD if context_AD is None else torch.cat([x_TD, context_AD])
    padded = pad(read, (0, 0, 0, 1))  # the last row is zero: what lies before a root
    y_TD = x_TD * weight_DW[:, taps - 1]
    for above in range(1, taps):
        y_TD = y_TD + padded.index_select(0, layout.ancestor_WT[above - 1]) * weight_DW[:, taps - 1 - above]
    if bias_D is not None:
        y_TD = y_TD + bias_D
    return (silu(y_TD) if activate else y_TD).to(x_TD.dtype)
