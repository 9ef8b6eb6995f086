# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Log-probabilities and entropies, chunk by chunk: the products by the BLAS, everything else by one kernel each way.

A chunk's logits are written once, in the dtype of hidden, and read once; the backward computes them again and turns
them into their gradient in place. The last chunk is filled up with rows of zeros, so that every product has one of few
fixed numbers of rows and a row's value does not depend on how many rows come with it. The weight's gradient is
summed in fp32 over the chunks. Per row, sums over the vocabulary run tile after tile in one order.

Shape suffixes: T rows, U head rows, M targets, D channels, V vocabulary, R rows of a chunk.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from harts.layout import PackedTree
from harts.ops.logprobs.indices import head_rows, heads_of_targets
from harts.ops.requirements import check_tensors
from harts.ops.rows import RowGroups, gather_rows

__all__ = ["row_logprobs_triton"]

_FILL = 1024
"""The last chunk is filled up to a multiple of this many rows (or of the chunk's, if those are fewer)."""

_BLOCK_V = 4096


def row_logprobs_triton(
    hidden_TD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, packed: PackedTree, entropy: bool, chunk_rows: int
) -> tuple[Tensor, Tensor | None]:
    """See `harts.ops.row_logprobs`; entropies are per head row here, [U]."""
    check_tensors("row_logprobs", hidden=hidden_TD, weight=weight_VD, bias=bias_V)
    if hidden_TD.dtype == torch.float64:
        raise ValueError("row_logprobs: impl='triton' expected fp16, bf16 or fp32, got float64; choose impl='chunked'")
    hidden_UD = gather_rows(hidden_TD, packed.layout(head_rows), impl="triton")
    targets = packed.layout(heads_of_targets).groups
    cooling_U = packed.temperature_U.reciprocal().float()
    logprobs_M, entropy_U = _HeadLogprobs.apply(
        hidden_UD, weight_VD, bias_V, cooling_U, packed.token_M, targets, entropy, chunk_rows
    )
    return logprobs_M, entropy_U if entropy else None


