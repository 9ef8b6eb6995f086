"""Tree attention by scaled_dot_product_attention, chain by chain.

The queries of a chain are its own rows, the last ones of its path; the keys are the path. Long chains run in tiles of
queries, so that the corner of the mask that hides everything stays small.

Shape suffixes: T rows, K gathered keys, H query heads, G key heads, D head size, Q queries of a tile.
"""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from harts.layout import PackedTree
from harts.ops.attention.calls import Call, forward_calls, take

__all__ = ["attention_reference"]

_TILE = 512


def attention_reference(
    q_THD: Tensor,
    k_TGD: Tensor,
    v_TGV: Tensor,
    packed: PackedTree,
    scale: float,
    context: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """See `harts.ops.attention`; works in the dtype of the inputs."""
    if context is not None:
        k_TGD, v_TGV = torch.cat([context[0], k_TGD]), torch.cat([context[1], v_TGV])
    out: list[Tensor] = []
    for call in packed.layout(forward_calls):
        q, k, v = take(q_THD, call.queries), take(k_TGD, call.keys), take(v_TGV, call.keys)
        out.extend(_call_attention(q, k, v, call, scale))
    return torch.cat(out)


def _call_attention(q_QHD: Tensor, k_KGD: Tensor, v_KGV: Tensor, call: Call, scale: float) -> list[Tensor]:
    """Outputs of the call's chains, tile by tile, in row order."""
    out: list[Tensor] = []
    chains = zip(
        torch.split(q_QHD, list(call.query_lengths)),
        torch.split(k_KGD, list(call.key_lengths)),
        torch.split(v_KGV, list(call.key_lengths)),
        strict=True,
    )
    for q, k, v in chains:
        before = len(k) - len(q)
        if before == 0:
            out.append(_sdpa(q, k, v, scale, None))
            continue
        for start in range(0, len(q), _TILE):
            stop = min(start + _TILE, len(q))
            visible = torch.ones(stop - start, before + stop, dtype=torch.bool, device=q.device).tril(before + start)
            out.append(_sdpa(q[start:stop], k[: before + stop], v[: before + stop], scale, visible))
    return out


def _sdpa(q: Tensor, k: Tensor, v: Tensor, scale: float, visible: Tensor | None) -> Tensor:
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    out = scaled_dot_product_attention(
        q, k, v, attn_mask=visible, is_causal=visible is None, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )
    return out.squeeze(0).transpose(0, 1)
