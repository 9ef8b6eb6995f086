"""Linear attention over the blocks of a tree, in plain PyTorch.

Within a block everything is a product of matrices (UT transform, arXiv:2406.06484, section 3; for decays of channels,
arXiv:2510.26692, section 3); only the state at block boundaries is sequential, and it follows the tree: the blocks of
one level run together, each from the end of the block that it continues. Heads do not see each other: where many blocks
and heads would need much memory at once, they run in groups, one after the other, forward and backward.

Shape suffixes: T rows, X rows with those replayed from outside, E blocks, G value heads, H key heads, K key size, V
value size, D decays of a head (1 or K), C 64 rows of a block, S 16 of them, O states from outside, W wanted states.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.checkpoint import checkpoint

from harts.blocks import BLOCK
from harts.layout import PackedTree
from harts.ops.chains import Levels, levels
from harts.ops.linear_attention.context import LinearContext

__all__ = ["linear_attention_reference", "run_blocks", "unit"]

_PART = 16
_MOST = 2**26
"""Numbers of the largest tensor at most: products of pairs of rows, or of channels of pairs; there are several."""
_EPS = 1e-6  # of the normalisation of q and k, as in the published models


def linear_attention_reference(
    q_THK: Tensor,
    k_THK: Tensor,
    v_TGV: Tensor,
    g_TGD: Tensor,
    beta_TG: Tensor | None,
    packed: PackedTree,
    delta: bool,
    context: LinearContext | None,
    wanted: tuple[int, ...],
) -> tuple[Tensor, Tensor]:
    """See `harts.ops.linear_attention`; computes in the dtype of q, at least in fp32.

    Args:
        g_TGD: [T, G], [T, G, K], or [G].
    """
    states_OGVK = None
    q_XHK, k_XHK, v_XGV, g_XGD, beta_XG = q_THK, k_THK, v_TGV, g_TGD, beta_TG
    if context is not None:
        q_XHK = pad(q_THK, (0, 0, 0, 0, 0, len(context.k_RHK)))  # outputs of replayed rows go nowhere
        k_XHK, v_XGV, g_XGD, beta_XG = context.append_to(k_THK, v_TGV, g_TGD, beta_TG)
        states_OGVK = context.states_OGVK
    if g_XGD.ndim == 1:
        g_XGD = g_XGD.expand(len(k_XHK), -1)
    if g_XGD.ndim == 2:
        g_XGD = g_XGD.unsqueeze(-1)
    layout = packed.layout(levels, BLOCK, wanted)
    return run_blocks(q_XHK, k_XHK, v_XGV, g_XGD, beta_XG, states_OGVK, layout, delta=delta)


def run_blocks(
    q_XHK: Tensor,
    k_XHK: Tensor,
    v_XGV: Tensor,
    g_XGD: Tensor,
    beta_XG: Tensor | None,
    states_OGVK: Tensor | None,
    layout: Levels,
    *,
    delta: bool,
) -> tuple[Tensor, Tensor]:
    """Outputs of the own rows, [T, G, V] in the dtype of q, and the wanted states, [W, G, V, K].

    In groups of heads, all that a group computes is computed again in the backward.
    """
    groups, repeats = v_XGV.shape[1], v_XGV.shape[1] // q_XHK.shape[1]
    size = _heads_at_once(groups, repeats, layout, g_XGD.shape[-1])
    if size == groups:
        return _run_heads(q_XHK, k_XHK, v_XGV, g_XGD, beta_XG, states_OGVK, layout, delta)
    parts = []
    key_parts = [torch.split(x, max(size // repeats, 1), dim=1) for x in (q_XHK, k_XHK)]
    value_parts = [
        [None] * (groups // size) if x is None else torch.split(x, size, dim=1)
        for x in (v_XGV, g_XGD, beta_XG, states_OGVK)
    ]
    for index in range(groups // size):
        keys = index * size // repeats // max(size // repeats, 1)
        inputs: list[Any] = [*(part[keys] for part in key_parts), *(part[index] for part in value_parts), layout, delta]
        if torch.is_grad_enabled():
            parts.append(checkpoint(_run_heads, *inputs, use_reentrant=False, preserve_rng_state=False))
        else:
            parts.append(_run_heads(*inputs))
    outputs, states = zip(*parts, strict=True)
    return torch.cat(outputs, dim=1), torch.cat(states, dim=1)


def _heads_at_once(groups: int, repeats: int, layout: Levels, decays: int) -> int:
    """Value heads that run together: as many as `_MOST` allows, and groups of them share whole key heads or one."""
    blocks, rows = layout.row_EK.shape
    most = max(_MOST // (blocks * rows * (rows if decays == 1 else _PART * decays)), 1)
    fitting = [size for size in range(1, min(most, groups) + 1) if groups % size == 0]
    return max(size for size in fitting if size % repeats == 0 or repeats % size == 0)


def _run_heads(
    q_XHK: Tensor,
    k_XHK: Tensor,
    v_XGV: Tensor,
    g_XGD: Tensor,
    beta_XG: Tensor | None,
    states_OGVK: Tensor | None,
    layout: Levels,
    delta: bool,
) -> tuple[Tensor, Tensor]:
    """The same, all heads at once."""
    dtype = torch.promote_types(q_XHK.dtype, torch.float32)
    repeats = v_XGV.shape[1] // q_XHK.shape[1]
    q_EGCK, k_EGCK = (_to_blocks(x.to(dtype), layout).repeat_interleave(repeats, 1) for x in (q_XHK, k_XHK))
    v_EGCV = _to_blocks(v_XGV.to(dtype), layout)
    written_k_EGCK = k_EGCK
    if beta_XG is not None:
        beta_EGC1 = _to_blocks(beta_XG.to(dtype).unsqueeze(-1), layout)
        written_k_EGCK, v_EGCV = k_EGCK * beta_EGC1, v_EGCV * beta_EGC1
    # Logarithm of the decay from the start of the block to behind each row.
    gamma_EGCD = _to_blocks(g_XGD.to(dtype), layout).cumsum(2)
    decayed = _decayed_products(gamma_EGCD)
    decay_EGCD = gamma_EGCD.exp()

    # With delta, each row writes beta_i (v_i - what the state already holds at k_i); within a block these corrections
    # depend on one another through a unit triangular system. u: corrections from a zero state; w: what a state changes
    # in them.
    u_EGCV, w_EGCK = v_EGCV, None
    if delta:
        right = torch.cat([v_EGCV, written_k_EGCK * decay_EGCD], dim=-1)
        system_EGCC = decayed(written_k_EGCK, k_EGCK)
        solved = torch.linalg.solve_triangular(system_EGCC, right, upper=False, unitriangular=True)
        u_EGCV, w_EGCK = torch.split(solved, [v_EGCV.shape[-1], k_EGCK.shape[-1]], dim=-1)

    # Keys as the state at the end of the block sees them.
    end_decay_EGD1 = gamma_EGCD[..., -1, :, None].exp()
    k_end_EGCK = k_EGCK * (gamma_EGCD[..., -1:, :] - gamma_EGCD).exp()
    states_EGKV, ends_EGKV, v_new_EGCV = _recur(u_EGCV, w_EGCK, k_end_EGCK, end_decay_EGD1, layout, states_OGVK)

    o_EGCV = (q_EGCK * decay_EGCD) @ states_EGKV + decayed(q_EGCK, k_EGCK) @ v_new_EGCV
    o_slots: Tensor = o_EGCV.transpose(1, 2).flatten(0, 1)
    o_TGV = o_slots.index_select(0, layout.slot_T).to(q_XHK.dtype)
    return o_TGV, ends_EGKV.index_select(0, layout.wanted_W).mT


def _decayed_products(gamma_EGCD: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """(a, b) -> a_i . b_j with the decay from behind row j to row i <= j of a block, [E, G, C, C]; 0 for j > i."""
    if gamma_EGCD.shape[-1] == 1:
        hidden_CC = _hidden(gamma_EGCD.shape[2], gamma_EGCD)
        decay_EGCC = (gamma_EGCD - gamma_EGCD.mT).masked_fill(hidden_CC, -torch.inf).exp()
        return lambda a_EGCK, b_EGCK: (a_EGCK @ b_EGCK.mT) * decay_EGCC
    return lambda a_EGCK, b_EGCK: _products_by_channel(a_EGCK, b_EGCK, gamma_EGCD)


def _products_by_channel(a_EGCK: Tensor, b_EGCK: Tensor, gamma_EGCK: Tensor) -> Tensor:
    """`_decayed_products` where each key channel has its decay.

    exp(gamma_i - gamma_j) is split in two factors, neither above 1, at the start of the part of 16 rows that i lies in;
    within a part, where that cannot be done, the decay of every pair is written out.
    """
    size = gamma_EGCK.shape[2]
    rows = []
    for start in range(0, size, _PART):
        stop = min(start + _PART, size)
        a_EGSK, b_EGSK, gamma_EGSK = (x[:, :, start:stop] for x in (a_EGCK, b_EGCK, gamma_EGCK))
        hidden_SS1 = _hidden(stop - start, gamma_EGCK).unsqueeze(-1)
        pairs_EGSSK = (gamma_EGSK.unsqueeze(3) - gamma_EGSK.unsqueeze(2)).masked_fill(hidden_SS1, -torch.inf).exp()
        parts = [(a_EGSK.unsqueeze(3) * b_EGSK.unsqueeze(2) * pairs_EGSSK).sum(-1)]
        if start:
            edge_EG1K = gamma_EGCK[:, :, start - 1 : start]
            left = a_EGSK * (gamma_EGSK - edge_EG1K).exp()
            right = b_EGCK[:, :, :start] * (edge_EG1K - gamma_EGCK[:, :, :start]).exp()
            parts.insert(0, left @ right.mT)
        rows.append(pad(torch.cat(parts, dim=-1), (0, size - stop)))
    return torch.cat(rows, dim=2)


def _hidden(size: int, like: Tensor) -> Tensor:
    """bool: pairs (i, j) of rows of a block with j > i."""
    return torch.ones(size, size, dtype=torch.bool, device=like.device).triu(1)


def _recur(
    u_EGCV: Tensor,
    w_EGCK: Tensor | None,
    k_end_EGCK: Tensor,
    end_decay_EGD1: Tensor,
    layout: Levels,
    states_OGVK: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """State at the start and at the end of every block, and the values that each row writes, level by level."""
    starts: list[Tensor] = []
    ends: list[Tensor] = []
    written: list[Tensor] = []
    # What level 0 starts from: nothing, or a state from outside.
    end_NGKV = u_EGCV.new_zeros(1, u_EGCV.shape[1], k_end_EGCK.shape[-1], u_EGCV.shape[-1])
    if states_OGVK is not None:
        end_NGKV = torch.cat([end_NGKV, states_OGVK.to(u_EGCV.dtype).mT])
    first = 0
    for blocks in layout.level_sizes:
        level = slice(first, first + blocks)
        start_NGKV = end_NGKV.index_select(0, layout.parent_E[level])
        v_new_NGCV = u_EGCV[level] if w_EGCK is None else u_EGCV[level] - w_EGCK[level] @ start_NGKV
        end_NGKV = start_NGKV * end_decay_EGD1[level] + k_end_EGCK[level].mT @ v_new_NGCV
        starts.append(start_NGKV)
        ends.append(end_NGKV)
        written.append(v_new_NGCV)
        first += blocks
    return torch.cat(starts), torch.cat(ends), torch.cat(written)


def _to_blocks(x_XHK: Tensor, layout: Levels) -> Tensor:
    """[X, H, K] -> [E, H, 64, K]; rows behind the end of a partial block are zero: they write and decay nothing."""
    padded = pad(x_XHK, (0, 0, 0, 0, 0, 1)).index_select(0, layout.row_EK.flatten())
    return padded.view(*layout.row_EK.shape, *x_XHK.shape[1:]).transpose(1, 2)


def unit(x: Tensor) -> Tensor:
    """The last dimension with length 1, as published models with the delta rule have their queries and keys."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + _EPS)
