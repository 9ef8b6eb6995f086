"""Tree attention by scaled_dot_product_attention, chain by chain.

The queries of a chain are its own rows, the last ones of its path; the keys are the path. Long chains run in tiles of
queries, so that the corner of the mask that hides everything stays small. With a window, a tile reads only the keys
that its rows see. Soft-capped scores and sinks, which scaled_dot_product_attention has not, are in `scores`.

Shape suffixes: T rows, K gathered keys, H query heads, G key heads, D head size, Q queries of a tile.
"""

from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from harts.layout import PackedTree
from harts.ops.attention.calls import Call, forward_calls, limits, take
from harts.ops.attention.scores import attend_with_scores, visible_keys

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
    attend = partial(_sdpa, scale=scale)
    if softcap is not None or sinks_H is not None:
        attend = partial(attend_with_scores, sinks_H=sinks_H, scale=scale, softcap=softcap)
    out: list[Tensor] = []
    for call in packed.layout(forward_calls, *limits(window)):
        q, k, v = take(q_THD, call.queries), take(k_TGD, call.keys), take(v_TGV, call.keys)
        out.extend(_call_attention(q, k, v, call, attend))
    return torch.cat(out)


def _call_attention(q_QHD: Tensor, k_KGD: Tensor, v_KGV: Tensor, call: Call, attend: "partial[Tensor]") -> list[Tensor]:
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
        if before == 0 and window >= len(k) and attend.func is _sdpa:
            out.append(attend(q, k, v))
            continue
        for start in range(0, len(q), _TILE):
            stop = min(start + _TILE, len(q))
            keys = slice(max(before + start + 1 - window, 0), before + stop)
            out.append(attend(q[start:stop], k[keys], v[keys], before + start - keys.start, window))
    return out


def _sdpa(
    q: Tensor, k: Tensor, v: Tensor, own: int | None = None, window: int | None = None, *, scale: float
) -> Tensor:
    """With `visible_keys`, or as many keys as queries, each of which sees those up to its own."""
    visible = None if own is None or window is None else visible_keys(q, k, own, window)
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    out = scaled_dot_product_attention(
        q, k, v, attn_mask=visible, is_causal=visible is None, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )
    return out.squeeze(0).transpose(0, 1)
