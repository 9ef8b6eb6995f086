# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Tree convolution in Triton: ancestors are read through the map, nothing is gathered in memory.

The backward first turns the output's gradient into that of the pre-activation, `dz`, which it computes again from the
inputs, and sums the weight's gradient strip by strip on the way. A row's input gradient is then read from the rows
whose 1st, 2nd or 3rd ancestor it is: in most places the rows right behind it, and, for the few rows above a branch,
the rows in a list. Sums run in one fixed order; no atomics.

Shape suffixes: T rows, D channels, W taps, S strips of rows, P rows with a descendant that is not right behind,
Q entries in their lists. A suffix 1 is one more entry.
"""

from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from harts.layout import PackedTree
from harts.ops.requirements import check_tensors

__all__ = ["causal_conv1d_triton"]

_STRIPS = 132
"""Most partial sums of the weight's gradient; a function of the number of rows, so the order of additions is fixed."""


def causal_conv1d_triton(
    x_TD: Tensor, weight_DW: Tensor, bias_D: Tensor | None, packed: PackedTree, activate: bool
) -> Tensor:
    """See `harts.ops.causal_conv1d`; computes in fp32 (fp64 for fp64) and rounds once. Keeps its inputs alone."""
    check_tensors("causal_conv1d", x=x_TD, weight=weight_DW, bias=bias_D)
    return _CausalConv1d.apply(x_TD, weight_DW, bias_D, packed, activate)  # type: ignore[no-any-return]


@dataclass(frozen=True, eq=False)
class _Branches:
    """Rows that a row reads across a branch, and everything that reads them.

    Attributes:
        row_P: int64 [P]: those rows, ascending.
        offset_P1: int64 [P + 1]: entries of row p in the lists.
        reader_Q, above_Q: int64: a row that reads it, and how far above the reader it lies (1 to 3); by distance, then
            by reader. Readers right behind are in the list too.
    """

    row_P: Tensor
    offset_P1: Tensor
    reader_Q: Tensor
    above_Q: Tensor


_BRANCHES: "WeakKeyDictionary[PackedTree, _Branches]" = WeakKeyDictionary()


def _branches(packed: PackedTree) -> _Branches:
    """Lists of a layout; built once, on its device."""
    if packed not in _BRANCHES:
        ancestor_3T = packed.ancestor_3T
        rows = packed.num_rows
        reader_T = torch.arange(rows, device=ancestor_3T.device)
        above_3 = torch.arange(1, 4, device=ancestor_3T.device)
        across_3T = (ancestor_3T < rows) & (ancestor_3T != reader_T - above_3[:, None])
        branching_T = torch.zeros(rows + 1, dtype=torch.bool, device=ancestor_3T.device)
        branching_T[ancestor_3T[across_3T]] = True
        row_P = branching_T[:rows].nonzero().squeeze(1)
        branching_T[rows] = False
        above_Q, reader_Q = branching_T[ancestor_3T].nonzero().unbind(1)
        row_Q, order_Q = torch.sort(ancestor_3T[above_Q, reader_Q], stable=True)
        offset_P = torch.searchsorted(row_Q, row_P)
        _BRANCHES[packed] = _Branches(
            row_P=row_P,
            offset_P1=torch.cat([offset_P, offset_P.new_tensor([len(row_Q)])]),
            reader_Q=reader_Q[order_Q].contiguous(),
            above_Q=(above_Q[order_Q] + 1).contiguous(),
        )
    return _BRANCHES[packed]


