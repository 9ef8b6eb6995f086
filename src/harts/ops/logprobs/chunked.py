"""Log-probabilities with at most `chunk_rows` rows of logits at a time, forward and backward.

Shape suffixes: T rows, U head rows, M targets, D channels, V vocabulary, R rows of a chunk.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from harts.layout import PackedTree

__all__ = ["row_logprobs_chunked"]


def row_logprobs_chunked(
    hidden_TD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, packed: PackedTree, entropy: bool, chunk_rows: int
) -> tuple[Tensor, Tensor | None]:
    """See `harts.ops.row_logprobs`; entropies are per head row here, [U]."""
    hidden_UD = hidden_TD.index_select(0, packed.head_row_U)
    logprobs_M, entropy_U = _HeadLogprobs.apply(
        hidden_UD, weight_VD, bias_V, packed.temperature_U, packed.head_of_M, packed.token_M, entropy, chunk_rows
    )  # type: ignore[no-untyped-call]
    return logprobs_M, entropy_U if entropy else None


class _HeadLogprobs(torch.autograd.Function):
    """Keeps two numbers per head row, its largest logit and the logarithm of sum exp(logit - largest).

    They are never added up: log p = (logit - largest) - log_sum has one rounding less than logit - logsumexp. The
    backward computes the logits of a chunk again.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_UD: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        temperature_U: Tensor,
        head_of_M: Tensor,
        token_M: Tensor,
        entropy: bool,
        chunk_rows: int,
    ) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(hidden_UD.dtype, torch.float32)
        temperature_U = temperature_U.to(dtype)
        logprobs_M = hidden_UD.new_empty(len(token_M), dtype=dtype)
        entropy_U = hidden_UD.new_empty(len(hidden_UD) if entropy else 0, dtype=dtype)
        norm_2U = hidden_UD.new_empty(2, len(hidden_UD), dtype=dtype)
        for start, stop, targets in _chunks(head_of_M, len(hidden_UD), chunk_rows):
            part = slice(start, stop)
            logits_RV = _logits(hidden_UD[part], weight_VD, bias_V, temperature_U[part])
            largest_R = logits_RV.amax(-1)
            logits_RV -= largest_R[:, None]
            log_sum_R = logits_RV.exp().sum(-1).log()
            norm_2U[:, part] = torch.stack([largest_R, log_sum_R])
            row = head_of_M[targets] - start
            logprobs_M[targets] = logits_RV[row, token_M[targets]] - log_sum_R[row]
            if entropy:
                probs_RV = (logits_RV - log_sum_R[:, None]).exp()
                entropy_U[part] = log_sum_R - (probs_RV * logits_RV).sum(-1)
        ctx.save_for_backward(hidden_UD, weight_VD, bias_V, temperature_U, head_of_M, token_M, norm_2U, entropy_U)
        ctx.entropy, ctx.chunk_rows = entropy, chunk_rows
        return logprobs_M, entropy_U

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad_M: Tensor, grad_entropy_U: Tensor) -> tuple[Tensor | None, ...]:
        hidden_UD, weight_VD, bias_V, temperature_U, head_of_M, token_M, norm_2U, entropy_U = ctx.saved_tensors
        dtype = norm_2U.dtype
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        grad_hidden_UD = torch.empty_like(hidden_UD) if need_hidden else None
        grad_weight_VD = torch.zeros_like(weight_VD, dtype=dtype) if need_weight else None
        grad_bias_V = torch.zeros_like(bias_V, dtype=dtype) if bias_V is not None and need_bias else None
        for start, stop, targets in _chunks(head_of_M, len(hidden_UD), ctx.chunk_rows):
            part = slice(start, stop)
            logits_RV = _logits(hidden_UD[part], weight_VD, bias_V, temperature_U[part])
            logp_RV = (logits_RV - norm_2U[0, part, None]) - norm_2U[1, part, None]
            probs_RV = logp_RV.exp()
            row = head_of_M[targets] - start
            grad_R = torch.zeros_like(norm_2U[0, part]).index_add_(0, row, grad_M[targets])
            grad_RV = -probs_RV * grad_R[:, None]
            grad_RV.index_put_((row, token_M[targets]), grad_M[targets], accumulate=True)
            if ctx.entropy:  # d entropy / d logit = -p (log p + entropy)
                grad_RV -= probs_RV * (logp_RV + entropy_U[part, None]) * grad_entropy_U[part, None]
            grad_RV = (grad_RV / temperature_U[part, None]).to(hidden_UD.dtype)
            if grad_hidden_UD is not None:
                grad_hidden_UD[part] = grad_RV @ weight_VD
            if grad_weight_VD is not None:
                grad_weight_VD += grad_RV.mT @ hidden_UD[part]
            if grad_bias_V is not None:
                grad_bias_V += grad_RV.sum(0, dtype=dtype)
        return (
            grad_hidden_UD,
            None if grad_weight_VD is None else grad_weight_VD.to(weight_VD.dtype),
            None if grad_bias_V is None or bias_V is None else grad_bias_V.to(bias_V.dtype),
            *[None] * 5,
        )


def _logits(hidden_RD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, temperature_R: Tensor) -> Tensor:
    logits_RV = hidden_RD @ weight_VD.mT
    if bias_V is not None:
        logits_RV = logits_RV + bias_V
    return logits_RV.to(temperature_R.dtype) / temperature_R[:, None]


def _chunks(head_of_M: Tensor, rows: int, chunk_rows: int) -> list[tuple[int, int, Tensor]]:
    """(first row, row behind the last, targets) of each chunk."""
    chunks = []
    for start in range(0, rows, chunk_rows):
        stop = min(start + chunk_rows, rows)
        chunks.append((start, stop, ((head_of_M >= start) & (head_of_M < stop)).nonzero().squeeze(-1)))
    return chunks
