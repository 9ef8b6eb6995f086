"""Attention from its scores, for what scaled_dot_product_attention has not: soft-capped scores and sinks.

Shape suffixes: Q queries, K keys, H query heads, G key heads, D and V head sizes.
"""

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

__all__ = ["attend_with_scores", "visible_keys"]


def visible_keys(q_QHD: Tensor, k_KGD: Tensor, own: int, window: int) -> Tensor:
    """bool [Q, K]: the keys that each query sees, its own and those before it, `window` in all.

    Args:
        q_QHD, k_KGD: queries in a row, and keys.
        own: key of the first query.
        window: at least 1.
    """
    visible_QK = torch.ones(len(q_QHD), len(k_KGD), dtype=torch.bool, device=q_QHD.device)
    return visible_QK.tril(own).triu(own + 1 - window)


def attend_with_scores(
    q_QHD: Tensor,
    k_KGD: Tensor,
    v_KGV: Tensor,
    own: int,
    window: int,
    *,
    sinks_H: Tensor | None,
    scale: float,
    softcap: float | None,
) -> Tensor:
    """Softmax attention; scores and weights in at least fp32. A backward computes them again and keeps none.

    Args:
        q_QHD, k_KGD, v_KGV: [Q, H, D], [K, G, D], [K, G, V].
        own, window: which keys are visible; see `visible_keys`.
        sinks_H: one more key for every query, whose score is this and whose value is zero.
        scale: factor on q k^T.
        softcap: scores become softcap * tanh(scores / softcap).

    Returns:
        [Q, H, V], in the dtype of q.
    """
    inputs = (q_QHD, k_KGD, v_KGV, own, window, sinks_H, scale, softcap)
    if not torch.is_grad_enabled():
        return _attend(*inputs)
    return checkpoint(_attend, *inputs, use_reentrant=False, preserve_rng_state=False)  # type: ignore[no-any-return]


def _attend(
    q_QHD: Tensor,
    k_KGD: Tensor,
    v_KGV: Tensor,
    own: int,
    window: int,
    sinks_H: Tensor | None,
    scale: float,
    softcap: float | None,
) -> Tensor:
    repeats, dtype = q_QHD.shape[1] // k_KGD.shape[1], torch.promote_types(q_QHD.dtype, torch.float32)
    k_KHD, v_KHV = (x.to(dtype).repeat_interleave(repeats, 1) for x in (k_KGD, v_KGV))
    scores_HQK = torch.einsum("qhd,khd->hqk", q_QHD.to(dtype), k_KHD) * scale
    if softcap is not None:
        scores_HQK = softcap * torch.tanh(scores_HQK / softcap)
    scores_HQK = scores_HQK.masked_fill(~visible_keys(q_QHD, k_KGD, own, window), -torch.inf)
    if sinks_H is not None:
        sinks_HQ1 = sinks_H.to(dtype)[:, None, None].expand(-1, len(q_QHD), 1)
        scores_HQK = torch.cat([scores_HQK, sinks_HQ1], dim=-1)
    weights_HQK = scores_HQK.softmax(-1)[..., : len(k_KGD)]
    return torch.einsum("hqk,khv->qhv", weights_HQK, v_KHV).to(q_QHD.dtype)