class _HeadLogprobs(torch.autograd.Function):
    """Keeps its inputs and two numbers a head row."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_UD: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        cooling_U: Tensor,
        token_M: Tensor,
        targets: RowGroups,
        entropy: bool,
        chunk_rows: int,
    ) -> tuple[Tensor, Tensor]:
        rows = len(hidden_UD)
        logprobs_M = torch.empty(len(token_M), dtype=torch.float32, device=hidden_UD.device)
        lse_U = torch.empty(rows, dtype=torch.float32, device=hidden_UD.device)
        entropy_U = torch.empty(rows if entropy else 0, dtype=torch.float32, device=hidden_UD.device)
        chunks = _Chunks(hidden_UD, weight_VD, chunk_rows)
        for start, stop in chunks.ranges:
            logits_RV = chunks.logits(start, stop)
            _statistics[(stop - start,)](
                logits_RV,
                bias_V,
                cooling_U,
                targets.order_K,
                targets.offset_T1,
                token_M,
                logprobs_M,
                lse_U,
                entropy_U,
                start,
                len(weight_VD),
                BIAS=bias_V is not None,
                ENTROPY=entropy,
                BLOCK_V=min(_BLOCK_V, triton.next_power_of_2(len(weight_VD))),
                num_warps=8,
            )
        ctx.save_for_backward(hidden_UD, weight_VD, bias_V, cooling_U, token_M, lse_U, entropy_U)
        ctx.targets, ctx.entropy, ctx.chunk_rows = targets, entropy, chunk_rows
        return logprobs_M, entropy_U

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad_M: Tensor, grad_entropy_U: Tensor) -> tuple[Tensor | None, ...]:
        hidden_UD, weight_VD, bias_V, cooling_U, token_M, lse_U, entropy_U = ctx.saved_tensors
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        grad_M, grad_entropy_U = grad_M.contiguous(), grad_entropy_U.contiguous()
        chunks = _Chunks(hidden_UD, weight_VD, ctx.chunk_rows)
        grad_hidden_UD = torch.empty_like(hidden_UD) if need_hidden else None
        weight_sum = _WeightGradient(weight_VD) if need_weight else None
        bias_sum_V = torch.zeros(len(weight_VD), device=hidden_UD.device) if need_bias else None
        for start, stop in chunks.ranges:
            grad_RV = chunks.logits(start, stop)
            _logits_gradient[(stop - start,)](
                grad_RV,
                bias_V,
                cooling_U,
                ctx.targets.order_K,
                ctx.targets.offset_T1,
                token_M,
                lse_U,
                entropy_U,
                grad_M,
                grad_entropy_U,
                start,
                len(weight_VD),
                BIAS=bias_V is not None,
                ENTROPY=ctx.entropy,
                BLOCK_V=min(_BLOCK_V, triton.next_power_of_2(len(weight_VD))),
                num_warps=8,
            )
            grad_RV[stop - start :] = 0
            if grad_hidden_UD is not None:
                grad_hidden_UD[start:stop] = (grad_RV @ weight_VD)[: stop - start]
            if weight_sum is not None:
                weight_sum.add(grad_RV, chunks.hidden(start, stop))
            if bias_sum_V is not None:
                bias_sum_V += grad_RV.sum(0, dtype=torch.float32)
        grad_bias_V = None if bias_sum_V is None or bias_V is None else bias_sum_V.to(bias_V.dtype)
        return grad_hidden_UD, None if weight_sum is None else weight_sum.result(), grad_bias_V, *[None] * 5


class _Chunks:
    """Ranges of head rows and their logits, in one buffer that every chunk overwrites."""

    def __init__(self, hidden_UD: Tensor, weight_VD: Tensor, chunk_rows: int) -> None:
        rows, step = len(hidden_UD), min(_FILL, chunk_rows)
        chunk_rows = chunk_rows // step * step
        self.ranges = [(start, min(start + chunk_rows, rows)) for start in range(0, rows, chunk_rows)]
        self.step, self.hidden_UD, self.weight_VD = step, hidden_UD, weight_VD
        largest = self._filled(min(chunk_rows, rows))
        self.logits_RV = hidden_UD.new_empty(largest, len(weight_VD))

    def _filled(self, rows: int) -> int:
        return -(-rows // self.step) * self.step

    def hidden(self, start: int, stop: int) -> Tensor:
        """The chunk's hidden rows, the last chunk's filled up with zeros."""
        missing = self._filled(stop - start) - (stop - start)
        if missing == 0:
            return self.hidden_UD[start:stop]
        return torch.nn.functional.pad(self.hidden_UD[start:stop], (0, 0, 0, missing))

    def logits(self, start: int, stop: int) -> Tensor:
        """The chunk's logits, without bias."""
        return torch.mm(self.hidden(start, stop), self.weight_VD.mT, out=self.logits_RV[: self._filled(stop - start)])


class _WeightGradient:
    """Sum over chunks of grad^T hidden, in fp32."""

    def __init__(self, weight_VD: Tensor) -> None:
        self.dtype = weight_VD.dtype
        self.total_VD = torch.zeros(weight_VD.shape, dtype=torch.float32, device=weight_VD.device)
        self.in_product = weight_VD.is_cuda and weight_VD.dtype != torch.float32

    def add(self, grad_RV: Tensor, hidden_RD: Tensor) -> None:
        """Adds one chunk; on CUDA the product itself adds to the sum, in fp32."""
        if self.in_product:
            torch.addmm(self.total_VD, grad_RV.mT, hidden_RD, out_dtype=torch.float32, out=self.total_VD)
        else:
            self.total_VD.addmm_(grad_RV.mT.float(), hidden_RD.float())

    def result(self) -> Tensor:
        """The sum, in the dtype of the weight."""
        return self.total_VD.to(self.dtype)