class _CausalConv1d(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_TD: Tensor, weight_DW: Tensor, bias_D: Tensor | None, packed: PackedTree, activate: bool
    ) -> Tensor:
        if x_TD.stride(1) != 1:
            x_TD = x_TD.contiguous()
        ctx.save_for_backward(x_TD, weight_DW, bias_D)
        ctx.packed, ctx.activate = packed, activate
        rows, channels = x_TD.shape
        y_TD = x_TD.new_empty(rows, channels)
        sizes = _Sizes.of(channels)
        grid = (triton.cdiv(rows, sizes.rows), triton.cdiv(channels, sizes.channels))
        _forward[grid](
            x_TD,
            weight_DW.contiguous(),
            bias_D,
            packed.ancestor_3T,
            y_TD,
            rows,
            channels,
            x_TD.stride(0),
            **sizes.constants(x_TD, weight_DW, bias_D, activate),
            num_warps=4,
        )
        return y_TD

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor | None, ...]:
        x_TD, weight_DW, bias_D = ctx.saved_tensors
        rows, channels = x_TD.shape
        grad_TD = grad_TD.contiguous()
        weight_DW = weight_DW.contiguous()
        taps = weight_DW.shape[1]
        sizes = _Sizes.of(channels)
        constants = sizes.constants(x_TD, weight_DW, bias_D, ctx.activate)
        block_rows = max(1, sizes.rows // 2)  # this kernel holds twice as much of each place
        ancestor_3T = ctx.packed.ancestor_3T
        sum_dtype = torch.promote_types(x_TD.dtype, torch.float32)
        dz_TD = torch.empty_like(grad_TD)
        # behind the taps lies the bias
        strips = min(_STRIPS, triton.cdiv(rows, block_rows))
        partial_SWD = torch.empty(strips, taps + (bias_D is not None), channels, dtype=sum_dtype, device=x_TD.device)
        grid = (strips, triton.cdiv(channels, sizes.channels))
        _backward_preactivation[grid](
            x_TD,
            weight_DW,
            bias_D,
            ancestor_3T,
            grad_TD,
            dz_TD,
            partial_SWD,
            rows,
            channels,
            x_TD.stride(0),
            triton.cdiv(rows, strips),
            **{**constants, "BLOCK_T": block_rows},
            num_warps=4,
        )
        total_WD = partial_SWD.sum(0)
        grad_x_TD = _input_gradient(dz_TD, weight_DW, ctx.packed, sizes, constants) if ctx.needs_input_grad[0] else None
        grad_bias_D = None if bias_D is None else total_WD[taps].to(bias_D.dtype)
        return grad_x_TD, total_WD[:taps].flip(0).mT.to(weight_DW.dtype), grad_bias_D, None, None


def _input_gradient(
    dz_TD: Tensor, weight_DW: Tensor, packed: PackedTree, sizes: "_Sizes", constants: dict[str, Any]
) -> Tensor:
    rows, channels = dz_TD.shape
    constants = {name: value for name, value in constants.items() if name not in ("BIAS", "ACTIVATE")}
    grad_x_TD = torch.empty_like(dz_TD)
    columns = triton.cdiv(channels, sizes.channels)
    _backward_input[(triton.cdiv(rows, sizes.rows), columns)](
        dz_TD, weight_DW, packed.ancestor_3T, grad_x_TD, rows, channels, **constants, num_warps=4
    )
    branches = _branches(packed)
    if len(branches.row_P):
        del constants["BLOCK_T"]
        _backward_branching[(len(branches.row_P), columns)](
            dz_TD,
            weight_DW,
            branches.row_P,
            branches.offset_P1,
            branches.reader_Q,
            branches.above_Q,
            grad_x_TD,
            channels,
            **constants,
            num_warps=2,
        )
    return grad_x_TD


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
def _read_tap(x_ptr, ancestor_ptr, row, column, inside, rows, channels, stride, above: tl.constexpr):
    """Rows `above` above each row; zeros where there is none."""
    if above == 0:
        source = row
    else:
        source = tl.load(ancestor_ptr + tl.cast(rows, tl.int64) * (above - 1) + row, mask=row < rows, other=rows)
    mask = (source < rows)[:, None] & inside
    return tl.load(x_ptr + source[:, None] * stride + column[None, :], mask=mask, other=0.0)


@triton.jit
def _read_weight(weight_ptr, column, inside, above: tl.constexpr, TAPS: tl.constexpr, SUM: tl.constexpr):
    """Weight of the row `above` above, per channel."""
    return tl.load(weight_ptr + column * TAPS + (TAPS - 1 - above), mask=inside, other=0.0).to(SUM)[None, :]


@triton.jit
def _preactivation(
    x_ptr,
    weight_ptr,
    bias_ptr,
    ancestor_ptr,
    row,
    column,
    inside,
    rows,
    channels,
    stride,
    TAPS: tl.constexpr,
    BIAS: tl.constexpr,
    SUM: tl.constexpr,
):
    """bias + sum over taps, own row first, in one order whatever the tile."""
    z = tl.zeros(inside.shape, SUM)
    if BIAS:
        z += tl.load(bias_ptr + column, mask=column < channels, other=0.0).to(SUM)[None, :]
    for above in tl.static_range(TAPS):
        x = _read_tap(x_ptr, ancestor_ptr, row, column, inside, rows, channels, stride, above)
        z += x.to(SUM) * _read_weight(weight_ptr, column, column < channels, above, TAPS, SUM)
    return z


@triton.jit(do_not_specialize=["rows"])
def _forward(
    x_ptr,
    weight_ptr,
    bias_ptr,
    ancestor_ptr,
    y_ptr,
    rows,
    channels,
    stride,
    TAPS: tl.constexpr,
    BIAS: tl.constexpr,
    ACTIVATE: tl.constexpr,
    SUM: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    column = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    inside = (row < rows)[:, None] & (column < channels)[None, :]
    z = _preactivation(
        x_ptr, weight_ptr, bias_ptr, ancestor_ptr, row, column, inside, rows, channels, stride, TAPS, BIAS, SUM
    )
    y = z / (1.0 + tl.exp(-z)) if ACTIVATE else z
    tl.store(y_ptr + row[:, None] * channels + column[None, :], y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows", "strip_rows"])
def _backward_preactivation(
    x_ptr,
    weight_ptr,
    bias_ptr,
    ancestor_ptr,
    grad_ptr,
    dz_ptr,
    partial_ptr,
    rows,
    channels,
    stride,
    strip_rows,
    TAPS: tl.constexpr,
    BIAS: tl.constexpr,
    ACTIVATE: tl.constexpr,
    SUM: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
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
        x_0 = _read_tap(x_ptr, ancestor_ptr, row, column, inside, rows, channels, stride, 0).to(SUM)
        if TAPS > 1:
            x_1 = _read_tap(x_ptr, ancestor_ptr, row, column, inside, rows, channels, stride, 1).to(SUM)
        if TAPS > 2:
            x_2 = _read_tap(x_ptr, ancestor_ptr, row, column, inside, rows, channels, stride, 2).to(SUM)
        if TAPS > 3:
            x_3 = _read_tap(x_ptr, ancestor_ptr, row, column, inside, rows, channels, stride, 3).to(SUM)
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
    """Rows whose readers all lie right behind them; `_backward_branching` overwrites the others."""
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


@triton.jit
def _backward_branching(
    dz_ptr,
    weight_ptr,
    row_ptr,
    offset_ptr,
    reader_ptr,
    above_ptr,
    grad_x_ptr,
    channels,
    TAPS: tl.constexpr,
    SUM: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One row above a branch: itself, then every row in its list."""
    place = tl.program_id(0)
    column = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    inside = column < channels
    row = tl.load(row_ptr + place)
    dz = tl.load(dz_ptr + row * channels + column, mask=inside, other=0.0).to(SUM)
    total = dz * tl.load(weight_ptr + column * TAPS + (TAPS - 1), mask=inside, other=0.0).to(SUM)
    for entry in range(tl.load(offset_ptr + place), tl.load(offset_ptr + place + 1)):
        reader = tl.load(reader_ptr + entry)
        above = tl.load(above_ptr + entry)
        mask = inside & (above < TAPS)
        dz = tl.load(dz_ptr + reader * channels + column, mask=mask, other=0.0).to(SUM)
        total += dz * tl.load(weight_ptr + column * TAPS + (TAPS - 1 - above), mask=mask, other=0.0).to(SUM)
    tl.store(grad_x_ptr + row * channels + column, total.to(grad_x_ptr.dtype.element_ty), mask=inside)
