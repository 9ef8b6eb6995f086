"""The fused ops in plain PyTorch, with the casts of the transformers modules that they stand for.

Shape suffixes: X any leading dimensions, D channels, T rows, H heads, R rotated channels of a head.
"""

import torch
from torch import Tensor
from torch.nn.functional import silu

__all__ = [
    "gated_rms_norm_reference",
    "rms_norm_reference",
    "rotary_reference",
    "sigmoid_gate_reference",
    "swiglu_halves_reference",
    "swiglu_reference",
]


def rms_norm_reference(x_XD: Tensor, weight_D: Tensor, eps: float, zero_centred: bool) -> Tensor:
    """Qwen3_5RMSNorm where zero-centred (the product is rounded), else Qwen3RMSNorm (the factor meets rounded x)."""
    normed_XD = _normed(x_XD, eps)
    if zero_centred:
        return (normed_XD * (1.0 + _wide(weight_D))).to(x_XD.dtype)
    return weight_D * normed_XD.to(x_XD.dtype)


def gated_rms_norm_reference(x_XD: Tensor, gate_XD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """Qwen3_5RMSNormGated."""
    normed_XD = weight_D * _normed(x_XD, eps).to(x_XD.dtype)
    return (normed_XD * silu(_wide(gate_XD))).to(x_XD.dtype)


def swiglu_reference(gate_XD: Tensor, up_XD: Tensor) -> Tensor:
    """The middle of Qwen3_5MLP."""
    return silu(gate_XD) * up_XD


def swiglu_halves_reference(gate_up_X2D: Tensor) -> Tensor:
    """The middle of an expert, whose gate and up projection are one."""
    gate_XD, up_XD = gate_up_X2D.chunk(2, -1)
    return silu(gate_XD) * up_XD


def sigmoid_gate_reference(x_XD: Tensor, gate_XD: Tensor) -> Tensor:
    """The end of Qwen3_5Attention."""
    return x_XD * torch.sigmoid(gate_XD)


def rotary_reference(x_THD: Tensor, cos_TR: Tensor, sin_TR: Tensor) -> Tensor:
    """apply_rotary_pos_emb of Qwen3.5."""
    rotated = cos_TR.shape[-1]
    turned_THR, passed = torch.split(x_THD, [rotated, x_THD.shape[-1] - rotated], -1)
    low, high = turned_THR.chunk(2, -1)
    crossed_THR = torch.cat([-high, low], -1)
    return torch.cat([turned_THR * cos_TR[:, None] + crossed_THR * sin_TR[:, None], passed], -1)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _normed(x_XD: Tensor, eps: float) -> Tensor:
    wide_XD = _wide(x_XD)
    return wide_XD * torch.rsqrt(wide_XD.pow(2).mean(-1, keepdim=True) + eps)
