# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Experts as two grouped matrix products, and Triton kernels for what lies around them.

A program of the kernels holds one whole row, so that nothing depends on the rows beside it. A row's K copies are added
one by one in order of k.

Shape suffixes: T rows, D channels, E experts, K experts per row, S = T * K pairs (row, expert) in order of experts, N
and M channels in front of and behind a projection, I channels inside an expert, J = 2 * I, P strips of rows.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import grouped_mm

from harts.ops import fused
from harts.ops.moe.reference import run_experts_reference

__all__ = ["run_experts_triton"]

_LARGEST = 16_384
"""Most channels that a program can hold."""

_STRIPS = 256
"""Most partial sums of the gate's gradient; a function of the number of rows, so the order of additions is fixed."""


def run_experts_triton(
    x_TD: Tensor,
    chosen_TK: Tensor,
    weight_TK: Tensor,
    gate_up_EJD: Tensor,
    down_EDI: Tensor,
    shared_TD: Tensor | None,
    shared_gate_D: Tensor | None,
) -> Tensor:
    """See `harts.ops.moe.run_experts`."""
    if x_TD.shape[1] > _LARGEST:
        raise ValueError(
            f"run_experts: impl='triton' expected at most {_LARGEST} channels, got {x_TD.shape[1]}; use 'reference'"
        )
    if not len(x_TD):  # grouped products of nothing are not defined everywhere
        return run_experts_reference(x_TD, chosen_TK, weight_TK, gate_up_EJD, down_EDI, shared_TD, shared_gate_D)
    row_S, slot_TK, stop_E = _sort(chosen_TK, len(down_EDI))
    x_SD = _Copy.apply(x_TD, row_S, slot_TK)
    middle_SI = fused.swiglu_halves(_GroupedLinear.apply(x_SD, gate_up_EJD, stop_E), impl="triton")
    y_SD = _GroupedLinear.apply(middle_SI, down_EDI, stop_E)
    return _Combine.apply(y_SD, weight_TK, slot_TK, shared_TD, x_TD, shared_gate_D)  # type: ignore[no-any-return]


def _sort(chosen_TK: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Row of each pair, place of each (row, k) among the pairs, and where each expert's pairs end (int32).

    The sort is stable, so pairs of an expert stay in order of rows.
    """
    narrow = torch.int16 if experts <= torch.iinfo(torch.int16).max else torch.int64  # fewer passes of the radix sort
    expert_S, order_S = chosen_TK.flatten().to(narrow).sort(stable=True)
    place_S = torch.arange(len(order_S), device=order_S.device)
    slot_TK = torch.empty_like(order_S).scatter_(0, order_S, place_S).view(chosen_TK.shape)
    every_E = torch.arange(experts, device=order_S.device, dtype=narrow)
    stop_E = torch.searchsorted(expert_S, every_E, right=True, out_int32=True)
    return order_S // chosen_TK.shape[1], slot_TK, stop_E


# -- autograd --------------------------------------------------------------------------------------------------------


class _Copy(torch.autograd.Function):
    """Rows once for each of their experts; backwards, the sum of a row's copies."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, row_S: Tensor, slot_TK: Tensor) -> Tensor:
        ctx.save_for_backward(slot_TK)
        return x_TD.index_select(0, row_S)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad_SD: Tensor) -> tuple[Tensor, None, None]:
        (slot_TK,) = ctx.saved_tensors
        return _combine(grad_SD.contiguous(), slot_TK)[0], None, None


class _GroupedLinear(torch.autograd.Function):
    """y = x weight^T, each expert's rows with its own weight. Keeps both."""

    @staticmethod
    def forward(ctx: Any, x_SN: Tensor, weight_EMN: Tensor, stop_E: Tensor) -> Tensor:
        ctx.save_for_backward(x_SN, weight_EMN, stop_E)
        return grouped_mm(x_SN, weight_EMN.transpose(1, 2), offs=stop_E)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad_SM: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x_SN, weight_EMN, stop_E = ctx.saved_tensors
        grad_SM = grad_SM.contiguous()
        grad_x_SN = grad_weight_EMN = None
        if ctx.needs_input_grad[0]:
            grad_x_SN = grouped_mm(grad_SM, weight_EMN, offs=stop_E)
        if ctx.needs_input_grad[1]:
            grad_weight_EMN = grouped_mm(grad_SM.t(), x_SN, offs=stop_E)
            _clear_empty(grad_weight_EMN, stop_E)
        return grad_x_SN, grad_weight_EMN, None


