# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Norms over the last dimension in Triton, with or without a gate, in one pair of kernels.

A program holds whole rows. The backward computes the norm again from its input; a program walks through a strip of
rows and sums the weight's gradient on the way, and the strips' sums are added by one reduction.

Shape suffixes: X any leading dimensions, D channels, S strips.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from harts.ops.fused.views import Rows

__all__ = ["gated_rms_norm_triton", "rms_norm_triton"]

_STRIPS = 1056
"""Most partial sums of a weight's gradient; a function of the number of rows, so the order of additions is fixed."""

_LARGEST = 16_384


def rms_norm_triton(x_XD: Tensor, weight_D: Tensor, eps: float, zero_centred: bool) -> Tensor:
    """See `harts.ops.fused.rms_norm`."""
    return _RowNorm.apply(x_XD, None, weight_D, eps, float(zero_centred))  # type: ignore[no-any-return]


def gated_rms_norm_triton(x_XD: Tensor, gate_XD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """See `harts.ops.fused.gated_rms_norm`."""
    return _RowNorm.apply(x_XD, gate_XD, weight_D, eps, 0.0)  # type: ignore[no-any-return]


class _RowNorm(torch.autograd.Function):
    """Keeps its input, the gate and the weight, to which `shift` is added."""

    @staticmethod
    def forward(ctx: Any, x_XD: Tensor, gate_XD: Tensor | None, weight_D: Tensor, eps: float, shift: float) -> Tensor:
        x, gate = Rows.of(x_XD), _optional(gate_XD)
        y_XD = torch.empty(x_XD.shape, dtype=x_XD.dtype, device=x_XD.device)
        constants = _constants(x_XD, gate_XD, shift)
        if x.count:
            _forward[(triton.cdiv(x.count, constants["BLOCK_X"]),)](
                x.tensor, *x.strides, *_pass(gate), weight_D, y_XD, x.count, x_XD.shape[-1], eps, **constants
            )
        ctx.save_for_backward(x.tensor, gate_XD, weight_D)
        ctx.eps, ctx.shift = eps, shift
        return y_XD

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad_XD: Tensor) -> tuple[Tensor | None, ...]:
        x_XD, gate_XD, weight_D = ctx.saved_tensors
        size = x_XD.shape[-1]
        x, grad, gate = Rows.of(x_XD), Rows.of(grad_XD), _optional(gate_XD)
        constants = _constants(x_XD, gate_XD, ctx.shift)
        grad_x_XD = torch.empty(x_XD.shape, dtype=x_XD.dtype, device=x_XD.device)
        grad_gate_XD = None if gate is None else torch.empty_like(grad_x_XD)
        strips = max(1, min(_STRIPS, triton.cdiv(x.count, constants["BLOCK_X"])))
        sum_dtype = torch.promote_types(x_XD.dtype, torch.float32)
        partial_SD = torch.zeros(strips, size, dtype=sum_dtype, device=x_XD.device)
        if x.count:
            _backward[(strips,)](
                x.tensor,
                *x.strides,
                grad.tensor,
                *grad.strides,
                *_pass(gate),
                weight_D,
                grad_x_XD,
                grad_gate_XD,
                partial_SD,
                x.count,
                size,
                ctx.eps,
                triton.cdiv(x.count, strips),
                **constants,
            )
        return grad_x_XD, grad_gate_XD, partial_SD.sum(0).to(weight_D.dtype), None, None


def _optional(x_XD: Tensor | None) -> Rows | None:
    return None if x_XD is None else Rows.of(x_XD)


def _pass(rows: Rows | None) -> tuple[Any, ...]:
    return (None, 1, 0, 0) if rows is None else (rows.tensor, *rows.strides)


