"""Tree attention by scaled_dot_product_attention, chain by chain.

The queries of a chain are its own rows, the last ones of its path; the keys are the path. Long chains run in tiles of
queries, so that the corner of the mask that hides everything stays small.

Shape suffixes: T rows, K gathered keys, H query heads, G key heads, D head size, Q queries of a tile.
"""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from harts.layout import KeyGroup, PackedTree

__all__ = ["attention_reference"]

_TILE = 512


def attention_reference(q_THD: Tensor, k_TGD: Tensor, v_TGV: Tensor, packed: PackedTree, scale: float) -> Tensor:
    """See `harts.ops.attention`; works in the dtype of the inputs."""
    rows = [group.row_stop - group.row_start for group in packed.key_groups]
    groups = zip(
        packed.key_groups, torch.split(q_THD, rows), torch.split(k_TGD, rows), torch.split(v_TGV, rows), strict=True
    )
    out: list[Tensor] = []
    for group, q, k, v in groups:
        if group.key_row_K is not None:
            k, v = k_TGD.index_select(0, group.key_row_K), v_TGV.index_select(0, group.key_row_K)
        out.extend(_group_attention(q, k, v, group, scale))
    return torch.cat(out)


def _group_attention(q_QHD: Tensor, k_KGD: Tensor, v_KGV: Tensor, group: KeyGroup, scale: float) -> list[Tensor]:
    """Outputs of the group's chains, tile by tile, in row order."""
    out: list[Tensor] = []
    chains = zip(
        torch.split(q_QHD, list(group.query_lengths)),
        torch.split(k_KGD, list(group.key_lengths)),
        torch.split(v_KGV, list(group.key_lengths)),
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
