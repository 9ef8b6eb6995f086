"""Mixers on one trajectory at a time, token by token from their definitions: what the laws compare with.

Slow and plain on purpose, and independent of the tree ops: no blocks, no chains, no gathers. Any device, any dtype.

Shape suffixes: L tokens of one trajectory, H query or key heads, G value (or key-value) heads, K, V, D head sizes.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad, silu

__all__ = ["linear_causal_attention", "linear_causal_conv1d", "linear_gated_delta_rule"]


def linear_gated_delta_rule(q_LHK: Tensor, k_LHK: Tensor, v_LGV: Tensor, g_LG: Tensor, beta_LG: Tensor) -> Tensor:
    """The recurrence of `harts.ops.gated_delta_rule` step by step, in the inputs' dtype.

    S <- exp(g) S; S <- S + beta k (v - S^T k)^T; o = S^T q.
    """
    repeats = v_LGV.shape[1] // q_LHK.shape[1]
    q_LGK = _unit(q_LHK).repeat_interleave(repeats, 1) * q_LHK.shape[-1] ** -0.5
    k_LGK = _unit(k_LHK).repeat_interleave(repeats, 1)
    state_GKV = v_LGV.new_zeros(v_LGV.shape[1], q_LHK.shape[-1], v_LGV.shape[-1])
    out = []
    for q, k, v, g, beta in zip(q_LGK, k_LGK, v_LGV, g_LG, beta_LG, strict=True):
        state_GKV = state_GKV * g.exp()[:, None, None]
        correction_GV = beta[:, None] * (v - torch.einsum("gkv,gk->gv", state_GKV, k))
        state_GKV = state_GKV + k[:, :, None] * correction_GV[:, None, :]
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


def linear_causal_attention(q_LHD: Tensor, k_LGD: Tensor, v_LGV: Tensor, *, scale: float) -> Tensor:
    """Causal softmax attention of one trajectory with all scores written out."""
    repeats = q_LHD.shape[1] // k_LGD.shape[1]
    k_LHD, v_LHV = k_LGD.repeat_interleave(repeats, 1), v_LGV.repeat_interleave(repeats, 1)
    scores_HLL = torch.einsum("qhd,khd->hqk", q_LHD, k_LHD) * scale
    hidden_LL = torch.ones(scores_HLL.shape[-2:], dtype=torch.bool, device=q_LHD.device).triu(1)
    return torch.einsum("hqk,khv->qhv", scores_HLL.masked_fill(hidden_LL, -torch.inf).softmax(-1), v_LHV)


def _unit(x: Tensor) -> Tensor:
    return x / ((x * x).sum(-1, keepdim=True) + 1e-6).sqrt()
