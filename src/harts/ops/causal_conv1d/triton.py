# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Tree convolution in Triton: ancestors are read through the map, nothing is gathered in memory.

The backward first turns the output's gradient into that of the pre-activation, `dz`, which it computes again from the
inputs, and sums the weight's gradient strip by strip on the way. A row's input gradient is then read from the rows
whose 1st, 2nd or 3rd ancestor it is: in most places the rows right behind it, and, for the few rows above a branch,
the rows in a list. Sums run in one fixed order; no atomics.

Shape suffixes: T rows, A rows outside, D channels, W taps, S strips of rows, P rows whose readers are listed, Q entries
in their lists. A suffix 1 is one more entry.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from harts.ops.causal_conv1d.layout import ConvLayout, Readers
from harts.ops.requirements import check_tensors

__all__ = ["causal_conv1d_triton"]

_STRIPS = 132
"""Most partial sums of the weight's gradient; a function of the number of rows, so the order of additions is fixed."""


def causal_conv1d_triton(
    x_TD: Tensor,
    context_AD: Tensor | None,
    weight_DW: Tensor,
    bias_D: Tensor | None,
    layout: ConvLayout,
    activate: bool,
) -> Tensor:
    """See `harts.ops.causal_conv1d`; computes in fp32 (fp64 for fp64) and rounds once. Keeps its inputs alone."""
    check_tensors("causal_conv1d", x=x_TD, context=context_AD, weight=weight_DW, bias=bias_D)
    return _CausalConv1d.apply(  # type: ignore[no-any-return]
        x_TD, context_AD, weight_DW, bias_D, layout, activate
    )