def _constants(x_XD: Tensor, gate_XD: Tensor | None, shift: float) -> dict[str, Any]:
    size = x_XD.shape[-1]
    if size > _LARGEST:
        raise ValueError(f"norm: impl='triton' expected at most {_LARGEST} channels, got {size}; use 'reference'")
    block = triton.next_power_of_2(size)
    return {
        "SHIFT": shift,
        "GATE": gate_XD is not None,
        "SUM": tl.float64 if x_XD.dtype == torch.float64 else tl.float32,
        "BLOCK_X": max(1, 2048 // block),
        "BLOCK_D": block,
        "num_warps": 8 if block >= 2048 else 4,
    }


@triton.jit
def _places(row, column, inner, outer_stride, inner_stride):
    """Offsets of whole rows of a view."""
    start = (row // inner) * outer_stride + (row % inner) * inner_stride
    return start[:, None] + column[None, :]


@triton.jit
def _scale(x, size, eps):
    return (1.0 / tl.sqrt(tl.sum(x * x, 1) / size + eps))[:, None]


@triton.jit(do_not_specialize=["rows"])
def _forward(
    x_ptr,
    x_inner,
    x_outer_stride,
    x_inner_stride,
    gate_ptr,
    gate_inner,
    gate_outer_stride,
    gate_inner_stride,
    weight_ptr,
    y_ptr,
    rows,
    size,
    eps,
    SHIFT: tl.constexpr,
    GATE: tl.constexpr,
    SUM: tl.constexpr,
    BLOCK_X: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * BLOCK_X + tl.arange(0, BLOCK_X)
    column = tl.arange(0, BLOCK_D)
    inside = (row < rows)[:, None] & (column < size)[None, :]
    place = row[:, None] * size + column[None, :]
    x = tl.load(x_ptr + _places(row, column, x_inner, x_outer_stride, x_inner_stride), mask=inside, other=0.0)
    x = x.to(SUM)
    y = x * _scale(x, size, eps)
    y *= (tl.load(weight_ptr + column, mask=column < size, other=0.0).to(SUM) + SHIFT)[None, :]
    if GATE:
        from_ptr = gate_ptr + _places(row, column, gate_inner, gate_outer_stride, gate_inner_stride)
        gate = tl.load(from_ptr, mask=inside, other=0.0).to(SUM)
        y *= gate / (1.0 + tl.exp(-gate))
    tl.store(y_ptr + place, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows", "strip_rows"])
def _backward(
    x_ptr,
    x_inner,
    x_outer_stride,
    x_inner_stride,
    grad_ptr,
    grad_inner,
    grad_outer_stride,
    grad_inner_stride,
    gate_ptr,
    gate_inner,
    gate_outer_stride,
    gate_inner_stride,
    weight_ptr,
    grad_x_ptr,
    grad_gate_ptr,
    partial_ptr,
    rows,
    size,
    eps,
    strip_rows,
    SHIFT: tl.constexpr,
    GATE: tl.constexpr,
    SUM: tl.constexpr,
    BLOCK_X: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """With n = x / norm, f the factor behind it and h = grad f: dx = (h - n sum(h n) / D) / norm."""
    strip = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK_D)
    stop = tl.minimum((strip + 1) * strip_rows, rows)
    weight = (tl.load(weight_ptr + column, mask=column < size, other=0.0).to(SUM) + SHIFT)[None, :]
    total = tl.zeros([BLOCK_D], SUM)
    for first in tl.range(strip * strip_rows, stop, BLOCK_X, num_stages=3):  # loads run ahead
        row = first + tl.arange(0, BLOCK_X)
        inside = (row < stop)[:, None] & (column < size)[None, :]
        place = row[:, None] * size + column[None, :]
        x = tl.load(x_ptr + _places(row, column, x_inner, x_outer_stride, x_inner_stride), mask=inside, other=0.0)
        from_ptr = grad_ptr + _places(row, column, grad_inner, grad_outer_stride, grad_inner_stride)
        grad = tl.load(from_ptr, mask=inside, other=0.0).to(SUM)
        scale = _scale(x.to(SUM), size, eps)
        normed = x.to(SUM) * scale
        if GATE:
            from_ptr = gate_ptr + _places(row, column, gate_inner, gate_outer_stride, gate_inner_stride)
            gate = tl.load(from_ptr, mask=inside, other=0.0).to(SUM)
            half = 1.0 / (1.0 + tl.exp(-gate))
            grad_gate = grad * normed * half * (1.0 + gate * (1.0 - half))
            grad_gate *= weight
            tl.store(grad_gate_ptr + place, grad_gate.to(grad_gate_ptr.dtype.element_ty), mask=inside)
            grad *= gate * half
        total += tl.sum(grad * normed, 0)
        grad *= weight
        along = tl.sum(grad * normed, 1) / size
        grad_x = (grad - normed * along[:, None]) * scale
        tl.store(grad_x_ptr + place, grad_x.to(grad_x_ptr.dtype.element_ty), mask=inside)
    tl.store(partial_ptr + strip * size + column, total, mask=column < size)
