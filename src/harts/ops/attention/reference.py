"""Tree attention by scaled_dot_product_attention, chain by chain.

The queries of a chain are its own rows, the last ones of its path; the keys are the path. Long chains run in tiles of
queries, so that the corner of the mask that hides everything stays small. With a window, a tile reads only the keys
that its rows see. Soft-capped scores and sinks, which scaled_dot_product_attention has not, are written out.

Shape suffixes: T rows, K gathered keys, H query heads, G key heads, D head size, Q queries of a tile.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from harts.layout import PackedTree
from harts.ops.attention.calls import Call, forward_calls, limits, take

__all__ = ["attention_reference"]

_TILE = 512


def attention_reference(
    q_THD: Tensor,
    k_TGD: Tensor,
    v_TGV: Tensor,
    packed: PackedTree,
    scale: float,
    context: tuple[Tensor, Tensor] | None = None,
    *,
    window: int | None = None,
    softcap: float | None = None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """See `harts.ops.attention`; works in the dtype of the inputs."""
    if context is not None:
        k_TGD, v_TGV = torch.cat([context[0], k_TGD]), torch.cat([context[1], v_TGV])
    attend = _sdpa if softcap is None and sinks_H is None else partial(_written_out, softcap=softcap, sinks_H=sinks_H)
    out: list[Tensor] = []
    for call in packed.layout(forward_calls, *limits(window)):
        q, k, v = take(q_THD, call.queries), take(k_TGD, call.keys), take(v_TGV, call.keys)
        out.extend(_call_attention(q, k, v, call, partial(attend, scale=scale)))
    return torch.cat(out)


def _call_attention(
    q_QHD: Tensor, k_KGD: Tensor, v_KGV: Tensor, call: Call, attend: Callable[..., Tensor]
) -> list[Tensor]:
    """Outputs of the call's chains, tile by tile, in row order."""
    out: list[Tensor] = []
    chains = zip(
        torch.split(q_QHD, list(call.query_lengths)),
        torch.split(k_KGD, list(call.key_lengths)),
        torch.split(v_KGV, list(call.key_lengths)),
        strict=True,
    )
    for q, k, v in chains:
        before, window = len(k) - len(q), call.window or len(k)
        if before == 0 and window >= len(k):
            out.append(attend(q, k, v, None))
            continue
        for start in range(0, len(q), _TILE):
            stop = min(start + _TILE, len(q))
            keys = slice(max(before + start + 1 - window, 0), before + stop)
            own = before + start - keys.start  # key of the first query
            visible = torch.ones(stop - start, own + stop - start, dtype=torch.bool, device=q.device)
            visible = visible.tril(own).triu(own + 1 - window)
            out.append(attend(q[start:stop], k[keys], v[keys], visible))
    return out


def _sdpa(q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, *, scale: float) -> Tensor:
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    out = scaled_dot_product_attention(
        q, k, v, attn_mask=visible, is_causal=visible is None, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )
    return out.squeeze(0).transpose(0, 1)


def _written_out(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Tensor | None,
    *,
    scale: float,
    softcap: float | None,
    sinks_H: Tensor | None,
) -> Tensor:
    """The same with all scores: capped, and with a sink as one more key, whose value is zero."""
    repeats = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
    scores_HQK = torch.einsum("qhd,khd->hqk", q, k) * scale
    if softcap is not None:
        scores_HQK = softcap * torch.tanh(scores_HQK / softcap)
    if visible is None:
        visible = torch.ones(scores_HQK.shape[1:], dtype=torch.bool, device=q.device).tril()
    scores_HQK = scores_HQK.masked_fill(~visible, -torch.inf)
    if sinks_H is not None:
        sinks_HQ1 = sinks_H.to(scores_HQK.dtype)[:, None, None].expand(-1, len(q), 1)
        scores_HQK = torch.cat([scores_HQK, sinks_HQ1], dim=-1)
    weights_HQK = scores_HQK.softmax(-1)[..., : len(k)]
    return torch.einsum("hqk,khv->qhv", weights_HQK, v)