@triton.jit
def _load_scaled(logits_ptr, bias_ptr, cooling, column, vocabulary, BIAS: tl.constexpr):
    """(logit + bias) / temperature; -inf behind the vocabulary."""
    inside = column < vocabulary
    x = tl.load(logits_ptr + column, mask=inside, other=float("-inf")).to(tl.float32)
    if BIAS:
        x += tl.load(bias_ptr + column, mask=inside, other=0.0).to(tl.float32)
    return x * cooling


@triton.jit(do_not_specialize=["first"])
def _statistics(
    logits_ptr,
    bias_ptr,
    cooling_ptr,
    order_ptr,
    offset_ptr,
    token_ptr,
    logprobs_ptr,
    lse_ptr,
    entropy_ptr,
    first,
    vocabulary,
    BIAS: tl.constexpr,
    ENTROPY: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """One head row: log-sum-exp, entropy, and the log-probabilities of its targets, in one pass over its logits."""
    logits_ptr += tl.program_id(0).to(tl.int64) * vocabulary
    row = first + tl.program_id(0)
    cooling = tl.load(cooling_ptr + row)
    largest = -3.0e38
    total = 0.0
    weighted = 0.0
    for start in range(0, vocabulary, BLOCK_V):
        x = _load_scaled(logits_ptr, bias_ptr, cooling, start + tl.arange(0, BLOCK_V), vocabulary, BIAS)
        new_largest = tl.maximum(largest, tl.max(x, 0))
        rescale = tl.exp(largest - new_largest)
        e = tl.exp(x - new_largest)
        total = total * rescale + tl.sum(e, 0)
        if ENTROPY:
            weighted = weighted * rescale + tl.sum(e * tl.where(e > 0.0, x, 0.0), 0)
        largest = new_largest
    lse = largest + tl.log(total)
    tl.store(lse_ptr + row, lse)
    if ENTROPY:
        tl.store(entropy_ptr + row, lse - weighted / total)
    for entry in range(tl.load(offset_ptr + row), tl.load(offset_ptr + row + 1)):
        target = tl.load(order_ptr + entry)
        x = _load_scaled(logits_ptr, bias_ptr, cooling, tl.load(token_ptr + target), vocabulary, BIAS)
        tl.store(logprobs_ptr + target, x - lse)


@triton.jit(do_not_specialize=["first"])
def _logits_gradient(
    logits_ptr,
    bias_ptr,
    cooling_ptr,
    order_ptr,
    offset_ptr,
    token_ptr,
    lse_ptr,
    entropy_ptr,
    grad_ptr,
    grad_entropy_ptr,
    first,
    vocabulary,
    BIAS: tl.constexpr,
    ENTROPY: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Overwrites one row of logits with its gradient.

    With p the probabilities and z the logits divided by the temperature: d log p_i / d z = onehot_i - p, and
    d entropy / d z = -p (log p + entropy).
    """
    logits_ptr += tl.program_id(0).to(tl.int64) * vocabulary
    row = first + tl.program_id(0)
    cooling = tl.load(cooling_ptr + row)
    lse = tl.load(lse_ptr + row)
    begin, end = tl.load(offset_ptr + row), tl.load(offset_ptr + row + 1)
    grad_sum = 0.0
    for entry in range(begin, end):
        grad_sum += tl.load(grad_ptr + tl.load(order_ptr + entry))
    if ENTROPY:
        entropy = tl.load(entropy_ptr + row)
        grad_entropy = tl.load(grad_entropy_ptr + row)
    for start in range(0, vocabulary, BLOCK_V):
        column = start + tl.arange(0, BLOCK_V)
        logp = _load_scaled(logits_ptr, bias_ptr, cooling, column, vocabulary, BIAS) - lse
        p = tl.exp(logp)
        grad = -p * grad_sum
        if ENTROPY:
            grad -= p * (tl.where(p > 0.0, logp, 0.0) + entropy) * grad_entropy
        for entry in range(begin, end):
            target = tl.load(order_ptr + entry)
            grad += tl.where(column == tl.load(token_ptr + target), tl.load(grad_ptr + target), 0.0)
        tl.store(logits_ptr + column, (grad * cooling).to(logits_ptr.dtype.element_ty), mask=column < vocabulary)
