# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Gates and rotary positions in Triton: one pass each way, nothing kept but the inputs.

Shape suffixes: X any leading dimensions, D channels, T rows, H heads, R rotated channels of a head.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from harts.ops.fused.views import Rows

__all__ = ["rotary_triton", "sigmoid_gate_triton", "swiglu_halves_triton", "swiglu_triton"]


def swiglu_triton(gate_XD: Tensor, up_XD: Tensor) -> Tensor:
    """See `harts.ops.fused.swiglu`."""
    return _Gate.apply(up_XD, gate_XD, True)  # type: ignore[no-any-return]


def swiglu_halves_triton(gate_up_X2D: Tensor) -> Tensor:
    """See `harts.ops.fused.swiglu_halves`."""
    return _GateHalves.apply(gate_up_X2D)  # type: ignore[no-any-return]


def sigmoid_gate_triton(x_XD: Tensor, gate_XD: Tensor) -> Tensor:
    """See `harts.ops.fused.sigmoid_gate`."""
    return _Gate.apply(x_XD, gate_XD, False)  # type: ignore[no-any-return]


def rotary_triton(x_THD: Tensor, cos_TR: Tensor, sin_TR: Tensor) -> Tensor:
    """See `harts.ops.fused.rotary`."""
    return _Rotary.apply(x_THD, cos_TR, sin_TR)  # type: ignore[no-any-return]


class _Gate(torch.autograd.Function):
    """x sigmoid(gate), or x silu(gate)."""

    @staticmethod
    def forward(ctx: Any, x_XD: Tensor, gate_XD: Tensor, silu: bool) -> Tensor:
        ctx.save_for_backward(x_XD, gate_XD)
        ctx.silu = silu
        return _multiply(x_XD, gate_XD, silu)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad_XD: Tensor) -> tuple[Tensor, Tensor, None]:
        x_XD, gate_XD = ctx.saved_tensors
        grad_x_XD = torch.empty(x_XD.shape, dtype=x_XD.dtype, device=x_XD.device)
        grad_gate_XD = torch.empty_like(grad_x_XD)
        _differentiate(x_XD, gate_XD, grad_XD, grad_x_XD, grad_gate_XD, ctx.silu)
        return grad_x_XD, grad_gate_XD, None


class _GateHalves(torch.autograd.Function):
    """silu(first half) second half; the gradients of both halves are written side by side, without a copy."""

    @staticmethod
    def forward(ctx: Any, gate_up_X2D: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up_X2D)
        gate_XD, up_XD = gate_up_X2D.chunk(2, -1)
        return _multiply(up_XD, gate_XD, True)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad_XD: Tensor) -> Tensor:
        (gate_up_X2D,) = ctx.saved_tensors
        gate_XD, up_XD = gate_up_X2D.chunk(2, -1)
        both_X2D = torch.empty(gate_up_X2D.shape, dtype=grad_XD.dtype, device=grad_XD.device)
        grad_gate_XD, grad_up_XD = both_X2D.chunk(2, -1)
        _differentiate(up_XD, gate_XD, grad_XD, grad_up_XD, grad_gate_XD, True)
        return both_X2D


def _multiply(x_XD: Tensor, gate_XD: Tensor, silu: bool) -> Tensor:
    x, gate = Rows.of(x_XD), Rows.of(gate_XD)
    y_XD = torch.empty(x_XD.shape, dtype=x_XD.dtype, device=x_XD.device)
    _launch(_gate_forward, x, x_XD, (x.tensor, *x.strides, gate.tensor, *gate.strides, y_XD), SILU=silu)
    return y_XD


def _differentiate(
    x_XD: Tensor, gate_XD: Tensor, grad_XD: Tensor, grad_x_XD: Tensor, grad_gate_XD: Tensor, silu: bool
) -> None:
    """Fills the two gradients, whose rows lie at one distance."""
    x, gate, grad = Rows.of(x_XD), Rows.of(gate_XD), Rows.of(grad_XD)
    arguments = (x.tensor, *x.strides, gate.tensor, *gate.strides, grad.tensor, *grad.strides)
    distance = grad_x_XD.stride(-2) if grad_x_XD.ndim > 1 else 0
    _launch(_gate_backward, x, x_XD, (*arguments, grad_x_XD, grad_gate_XD, distance), SILU=silu)


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_THD: Tensor, cos_TR: Tensor, sin_TR: Tensor) -> Tensor:
        cos_TR, sin_TR = cos_TR.contiguous(), sin_TR.contiguous()
        ctx.save_for_backward(cos_TR, sin_TR)
        return _rotate(x_THD, cos_TR, sin_TR, back=False)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad_THD: Tensor) -> tuple[Tensor, None, None]:
        cos_TR, sin_TR = ctx.saved_tensors
        return _rotate(grad_THD, cos_TR, sin_TR, back=True), None, None


def _rotate(x_THD: Tensor, cos_TR: Tensor, sin_TR: Tensor, back: bool) -> Tensor:
    x = Rows.of(x_THD)
    y_THD = torch.empty(x_THD.shape, dtype=x_THD.dtype, device=x_THD.device)
    arguments = (x.tensor, *x.strides, cos_TR, sin_TR, y_THD, x_THD.shape[1], cos_TR.shape[1])
    _launch(_rotary, x, x_THD, arguments, BACK=back)
    return y_THD


