"""What lies between the matrix products: norms, gates, rotary positions, each one kernel forward and one backward.

These are functions of single rows and know no tree. The Triton kernels compute in fp32 (fp64 for fp64) and round once,
where transformers rounds between steps; weight gradients are added in a fixed order. Inputs may be views whose last
dimension is contiguous, such as halves of a projection's output.

Shape suffixes: X any leading dimensions, D channels, T rows, H heads, R rotated channels of a head.
"""

from torch import Tensor

from harts.ops.dispatch import choose
from harts.ops.fused.reference import (
    gated_rms_norm_reference,
    rms_norm_reference,
    rotary_reference,
    sigmoid_gate_reference,
    swiglu_halves_reference,
    swiglu_reference,
)
from harts.ops.requirements import check_tensors, require_triton

__all__ = [
    "gated_rms_norm",
    "rms_norm",
    "rotary",
    "sigmoid_gate",
    "swiglu",
    "swiglu_halves",
]


def rms_norm(x_XD: Tensor, weight_D: Tensor, *, eps: float, zero_centred: bool = False, impl: str) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight.

    Args:
        x_XD: [..., D].
        weight_D: [D].
        eps: added to the mean square.
        zero_centred: the factor is 1 + weight (Qwen3.5, Gemma).
        impl: `"reference"`: plain PyTorch, any device; `"triton"`: CUDA.

    Returns:
        y_XD: in the shape and dtype of x.

    Raises:
        ValueError: shapes or dtypes do not fit, or `impl` is unknown or does not run on this device.
        ImportError: `"triton"` without Triton.
    """
    _check("rms_norm", x_XD, weight=weight_D)
    if _takes_triton("rms_norm", impl, x_XD):
        from harts.ops.fused.norms import rms_norm_triton

        return rms_norm_triton(x_XD, weight_D, eps, zero_centred)
    return rms_norm_reference(x_XD, weight_D, eps, zero_centred)


def gated_rms_norm(x_XD: Tensor, gate_XD: Tensor, weight_D: Tensor, *, eps: float, impl: str) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight * silu(gate); see `rms_norm`."""
    _check("gated_rms_norm", x_XD, gate=gate_XD, weight=weight_D)
    if _takes_triton("gated_rms_norm", impl, x_XD):
        from harts.ops.fused.norms import gated_rms_norm_triton

        return gated_rms_norm_triton(x_XD, gate_XD, weight_D, eps)
    return gated_rms_norm_reference(x_XD, gate_XD, weight_D, eps)


def swiglu(gate_XD: Tensor, up_XD: Tensor, *, impl: str) -> Tensor:
    """silu(gate) * up; see `rms_norm` for `impl` and errors."""
    _check("swiglu", gate_XD, up=up_XD)
    if _takes_triton("swiglu", impl, gate_XD):
        from harts.ops.fused.pointwise import swiglu_triton

        return swiglu_triton(gate_XD, up_XD)
    return swiglu_reference(gate_XD, up_XD)


def swiglu_halves(gate_up_X2D: Tensor, *, impl: str) -> Tensor:
    """silu(first half of the channels) * second half, [..., 2 D] -> [..., D]; see `rms_norm` for `impl` and errors."""
    if gate_up_X2D.shape[-1] % 2:
        raise ValueError(f"swiglu_halves: expected an even number of channels, got {list(gate_up_X2D.shape)}")
    _check("swiglu_halves", gate_up_X2D)
    if _takes_triton("swiglu_halves", impl, gate_up_X2D):
        from harts.ops.fused.pointwise import swiglu_halves_triton

        return swiglu_halves_triton(gate_up_X2D)
    return swiglu_halves_reference(gate_up_X2D)


def sigmoid_gate(x_XD: Tensor, gate_XD: Tensor, *, impl: str) -> Tensor:
    """x * sigmoid(gate), the output gate of Qwen3.5's attention; see `rms_norm` for `impl` and errors."""
    _check("sigmoid_gate", x_XD, gate=gate_XD)
    if _takes_triton("sigmoid_gate", impl, x_XD):
        from harts.ops.fused.pointwise import sigmoid_gate_triton

        return sigmoid_gate_triton(x_XD, gate_XD)
    return sigmoid_gate_reference(x_XD, gate_XD)


def rotary(x_THD: Tensor, cos_TR: Tensor, sin_TR: Tensor, *, impl: str) -> Tensor:
    """Rotates the first R channels of each head by the row's angles, pairing channel i with i + R / 2.

    out_i = x_i cos_i - x_(i + R/2) sin_i for i < R / 2, and x_i cos_i + x_(i - R/2) sin_i behind (RoFormer,
    arXiv:2104.09864, in the half-split order of Llama). The other channels pass through. No gradient flows to the
    angles.

    Args:
        x_THD: [T, H, D].
        cos_TR, sin_TR: [T, R], R even and at most D.
        impl: see `rms_norm`.

    Raises:
        ValueError, ImportError: see `rms_norm`.
    """
    rotated = cos_TR.shape[-1]
    if x_THD.ndim != 3 or cos_TR.shape != (len(x_THD), rotated) or sin_TR.shape != cos_TR.shape:
        raise ValueError(
            f"rotary: expected x [T, H, D] and cos and sin [T, R], got x {list(x_THD.shape)}, cos "
            f"{list(cos_TR.shape)}, sin {list(sin_TR.shape)}"
        )
    if rotated % 2 or rotated > x_THD.shape[-1]:
        raise ValueError(f"rotary: expected R even and at most {x_THD.shape[-1]}, got {rotated}")
    check_tensors("rotary", x=x_THD, cos=cos_TR, sin=sin_TR)
    if _takes_triton("rotary", impl, x_THD):
        from harts.ops.fused.pointwise import rotary_triton

        return rotary_triton(x_THD, cos_TR, sin_TR)
    return rotary_reference(x_THD, cos_TR, sin_TR)


def _check(op: str, x_XD: Tensor, **others: Tensor) -> None:
    for name, tensor in others.items():
        expected = x_XD.shape[-1:] if name == "weight" else x_XD.shape
        if tensor.shape != expected:
            raise ValueError(f"{op}: expected {name} of shape {list(expected)}, got {list(tensor.shape)}")
    check_tensors(op, x=x_XD, **others)


def _takes_triton(op: str, impl: str, x_XD: Tensor) -> bool:
    """Whether `impl` names the kernel rather than the reference."""
    takes = choose(op, impl, {"reference": False, "triton": True})
    if takes:
        require_triton(op, x_XD.device)
    return takes
