"""The gated delta rule over the blocks of a tree, in plain PyTorch: linear attention with unit queries and keys.

Shape suffixes: T rows, X rows with those replayed from outside, G value heads, H key heads, K key size, V value size.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from harts.blocks import BLOCK
from harts.layout import PackedTree
from harts.ops.chains import levels
from harts.ops.linear_attention.context import LinearContext
from harts.ops.linear_attention.reference import run_blocks, unit

__all__ = ["gated_delta_rule_reference"]


def gated_delta_rule_reference(
    q_THK: Tensor,
    k_THK: Tensor,
    v_TGV: Tensor,
    g_TG: Tensor,
    beta_TG: Tensor,
    packed: PackedTree,
    context: LinearContext | None,
    wanted: tuple[int, ...],
) -> tuple[Tensor, Tensor]:
    """See `harts.ops.gated_delta_rule`; computes in the dtype of q, at least in fp32."""
    dtype = torch.promote_types(q_THK.dtype, torch.float32)
    states_OGVK = None
    q_XHK, k_XHK, v_XGV, g_XG = q_THK, k_THK, v_TGV, g_TG
    beta_XG: Tensor | None = beta_TG
    if context is not None:
        q_XHK = pad(q_THK, (0, 0, 0, 0, 0, len(context.k_RHK)))  # outputs of replayed rows go nowhere
        k_XHK, v_XGV, g_XG, beta_XG = context.append_to(k_THK, v_TGV, g_TG, beta_TG)
        states_OGVK = context.states_OGVK
    o_TGV, states_WGVK = run_blocks(
        unit(q_XHK.to(dtype)) * q_THK.shape[-1] ** -0.5,
        unit(k_XHK.to(dtype)),
        v_XGV,
        g_XG.unsqueeze(-1),
        beta_XG,
        states_OGVK,
        packed.layout(levels, BLOCK, wanted),
        delta=True,
    )
    return o_TGV.to(q_THK.dtype), states_WGVK
