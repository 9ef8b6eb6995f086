"""Mixers on one trajectory at a time, token by token from their definitions: what the laws compare with.

Slow and plain on purpose, and independent of the tree ops: no blocks, no chains, no gathers. Any device, any dtype.

Shape suffixes: L tokens of one trajectory, H query or key heads, G value (or key-value) heads, K, V, D head sizes.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad, silu

__all__ = [
    "linear_causal_attention",
    "linear_causal_conv1d",
    "linear_gated_delta_rule",
    "linear_kimi_delta_attention",
    "linear_linear_attention",
]


def linear_gated_delta_rule(q_LHK: Tensor, k_LHK: Tensor, v_LGV: Tensor, g_LG: Tensor, beta_LG: Tensor) -> Tensor:
    """The recurrence of `harts.ops.gated_delta_rule` step by step, in the inputs' dtype."""
    return linear_linear_attention(
        _unit(q_LHK) * q_LHK.shape[-1] ** -0.5, _unit(k_LHK), v_LGV, g_LG, beta_LG, delta=True
    )


def linear_kimi_delta_attention(q_LHK: Tensor, k_LHK: Tensor, v_LGV: Tensor, g_LGK: Tensor, beta_LG: Tensor) -> Tensor:
    """The same with a decay of each key channel."""
    return linear_gated_delta_rule(q_LHK, k_LHK, v_LGV, g_LGK, beta_LG)


def linear_linear_attention(
    q_LHK: Tensor, k_LHK: Tensor, v_LGV: Tensor, g_LG: Tensor, beta_LG: Tensor | None, *, delta: bool
) -> Tensor:
    """The recurrence of `harts.ops.linear_attention` step by step, in the inputs' dtype.

    S <- exp(g) S, by key channel where g has one for each; S <- S + beta k (v - S^T k)^T, or beta k v^T; o = S^T q.
    """
    length, groups, size = v_LGV.shape
    repeats = groups // q_LHK.shape[1]
    q_LGK, k_LGK = (x.repeat_interleave(repeats, 1) for x in (q_LHK, k_LHK))
    g_LGD = g_LG.expand(length, groups).unsqueeze(-1) if g_LG.ndim < 3 else g_LG
    beta_LG1 = v_LGV.new_ones(length, groups, 1) if beta_LG is None else beta_LG.unsqueeze(-1)
    state_GKV = v_LGV.new_zeros(groups, q_LHK.shape[-1], size)
    out = []
    for q, k, v, g, beta in zip(q_LGK, k_LGK, v_LGV, g_LGD, beta_LG1, strict=True):
        state_GKV = state_GKV * g.exp()[:, :, None]
        written_GV = beta * (v - torch.einsum("gkv,gk->gv", state_GKV, k) if delta else v)
        state_GKV = state_GKV + k[:, :, None] * written_GV[:, None, :]
        out.append(torch.einsum("gkv,gk->gv", state_GKV, q))
    return torch.stack(out)


def linear_causal_conv1d(
    x_LD: Tensor, weight_DW: Tensor, bias_D: Tensor | None, *, activation: str | None = "silu"
) -> Tensor:
    """Depthwise causal convolution of one trajectory by torch's conv1d."""
    taps = weight_DW.shape[1]
    y_DL = torch.nn.functional.conv1d(
        pad(x_LD.mT, (taps - 1, 0)).unsqueeze(0), weight_DW.unsqueeze(1), bias_D, groups=len(weight_DW)
    ).squeeze(0)
    return y_DL.mT if activation is None else silu(y_DL.mT)


def linear_causal_attention(
    q_LHD: Tensor,
    k_LGD: Tensor,
    v_LGV: Tensor,
    sinks_H: Tensor | None = None,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Causal softmax attention of one trajectory with all scores written out."""
    repeats = q_LHD.shape[1] // k_LGD.shape[1]
    k_LHD, v_LHV = k_LGD.repeat_interleave(repeats, 1), v_LGV.repeat_interleave(repeats, 1)
    scores_HLL = torch.einsum("qhd,khd->hqk", q_LHD, k_LHD) * scale
    if softcap is not None:
        scores_HLL = (scores_HLL / softcap).tanh() * softcap
    place_L = torch.arange(len(q_LHD), device=q_LHD.device)
    back_LL = place_L[:, None] - place_L
    visible_LL = (back_LL >= 0) & (back_LL < (len(q_LHD) if window is None else window))
    largest_HL1 = scores_HLL.masked_fill(~visible_LL, -torch.inf).amax(-1, keepdim=True).detach()
    weights_HLL = (scores_HLL - largest_HL1).exp() * visible_LL
    total_HL1 = weights_HLL.sum(-1, keepdim=True)
    if sinks_H is not None:
        total_HL1 = total_HL1 + (sinks_H[:, None, None] - largest_HL1).exp()
    return torch.einsum("hqk,khv->qhv", weights_HLL / total_HL1, v_LHV)


def _unit(x: Tensor) -> Tensor:
    return x / ((x * x).sum(-1, keepdim=True) + 1e-6).sqrt()