class _Combine(torch.autograd.Function):
    """Weighted sum of a row's copies and its share of the shared expert. Keeps its inputs and the gate's logits."""

    @staticmethod
    def forward(
        ctx: Any,
        y_SD: Tensor,
        weight_TK: Tensor,
        slot_TK: Tensor,
        shared_TD: Tensor | None,
        x_TD: Tensor,
        gate_D: Tensor | None,
    ) -> Tensor:
        y_SD, weight_TK, x_TD = y_SD.contiguous(), weight_TK.contiguous(), x_TD.contiguous()
        shared_TD = None if shared_TD is None else shared_TD.contiguous()
        gate_D = None if gate_D is None else gate_D.contiguous()
        out_TD, logit_T = _combine(y_SD, slot_TK, weight_TK, shared_TD, x_TD, gate_D)
        ctx.save_for_backward(y_SD, weight_TK, slot_TK, shared_TD, None if gate_D is None else x_TD, gate_D, logit_T)
        return out_TD

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor | None, ...]:
        y_SD, weight_TK, slot_TK, shared_TD, x_TD, gate_D, logit_T = ctx.saved_tensors
        grad_TD = grad_TD.contiguous()
        rows, size = grad_TD.shape
        grad_y_SD, grad_weight_TK = torch.empty_like(y_SD), torch.empty_like(weight_TK)
        grad_shared_TD, grad_x_TD, grad_logit_T = (
            None if each is None else torch.empty_like(each) for each in (shared_TD, x_TD, logit_T)
        )
        _combine_backward[(rows,)](
            grad_TD,
            y_SD,
            slot_TK,
            weight_TK,
            shared_TD,
            gate_D,
            logit_T,
            grad_y_SD,
            grad_weight_TK,
            grad_shared_TD,
            grad_x_TD,
            grad_logit_T,
            size,
            **_constants(y_SD, slot_TK, gate_D),
        )
        grad_gate_D = None
        if grad_logit_T is not None and ctx.needs_input_grad[5]:
            grad_gate_D = _gate_gradient(x_TD, grad_logit_T).to(gate_D.dtype)
        return grad_y_SD, grad_weight_TK, None, grad_shared_TD, grad_x_TD, grad_gate_D


# -- launches --------------------------------------------------------------------------------------------------------