def _launch(kernel: Any, rows: Rows, x_XD: Tensor, arguments: tuple[Any, ...], **options: bool) -> None:
    size = x_XD.shape[-1]
    block = min(triton.next_power_of_2(max(1, size)), 1024)
    block_rows = max(1, 4096 // block)
    if rows.count and size:
        kernel[(triton.cdiv(rows.count, block_rows), triton.cdiv(size, block))](
            *arguments,
            rows.count,
            size,
            **options,
            SUM=tl.float64 if x_XD.dtype == torch.float64 else tl.float32,
            BLOCK_X=block_rows,
            BLOCK_D=block,
            num_warps=8,
        )


@triton.jit
def _load(ptr, row, column, inside, inner, outer_stride, inner_stride, SUM: tl.constexpr):
    start = (row // inner) * outer_stride + (row % inner) * inner_stride
    return tl.load(ptr + start[:, None] + column[None, :], mask=inside, other=0.0).to(SUM)


@triton.jit(do_not_specialize=["rows"])
def _gate_forward(
    x_ptr,
    x_inner,
    x_outer_stride,
    x_inner_stride,
    gate_ptr,
    gate_inner,
    gate_outer_stride,
    gate_inner_stride,
    y_ptr,
    rows,
    size,
    SILU: tl.constexpr,
    SUM: tl.constexpr,
    BLOCK_X: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * BLOCK_X + tl.arange(0, BLOCK_X)
    column = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    inside = (row < rows)[:, None] & (column < size)[None, :]
    x = _load(x_ptr, row, column, inside, x_inner, x_outer_stride, x_inner_stride, SUM)
    gate = _load(gate_ptr, row, column, inside, gate_inner, gate_outer_stride, gate_inner_stride, SUM)
    y = x / (1.0 + tl.exp(-gate))
    if SILU:
        y *= gate
    tl.store(y_ptr + row[:, None] * size + column[None, :], y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _gate_backward(
    x_ptr,
    x_inner,
    x_outer_stride,
    x_inner_stride,
    gate_ptr,
    gate_inner,
    gate_outer_stride,
    gate_inner_stride,
    grad_ptr,
    grad_inner,
    grad_outer_stride,
    grad_inner_stride,
    grad_x_ptr,
    grad_gate_ptr,
    distance,
    rows,
    size,
    SILU: tl.constexpr,
    SUM: tl.constexpr,
    BLOCK_X: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * BLOCK_X + tl.arange(0, BLOCK_X)
    column = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    inside = (row < rows)[:, None] & (column < size)[None, :]
    x = _load(x_ptr, row, column, inside, x_inner, x_outer_stride, x_inner_stride, SUM)
    gate = _load(gate_ptr, row, column, inside, gate_inner, gate_outer_stride, gate_inner_stride, SUM)
    grad = _load(grad_ptr, row, column, inside, grad_inner, grad_outer_stride, grad_inner_stride, SUM)
    half = 1.0 / (1.0 + tl.exp(-gate))
    if SILU:
        value = gate * half
        slope = half * (1.0 + gate * (1.0 - half))
    else:
        value = half
        slope = half * (1.0 - half)
    place = row[:, None] * distance + column[None, :]
    tl.store(grad_x_ptr + place, (grad * value).to(grad_x_ptr.dtype.element_ty), mask=inside)
    tl.store(grad_gate_ptr + place, (grad * x * slope).to(grad_gate_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _rotary(
    x_ptr,
    x_inner,
    x_outer_stride,
    x_inner_stride,
    cos_ptr,
    sin_ptr,
    y_ptr,
    heads,
    rotated,
    rows,
    size,
    BACK: tl.constexpr,
    SUM: tl.constexpr,
    BLOCK_X: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Row (t, h). Backwards, the transposed rotation: a channel meets its partner's sine, with the other sign."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_X + tl.arange(0, BLOCK_X)
    column = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    inside = (row < rows)[:, None] & (column < size)[None, :]
    turned = inside & (column < rotated)[None, :]
    low = column < rotated // 2
    partner = tl.where(low, column + rotated // 2, column - rotated // 2)
    angle = (row // heads)[:, None] * rotated
    x = _load(x_ptr, row, column, inside, x_inner, x_outer_stride, x_inner_stride, SUM)
    crossed = _load(x_ptr, row, partner, turned, x_inner, x_outer_stride, x_inner_stride, SUM)
    cos = tl.load(cos_ptr + angle + column[None, :], mask=turned, other=1.0).to(SUM)
    if BACK:
        sin = tl.load(sin_ptr + angle + partner[None, :], mask=turned, other=0.0).to(SUM)
        sign = tl.where(low, 1.0, -1.0)
    else:
        sin = tl.load(sin_ptr + angle + column[None, :], mask=turned, other=0.0).to(SUM)
        sign = tl.where(low, -1.0, 1.0)
    y = x * cos + crossed * sin * sign[None, :].to(SUM)
    tl.store(y_ptr + row[:, None] * size + column[None, :], y.to(y_ptr.dtype.element_ty), mask=inside)
