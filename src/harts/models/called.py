"""Log-probs through the head as a module, hooks and all, with at most `chunk_rows` rows of logits at a time.

For heads that do more than their weight says. The backward calls the head again, chunk by chunk, so a hook runs twice
in training.

Shape suffixes: T rows, U head rows, M targets, D channels, V vocabulary, R rows of a chunk, m targets of a chunk, K
most likely tokens.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from harts.layout import PackedTree
from harts.models.seams import LogitShape

__all__ = ["called_logprobs"]


def called_logprobs(
    head: nn.Linear,
    hidden_UD: Tensor,
    packed: PackedTree,
    shape: LogitShape,
    *,
    entropy: bool,
    top_k: int | None,
    chunk_rows: int,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Calls the head as transformers does, with `[1, R, D]`, and takes what comes out.

    Args:
        head: gives logits [1, R, V] of each row by itself.
        hidden_UD: hidden states of `packed.head_row_U`.
        packed: the tree.
        shape: what the model does to logits.
        entropy: whether to return entropies.
        top_k: how many of the most likely tokens to return; None for none.
        chunk_rows: logit rows that exist at once.

    Returns:
        (logprobs_M, entropy_U, top_logprobs_UK, top_ids_UK), what was not asked for None; fp32, fp64 for fp64 logits.

    Raises:
        ValueError: something else than logits of every row came out of the head.
    """
    parts: list[tuple[Tensor, ...]] = []
    order: list[Tensor] = []
    for start in range(0, max(1, len(hidden_UD)), chunk_rows):
        part = slice(start, start + chunk_rows)
        target_m = ((packed.head_of_M >= start) & (packed.head_of_M < start + chunk_rows)).nonzero().squeeze(-1)
        order.append(target_m)
        parts.append(
            checkpoint(
                _score,
                head,
                hidden_UD[part],
                packed.temperature_U[part],
                packed.head_of_M[target_m] - start,
                packed.token_M[target_m],
                shape,
                top_k,
                entropy,
                use_reentrant=False,
            )
        )
    logprobs, entropies, top, ids = (torch.cat(each) for each in zip(*parts, strict=True))
    logprobs_M = torch.zeros_like(logprobs).index_copy(0, torch.cat(order), logprobs)
    return (
        logprobs_M,
        entropies if entropy else None,
        top if top_k is not None else None,
        ids if top_k is not None else None,
    )


def _score(
    head: nn.Linear,
    hidden_RD: Tensor,
    temperature_R: Tensor,
    row_m: Tensor,
    token_m: Tensor,
    shape: LogitShape,
    top_k: int | None,
    entropy: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    logits_1RV: Any = head(hidden_RD.unsqueeze(0))
    expected = (1, len(hidden_RD), head.out_features)
    if not isinstance(logits_1RV, Tensor) or tuple(logits_1RV.shape) != expected:
        got = list(logits_1RV.shape) if isinstance(logits_1RV, Tensor) else type(logits_1RV).__name__
        raise ValueError(
            f"model: expected logits {list(expected)} of the head, got {got}; its hooks and its forward may change "
            "values, not their shape"
        )
    dtype = torch.promote_types(logits_1RV.dtype, torch.float32)
    logits_RV = logits_1RV[0].to(dtype) / shape.scaling
    if shape.cap is not None:
        logits_RV = (logits_RV / shape.cap).tanh() * shape.cap
    logp_RV = (logits_RV / temperature_R.to(dtype)[:, None]).log_softmax(-1)
    entropy_R = logp_RV.new_zeros(0)
    if entropy:  # exp(-1e4) is 0 in any dtype: a token that a hook forbids has logp -inf, and adds nothing
        entropy_R = -(logp_RV.exp() * logp_RV.clamp(min=-1e4)).sum(-1)
    top = logp_RV.topk(top_k or 0)
    return logp_RV[row_m, token_m], entropy_R, top.values, top.indices