def _combine(
    y_SD: Tensor,
    slot_TK: Tensor,
    weight_TK: Tensor | None = None,
    shared_TD: Tensor | None = None,
    x_TD: Tensor | None = None,
    gate_D: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The sum, and the logits of the shared expert's gate [T] in the dtype of sums."""
    rows, size = len(slot_TK), y_SD.shape[1]
    out_TD = y_SD.new_empty(rows, size)
    logit_T = None if gate_D is None else y_SD.new_empty(rows, dtype=torch.promote_types(y_SD.dtype, torch.float32))
    _combine_forward[(rows,)](
        y_SD,
        slot_TK,
        weight_TK,
        shared_TD,
        x_TD,
        gate_D,
        out_TD,
        logit_T,
        size,
        WEIGHTED=weight_TK is not None,
        **_constants(y_SD, slot_TK, gate_D),
    )
    return out_TD, logit_T


def _constants(y_SD: Tensor, slot_TK: Tensor, gate_D: Tensor | None) -> dict[str, Any]:
    block = max(16, triton.next_power_of_2(y_SD.shape[1]))
    return {
        "K": slot_TK.shape[1],
        "SHARED": gate_D is not None,
        "BLOCK_D": block,
        "num_warps": 8 if block >= 4096 else 4,
    }


def _gate_gradient(x_TD: Tensor, grad_logit_T: Tensor) -> Tensor:
    """sum_t grad_logit_t x_t, in the dtype of sums."""
    rows, size = x_TD.shape
    block_rows, block = 16, min(256, max(16, triton.next_power_of_2(size)))
    strip_rows = triton.cdiv(triton.cdiv(rows, _STRIPS), block_rows) * block_rows
    partial_PD = grad_logit_T.new_empty(triton.cdiv(rows, strip_rows), size)
    _gate_gradients[(len(partial_PD), triton.cdiv(size, block))](
        x_TD,
        grad_logit_T,
        partial_PD,
        rows,
        size,
        strip_rows,
        BLOCK_T=block_rows,
        BLOCK_D=block,
        num_warps=4,
    )
    return partial_PD.sum(0)


def _clear_empty(grad_EMN: Tensor, stop_E: Tensor) -> None:
    """Zeros for experts without rows, which grouped products do not write on every GPU (pytorch issue 172439)."""
    if not grad_EMN.is_contiguous():
        raise ValueError(f"grouped_mm: expected a contiguous gradient, got strides {grad_EMN.stride()}")
    parts = 16
    _zero_empty[(len(grad_EMN), parts)](grad_EMN, stop_E, grad_EMN[0].numel(), PARTS=parts, BLOCK=1024, num_warps=4)


# -- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def _combine_forward(
    y_ptr,
    slot_ptr,
    weight_ptr,
    shared_ptr,
    x_ptr,
    gate_ptr,
    out_ptr,
    logit_ptr,
    size,
    WEIGHTED: tl.constexpr,
    K: tl.constexpr,
    SHARED: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK_D)
    inside = column < size
    total = tl.zeros([BLOCK_D], tl.float32)
    for k in tl.static_range(K):
        slot = tl.load(slot_ptr + row * K + k)
        y = tl.load(y_ptr + slot * size + column, mask=inside, other=0.0).to(tl.float32)
        if WEIGHTED:
            y *= tl.load(weight_ptr + row * K + k).to(tl.float32)
        total += y
    if SHARED:
        x = tl.load(x_ptr + row * size + column, mask=inside, other=0.0).to(tl.float32)
        gate = tl.load(gate_ptr + column, mask=inside, other=0.0).to(tl.float32)
        shared = tl.load(shared_ptr + row * size + column, mask=inside, other=0.0).to(tl.float32)
        logit = tl.sum(x * gate, 0)
        tl.store(logit_ptr + row, logit)
        total += shared / (1.0 + tl.exp(-logit))
    tl.store(out_ptr + row * size + column, total.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _combine_backward(
    grad_ptr,
    y_ptr,
    slot_ptr,
    weight_ptr,
    shared_ptr,
    gate_ptr,
    logit_ptr,
    grad_y_ptr,
    grad_weight_ptr,
    grad_shared_ptr,
    grad_x_ptr,
    grad_logit_ptr,
    size,
    K: tl.constexpr,
    SHARED: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK_D)
    inside = column < size
    place = row * size + column
    grad = tl.load(grad_ptr + place, mask=inside, other=0.0).to(tl.float32)
    for k in tl.static_range(K):
        slot = tl.load(slot_ptr + row * K + k)
        weight = tl.load(weight_ptr + row * K + k).to(tl.float32)
        y = tl.load(y_ptr + slot * size + column, mask=inside, other=0.0).to(tl.float32)
        grad_weight = tl.sum(grad * y, 0)
        tl.store(grad_weight_ptr + row * K + k, grad_weight.to(grad_weight_ptr.dtype.element_ty))
        grad_y = (grad * weight).to(grad_y_ptr.dtype.element_ty)
        tl.store(grad_y_ptr + slot * size + column, grad_y, mask=inside)
    if SHARED:
        gate = tl.load(gate_ptr + column, mask=inside, other=0.0).to(tl.float32)
        shared = tl.load(shared_ptr + place, mask=inside, other=0.0).to(tl.float32)
        share = 1.0 / (1.0 + tl.exp(-tl.load(logit_ptr + row)))
        grad_logit = tl.sum(grad * shared, 0) * share * (1.0 - share)
        tl.store(grad_logit_ptr + row, grad_logit)
        tl.store(grad_shared_ptr + place, (grad * share).to(grad_shared_ptr.dtype.element_ty), mask=inside)
        tl.store(grad_x_ptr + place, (grad_logit * gate).to(grad_x_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows", "strip_rows"])
def _gate_gradients(
    x_ptr,
    grad_logit_ptr,
    partial_ptr,
    rows,
    size,
    strip_rows,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    strip = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    stop = tl.minimum((strip + 1) * strip_rows, rows)
    total = tl.zeros([BLOCK_D], tl.float32)
    for first in range(strip * strip_rows, stop, BLOCK_T):
        row = first + tl.arange(0, BLOCK_T)
        grad_logit = tl.load(grad_logit_ptr + row, mask=row < stop, other=0.0)
        inside = (row < stop)[:, None] & (column < size)[None, :]
        x = tl.load(x_ptr + row[:, None] * size + column[None, :], mask=inside, other=0.0)
        total += tl.sum(x.to(tl.float32) * grad_logit[:, None], 0)
    tl.store(partial_ptr + strip * size + column, total, mask=column < size)


@triton.jit
def _zero_empty(grad_ptr, stop_ptr, size, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    expert = tl.program_id(0).to(tl.int64)
    start = tl.load(stop_ptr + expert - 1, mask=expert > 0, other=0)
    if start == tl.load(stop_ptr + expert):
        for first in range(tl.program_id(1) * BLOCK, size, PARTS * BLOCK):
            column = first + tl.arange(0, BLOCK)
            zero = tl.zeros([BLOCK], tl.float32).to(grad_ptr.dtype.element_ty)
            tl.store(grad_ptr + expert * size + column, zero, mask=column < size)