class _CausalConv1d(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TD: Tensor,
        context_AD: Tensor | None,
        weight_DW: Tensor,
        bias_D: Tensor | None,
        layout: ConvLayout,
        activate: bool,
    ) -> Tensor:
        if x_TD.stride(1) != 1:
            x_TD = x_TD.contiguous()
        context_AD = None if context_AD is None else context_AD.contiguous()
        ctx.save_for_backward(x_TD, context_AD, weight_DW, bias_D)
        ctx.layout, ctx.activate = layout, activate
        rows, channels = x_TD.shape
        y_TD = x_TD.new_empty(rows, channels)
        sizes = _Sizes.of(channels)
        grid = (triton.cdiv(rows, sizes.rows), triton.cdiv(channels, sizes.channels))
        _forward[grid](
            *_Reads(x_TD, context_AD, layout).arguments,
            weight_DW.contiguous(),
            bias_D,
            y_TD,
            **sizes.constants(x_TD, weight_DW, bias_D, activate),
            CONTEXT=layout.num_outside > 0,
            num_warps=4,
        )
        return y_TD

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor | None, ...]:
        x_TD, context_AD, weight_DW, bias_D = ctx.saved_tensors
        layout: ConvLayout = ctx.layout
        rows, channels = x_TD.shape
        grad_TD = grad_TD.contiguous()
        weight_DW = weight_DW.contiguous()
        taps = weight_DW.shape[1]
        sizes = _Sizes.of(channels)
        constants = sizes.constants(x_TD, weight_DW, bias_D, ctx.activate)
        block_rows = max(1, sizes.rows // 2)  # this kernel holds twice as much of each place
        sum_dtype = torch.promote_types(x_TD.dtype, torch.float32)
        dz_TD = torch.empty_like(grad_TD)
        # behind the taps lies the bias
        strips = min(_STRIPS, triton.cdiv(rows, block_rows))
        partial_SWD = torch.empty(strips, taps + (bias_D is not None), channels, dtype=sum_dtype, device=x_TD.device)
        _backward_preactivation[(strips, triton.cdiv(channels, sizes.channels))](
            *_Reads(x_TD, context_AD, layout).arguments,
            weight_DW,
            bias_D,
            grad_TD,
            dz_TD,
            partial_SWD,
            triton.cdiv(rows, strips),
            **{**constants, "BLOCK_T": block_rows},
            CONTEXT=layout.num_outside > 0,
            num_warps=4,
        )
        total_WD = partial_SWD.sum(0)
        grad_x_TD = grad_context_AD = None
        if ctx.needs_input_grad[0]:
            grad_x_TD = _input_gradient(dz_TD, weight_DW, layout, sizes, constants)
        if context_AD is not None and ctx.needs_input_grad[1]:
            grad_context_AD = torch.empty_like(context_AD)
            _add_readers(dz_TD, weight_DW, layout.outside, grad_context_AD, sizes, constants, first_row=rows)
        grad_bias_D = None if bias_D is None else total_WD[taps].to(bias_D.dtype)
        grad_weight_DW = total_WD[:taps].flip(0).mT.to(weight_DW.dtype)
        return grad_x_TD, grad_context_AD, grad_weight_DW, grad_bias_D, None, None


def _input_gradient(
    dz_TD: Tensor, weight_DW: Tensor, layout: ConvLayout, sizes: "_Sizes", constants: dict[str, Any]
) -> Tensor:
    rows, channels = dz_TD.shape
    kept = {name: value for name, value in constants.items() if name not in ("BIAS", "ACTIVATE")}
    grad_x_TD = torch.empty_like(dz_TD)
    grid = (triton.cdiv(rows, sizes.rows), triton.cdiv(channels, sizes.channels))
    _backward_input[grid](dz_TD, weight_DW, layout.ancestor_WT, grad_x_TD, rows, channels, **kept, num_warps=4)
    _add_readers(dz_TD, weight_DW, layout.across, grad_x_TD, sizes, constants)
    return grad_x_TD


def _add_readers(
    dz_TD: Tensor,
    weight_DW: Tensor,
    readers: Readers,
    grad_XD: Tensor,
    sizes: "_Sizes",
    constants: dict[str, Any],
    first_row: int = 0,
) -> None:
    """Writes the gradients of listed rows, the first row of `grad_XD` being `first_row`; own rows lie at 0."""
    if not len(readers.row_P):
        return
    channels = dz_TD.shape[1]
    _backward_listed[(len(readers.row_P), triton.cdiv(channels, sizes.channels))](
        dz_TD,
        weight_DW,
        readers.row_P,
        readers.offset_P1,
        readers.reader_Q,
        readers.above_Q,
        grad_XD,
        channels,
        first_row,
        OWN=first_row == 0,
        **{name: constants[name] for name in ("TAPS", "SUM", "BLOCK_D")},
        num_warps=2,
    )


@dataclass(frozen=True)
class _Reads:
    """What a kernel reads rows from: own rows, rows outside, and the map into both."""

    x_TD: Tensor
    context_AD: Tensor | None
    layout: ConvLayout

    @property
    def arguments(self) -> tuple[Any, ...]:
        rows, channels = self.x_TD.shape
        context_AD = self.x_TD if self.context_AD is None else self.context_AD
        return (
            self.x_TD,
            context_AD,
            self.layout.ancestor_WT,
            rows,
            self.layout.num_outside,
            channels,
            self.x_TD.stride(0),
        )


@dataclass(frozen=True)
class _Sizes:
    """Tile of one program."""

    rows: int
    channels: int

    @staticmethod
    def of(channels: int) -> "_Sizes":
        width = min(triton.next_power_of_2(channels), 128)
        return _Sizes(rows=2048 // width, channels=width)

    def constants(self, x_TD: Tensor, weight_DW: Tensor, bias_D: Tensor | None, activate: bool) -> dict[str, Any]:
        return {
            "TAPS": weight_DW.shape[1],
            "BIAS": bias_D is not None,
            "ACTIVATE": activate,
            "SUM": tl.float64 if x_TD.dtype == torch.float64 else tl.float32,
            "BLOCK_T": self.rows,
            "BLOCK_D": self.channels,
        }


@triton.jit
def _read_tap(
    x_ptr,
    context_ptr,
    ancestor_ptr,
    rows,
    outside,
    channels,
    stride,
    row,
    column,
    inside,
    above: tl.constexpr,
    CONTEXT: tl.constexpr,
):
    """Rows `above` above each row; zeros where there is none."""
    if above == 0:
        source = row
    else:
        source = tl.load(ancestor_ptr + tl.cast(rows, tl.int64) * (above - 1) + row, mask=row < rows, other=rows)
    mask = (source < rows)[:, None] & inside
    x = tl.load(x_ptr + source[:, None] * stride + column[None, :], mask=mask, other=0.0)
    if CONTEXT and above > 0:
        is_outside = ((source >= rows) & (source < rows + outside))[:, None] & inside
        place = (source - rows)[:, None] * channels + column[None, :]
        x = tl.where(is_outside, tl.load(context_ptr + place, mask=is_outside, other=0.0), x)
    return x


@triton.jit
def _read_weight(weight_ptr, column, inside, above: tl.constexpr, TAPS: tl.constexpr, SUM: tl.constexpr):
    """Weight of the row `above` above, per channel."""
    return tl.load(weight_ptr + column * TAPS + (TAPS - 1 - above), mask=inside, other=0.0).to(SUM)[None, :]


@triton.jit
def _preactivation(
    x_ptr,
    context_ptr,
    ancestor_ptr,
    rows,
    outside,
    channels,
    stride,
    weight_ptr,
    bias_ptr,
    row,
    column,
    inside,
    TAPS: tl.constexpr,
    BIAS: tl.constexpr,
    SUM: tl.constexpr,
    CONTEXT: tl.constexpr,
):
    """bias + sum over taps, own row first, in one order whatever the tile."""
    z = tl.zeros(inside.shape, SUM)
    if BIAS:
        z += tl.load(bias_ptr + column, mask=column < channels, other=0.0).to(SUM)[None, :]
    for above in tl.static_range(TAPS):
        x = _read_tap(
            x_ptr, context_ptr, ancestor_ptr, rows, outside, channels, stride, row, column, inside, above, CONTEXT
        )
        z += x.to(SUM) * _read_weight(weight_ptr, column, column < channels, above, TAPS, SUM)
    return z


@triton.jit(do_not_specialize=["rows", "outside"])
def _forward(
    x_ptr,
    context_ptr,
    ancestor_ptr,
    rows,
    outside,
    channels,
    stride,
    weight_ptr,
    bias_ptr,
    y_ptr,
    TAPS: tl.constexpr,
    BIAS: tl.constexpr,
    ACTIVATE: tl.constexpr,
    SUM: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
    CONTEXT: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    column = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    inside = (row < rows)[:, None] & (column < channels)[None, :]
    z = _preactivation(
        x_ptr,
        context_ptr,
        ancestor_ptr,
        rows,
        outside,
        channels,
        stride,
        weight_ptr,
        bias_ptr,
        row,
        column,
        inside,
        TAPS,
        BIAS,
        SUM,
        CONTEXT,
    )
    y = z / (1.0 + tl.exp(-z)) if ACTIVATE else z
    tl.store(y_ptr + row[:, None] * channels + column[None, :], y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows", "outside", "strip_rows"])
def _backward_preactivation(
    x_ptr,
    context_ptr,
    ancestor_ptr,
    rows,
    outside,
    channels,
    stride,
    weight_ptr,
    bias_ptr,
    grad_ptr,
    dz_ptr,
    partial_ptr,
    strip_rows,
    TAPS: tl.constexpr,
    BIAS: tl.constexpr,
    ACTIVATE: tl.constexpr,
    SUM: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
    CONTEXT: tl.constexpr,
):
    """One strip of rows, tile by tile: dz, and the strip's share of the gradients of weight and bias."""
    strip = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    inside_D = column < channels
    stop = tl.minimum((strip + 1) * strip_rows, rows)
    # Sums of single places of the tile, added up across it once, behind the loop.
    sum_0 = tl.zeros([BLOCK_T, BLOCK_D], SUM)
    sum_1 = tl.zeros([BLOCK_T, BLOCK_D], SUM)
    sum_2 = tl.zeros([BLOCK_T, BLOCK_D], SUM)
    sum_3 = tl.zeros([BLOCK_T, BLOCK_D], SUM)
    sum_bias = tl.zeros([BLOCK_T, BLOCK_D], SUM)
    for first in range(strip * strip_rows, stop, BLOCK_T):
        row = first + tl.arange(0, BLOCK_T)
        inside = (row < stop)[:, None] & inside_D[None, :]
        place = row[:, None] * channels + column[None, :]
        dz = tl.load(grad_ptr + place, mask=inside, other=0.0).to(SUM)
        x_0 = _read_tap(
            x_ptr, context_ptr, ancestor_ptr, rows, outside, channels, stride, row, column, inside, 0, CONTEXT
        ).to(SUM)
        if TAPS > 1:
            x_1 = _read_tap(
                x_ptr, context_ptr, ancestor_ptr, rows, outside, channels, stride, row, column, inside, 1, CONTEXT
            ).to(SUM)
        if TAPS > 2:
            x_2 = _read_tap(
                x_ptr, context_ptr, ancestor_ptr, rows, outside, channels, stride, row, column, inside, 2, CONTEXT
            ).to(SUM)
        if TAPS > 3:
            x_3 = _read_tap(
                x_ptr, context_ptr, ancestor_ptr, rows, outside, channels, stride, row, column, inside, 3, CONTEXT
            ).to(SUM)
        if ACTIVATE:
            z = x_0 * _read_weight(weight_ptr, column, inside_D, 0, TAPS, SUM)
            if BIAS:
                z += tl.load(bias_ptr + column, mask=inside_D, other=0.0).to(SUM)[None, :]
            if TAPS > 1:
                z += x_1 * _read_weight(weight_ptr, column, inside_D, 1, TAPS, SUM)
            if TAPS > 2:
                z += x_2 * _read_weight(weight_ptr, column, inside_D, 2, TAPS, SUM)
            if TAPS > 3:
                z += x_3 * _read_weight(weight_ptr, column, inside_D, 3, TAPS, SUM)
            gate = 1.0 / (1.0 + tl.exp(-z))
            dz *= gate * (1.0 + z * (1.0 - gate))
        tl.store(dz_ptr + place, dz.to(dz_ptr.dtype.element_ty), mask=inside)
        sum_0 += dz * x_0
        if TAPS > 1:
            sum_1 += dz * x_1
        if TAPS > 2:
            sum_2 += dz * x_2
        if TAPS > 3:
            sum_3 += dz * x_3
        if BIAS:
            sum_bias += dz
    out = partial_ptr + strip * (TAPS + BIAS) * channels + column
    tl.store(out, tl.sum(sum_0, 0), mask=inside_D)
    if TAPS > 1:
        tl.store(out + channels, tl.sum(sum_1, 0), mask=inside_D)
    if TAPS > 2:
        tl.store(out + 2 * channels, tl.sum(sum_2, 0), mask=inside_D)
    if TAPS > 3:
        tl.store(out + 3 * channels, tl.sum(sum_3, 0), mask=inside_D)
    if BIAS:
        tl.store(out + TAPS * channels, tl.sum(sum_bias, 0), mask=inside_D)


@triton.jit(do_not_specialize=["rows"])
def _backward_input(
    dz_ptr,
    weight_ptr,
    ancestor_ptr,
    grad_x_ptr,
    rows,
    channels,
    TAPS: tl.constexpr,
    SUM: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Rows whose readers all lie right behind them; `_backward_listed` overwrites the others."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    column = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    inside = (row < rows)[:, None] & (column < channels)[None, :]
    total = tl.zeros([BLOCK_T, BLOCK_D], SUM)
    for above in tl.static_range(TAPS):
        reader = row + above
        here = reader < rows
        if above > 0:
            place = tl.cast(rows, tl.int64) * (above - 1) + reader
            here = here & (tl.load(ancestor_ptr + place, mask=here, other=rows) == row)
        mask = here[:, None] & inside
        dz = tl.load(dz_ptr + reader[:, None] * channels + column[None, :], mask=mask, other=0.0)
        total += dz.to(SUM) * _read_weight(weight_ptr, column, column < channels, above, TAPS, SUM)
    place = row[:, None] * channels + column[None, :]
    tl.store(grad_x_ptr + place, total.to(grad_x_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["first_row"])
def _backward_listed(
    dz_ptr,
    weight_ptr,
    row_ptr,
    offset_ptr,
    reader_ptr,
    above_ptr,
    grad_ptr,
    channels,
    first_row,
    OWN: tl.constexpr,
    TAPS: tl.constexpr,
    SUM: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One listed row: itself, if it is an own row, then every row in its list."""
    place = tl.program_id(0)
    column = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    inside = column < channels
    row = tl.load(row_ptr + place)
    total = tl.zeros([BLOCK_D], SUM)
    if OWN:
        dz = tl.load(dz_ptr + row * channels + column, mask=inside, other=0.0).to(SUM)
        total += dz * tl.load(weight_ptr + column * TAPS + (TAPS - 1), mask=inside, other=0.0).to(SUM)
    for entry in range(tl.load(offset_ptr + place), tl.load(offset_ptr + place + 1)):
        reader = tl.load(reader_ptr + entry)
        above = tl.load(above_ptr + entry)
        mask = inside & (above < TAPS)
        dz = tl.load(dz_ptr + reader * channels + column, mask=mask, other=0.0).to(SUM)
        total += dz * tl.load(weight_ptr + column * TAPS + (TAPS - 1 - above), mask=mask, other=0.0).to(SUM)
    place = (row - first_row) * channels + column
    tl.store(grad_ptr + place, total.to(grad_ptr.dtype.element_ty), mask=inside)
