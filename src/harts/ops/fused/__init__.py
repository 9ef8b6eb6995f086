"""What lies between the matrix products: norms, gates, rotary positions, each one kernel forward and one backward.

These are functions of single rows and know no tree. The Triton kernels compute in fp32 (fp64 for fp64) and round once,
where transformers rounds between steps; weight gradients are added in a fixed order. Inputs may be views whose last
dimension is contiguous, such as halves of a projection's output.

Shape suffixes: X any leading dimensions, D channels, T rows, H heads, R rotated channels of a head.
"""

from typing import Any

from torch import Tensor

from harts.ops.dispatch import choose
from harts.ops.fused import reference
from harts.ops.requirements import check_tensors, require_triton

__all__ = [
    "add_rms_norm",
    "gated_rms_norm",
    "l2_norm",
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
    run = _choose("rms_norm", impl, x_XD)
    return run(x_XD, weight_D, eps, zero_centred)  # type: ignore[no-any-return]


def add_rms_norm(
    x_XD: Tensor, residual_XD: Tensor, weight_D: Tensor, *, eps: float, zero_centred: bool = False, impl: str
) -> tuple[Tensor, Tensor]:
    """The pair (`rms_norm` of the sum, the sum), where the sum is x + residual in their dtype; see `rms_norm`."""
    _check("add_rms_norm", x_XD, residual=residual_XD, weight=weight_D)
    run = _choose("add_rms_norm", impl, x_XD)
    return run(x_XD, residual_XD, weight_D, eps, zero_centred)  # type: ignore[no-any-return]


def gated_rms_norm(x_XD: Tensor, gate_XD: Tensor, weight_D: Tensor, *, eps: float, impl: str) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight * silu(gate); see `rms_norm`."""
    _check("gated_rms_norm", x_XD, gate=gate_XD, weight=weight_D)
    return _choose("gated_rms_norm", impl, x_XD)(x_XD, gate_XD, weight_D, eps)  # type: ignore[no-any-return]


def l2_norm(x_XD: Tensor, *, eps: float = 1e-6, impl: str) -> Tensor:
    """x / sqrt(sum(x^2) + eps); see `rms_norm`."""
    _check("l2_norm", x_XD)
    return _choose("l2_norm", impl, x_XD)(x_XD, eps)  # type: ignore[no-any-return]


def swiglu(gate_XD: Tensor, up_XD: Tensor, *, impl: str) -> Tensor:
    """silu(gate) * up; see `rms_norm` for `impl` and errors."""
    _check("swiglu", gate_XD, up=up_XD)
    return _choose("swiglu", impl, gate_XD)(gate_XD, up_XD)  # type: ignore[no-any-return]


def swiglu_halves(gate_up_X2D: Tensor, *, impl: str) -> Tensor:
    """silu(first half of the channels) * second half, [..., 2 D] -> [..., D]; see `rms_norm` for `impl` and errors."""
    if gate_up_X2D.shape[-1] % 2:
        raise ValueError(f"swiglu_halves: expected an even number of channels, got {list(gate_up_X2D.shape)}")
    _check("swiglu_halves", gate_up_X2D)
    return _choose("swiglu_halves", impl, gate_up_X2D)(gate_up_X2D)  # type: ignore[no-any-return]


def sigmoid_gate(x_XD: Tensor, gate_XD: Tensor, *, impl: str) -> Tensor:
    """x * sigmoid(gate), the output gate of Qwen3.5's attention; see `rms_norm` for `impl` and errors."""
    _check("sigmoid_gate", x_XD, gate=gate_XD)
    return _choose("sigmoid_gate", impl, x_XD)(x_XD, gate_XD)  # type: ignore[no-any-return]


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
    return _choose("rotary", impl, x_THD)(x_THD, cos_TR, sin_TR)  # type: ignore[no-any-return]


def _check(op: str, x_XD: Tensor, **others: Tensor) -> None:
    for name, tensor in others.items():
        expected = x_XD.shape[-1:] if name == "weight" else x_XD.shape
        if tensor.shape != expected:
            raise ValueError(f"{op}: expected {name} of shape {list(expected)}, got {list(tensor.shape)}")
    check_tensors(op, x=x_XD, **others)


def _choose(op: str, impl: str, x_XD: Tensor) -> Any:
    choose(op, impl, {"reference": len, "triton": len})
    if impl == "reference":
        return getattr(reference, f"{op}_reference")
    require_triton(op, x_XD.device)
    from harts.ops.fused import norms, pointwise

    return getattr(norms if "norm" in op else pointwise, f"{op}_triton")
