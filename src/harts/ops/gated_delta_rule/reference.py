"""The chunkwise gated delta rule over the blocks of a tree, in plain PyTorch.

Within a block everything is a product of matrices (UT transform, arXiv:2406.06484, section 3); only the state at block
boundaries is sequential, and it follows the tree: the blocks of one level run together, each from the end of the
block that it continues.

Shape suffixes: T rows, X rows with those replayed from outside, E blocks, G value heads, H key heads, K key size, V
value size, C 64 rows of a block, O states from outside, W wanted states.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from harts.blocks import BLOCK
from harts.layout import PackedTree
from harts.ops.chains import Levels, levels
from harts.ops.gated_delta_rule.context import DeltaContext

__all__ = ["gated_delta_rule_reference"]

_EPS = 1e-6  # of the normalisation of q and k, as in the published models


def gated_delta_rule_reference(
    q_THK: Tensor,
    k_THK: Tensor,
    v_TGV: Tensor,
    g_TG: Tensor,
    beta_TG: Tensor,
    packed: PackedTree,
    context: DeltaContext | None,
    wanted: tuple[int, ...],
) -> tuple[Tensor, Tensor]:
    """See `harts.ops.gated_delta_rule`; computes in the dtype of q, at least in fp32."""
    layout = packed.layout(levels, BLOCK, wanted)
    dtype = torch.promote_types(q_THK.dtype, torch.float32)
    repeats = v_TGV.shape[1] // q_THK.shape[1]
    states_OGVK = None
    q_XHK, k_XHK, v_XGV, g_XG, beta_XG = q_THK, k_THK, v_TGV, g_TG, beta_TG
    if context is not None:
        q_XHK = pad(q_THK, (0, 0, 0, 0, 0, len(context.k_RHK)))  # outputs of replayed rows go nowhere
        k_XHK, v_XGV, g_XG, beta_XG = context.append_to(k_THK, v_TGV, g_TG, beta_TG)
        states_OGVK = context.states_OGVK.to(dtype)
    q_EGCK = _to_blocks(_unit(q_XHK.to(dtype)), layout).repeat_interleave(repeats, 1) * q_THK.shape[-1] ** -0.5
    k_EGCK = _to_blocks(_unit(k_XHK.to(dtype)), layout).repeat_interleave(repeats, 1)
    v_EGCV = _to_blocks(v_XGV.to(dtype), layout)
    beta_EGC1 = _to_blocks(beta_XG.to(dtype).unsqueeze(-1), layout)
    g_EGC = _to_blocks(g_XG.to(dtype).unsqueeze(-1), layout).squeeze(-1)

    # Decay from behind row j to row i of a block, and from the start of the block to behind row i.
    gamma_EGC = g_EGC.cumsum(-1)
    causal_CC = torch.ones(q_EGCK.shape[2], q_EGCK.shape[2], dtype=torch.bool, device=q_EGCK.device).tril()
    decay_EGCC = (gamma_EGC.unsqueeze(-1) - gamma_EGC.unsqueeze(-2)).masked_fill(~causal_CC, -torch.inf).exp()
    decay_EGC1 = gamma_EGC.exp().unsqueeze(-1)

    # Each row writes beta_i (v_i - what the state already holds at k_i); within a block these corrections depend on
    # one another through a unit triangular system. u: corrections from a zero state; w: what a state changes in them.
    kb_EGCK = k_EGCK * beta_EGC1
    system_EGCC = (kb_EGCK @ k_EGCK.mT) * decay_EGCC
    right = torch.cat([v_EGCV * beta_EGC1, kb_EGCK * decay_EGC1], dim=-1)
    solved = torch.linalg.solve_triangular(system_EGCC, right, upper=False, unitriangular=True)
    u_EGCV, w_EGCK = torch.split(solved, [v_EGCV.shape[-1], k_EGCK.shape[-1]], dim=-1)

    # Keys as the state at the end of the block sees them.
    end_decay_EG11 = gamma_EGC[..., -1, None, None].exp()
    k_end_EGCK = k_EGCK * (gamma_EGC[..., -1:] - gamma_EGC).exp().unsqueeze(-1)
    states_EGKV, ends_EGKV, v_new_EGCV = _recur(u_EGCV, w_EGCK, k_end_EGCK, end_decay_EG11, layout, states_OGVK)

    o_EGCV = (q_EGCK * decay_EGC1) @ states_EGKV + ((q_EGCK @ k_EGCK.mT) * decay_EGCC) @ v_new_EGCV
    o_slots: Tensor = o_EGCV.transpose(1, 2).flatten(0, 1)
    o_TGV = o_slots.index_select(0, layout.slot_T).to(q_THK.dtype)
    return o_TGV, ends_EGKV.index_select(0, layout.wanted_W).mT


def _recur(
    u_EGCV: Tensor,
    w_EGCK: Tensor,
    k_end_EGCK: Tensor,
    end_decay_EG11: Tensor,
    layout: Levels,
    states_OGVK: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """State at the start and at the end of every block, and the values that each row writes, level by level."""
    starts: list[Tensor] = []
    ends: list[Tensor] = []
    written: list[Tensor] = []
    # What level 0 starts from: nothing, or a state from outside.
    end_NGKV = u_EGCV.new_zeros(1, u_EGCV.shape[1], w_EGCK.shape[-1], u_EGCV.shape[-1])
    if states_OGVK is not None:
        end_NGKV = torch.cat([end_NGKV, states_OGVK.mT])
    by_level = (
        torch.split(x, list(layout.level_sizes)) for x in (u_EGCV, w_EGCK, k_end_EGCK, end_decay_EG11, layout.parent_E)
    )
    for u, w, k_end, end_decay, parent_N in zip(*by_level, strict=True):
        start_NGKV = end_NGKV.index_select(0, parent_N)
        v_new_NGCV = u - w @ start_NGKV
        end_NGKV = start_NGKV * end_decay + k_end.mT @ v_new_NGCV
        starts.append(start_NGKV)
        ends.append(end_NGKV)
        written.append(v_new_NGCV)
    return torch.cat(starts), torch.cat(ends), torch.cat(written)


def _to_blocks(x_XHK: Tensor, layout: Levels) -> Tensor:
    """[X, H, K] -> [E, H, 64, K]; rows behind the end of a partial block are zero: they write and decay nothing."""
    padded = pad(x_XHK, (0, 0, 0, 0, 0, 1)).index_select(0, layout.row_EK.flatten())
    return padded.view(*layout.row_EK.shape, *x_XHK.shape[1:]).transpose(1, 2)


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + _EPS)
