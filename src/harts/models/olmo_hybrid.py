"""OLMo hybrid's linear-attention mixer on a tree: a projection for each input, writing strengths up to 2.

Shape suffixes: see `harts.models.gated_delta_net`.
"""

from typing import Any

import torch
from torch import Tensor
from transformers.models.olmo_hybrid.modeling_olmo_hybrid import OlmoHybridGatedDeltaNet

from harts.models.gated_delta_net import TreeMixer

__all__ = ["TreeGatedDeltaNet"]


class TreeGatedDeltaNet(TreeMixer, OlmoHybridGatedDeltaNet):  # type: ignore[misc]
    """Stands in for a `OlmoHybridGatedDeltaNet`."""

    def project(self, hidden_TD: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """See `TreeMixer.project`."""
        mixer: Any = self
        qkv_TC = torch.cat([project(hidden_TD) for project in (mixer.q_proj, mixer.k_proj, mixer.v_proj)], dim=-1)
        gate_XV = mixer.g_proj(hidden_TD).reshape(-1, mixer.head_v_dim)
        return qkv_TC, gate_XV, mixer.b_proj(hidden_TD), mixer.a_proj(hidden_TD)

    def strength(self, b_TG: Tensor) -> Tensor:
        """See `TreeMixer.strength`; above 1, a state's component along a key changes its sign."""
        mixer: Any = self
        return super().strength(b_TG) * (2.0 if mixer.allow_neg_eigval else 1.0)

    def finish(self, out_XV: Tensor, gate_XV: Tensor, *shape: int) -> Tensor:
        """See `TreeMixer.finish`."""
        mixer: Any = self
        return mixer.o_proj(mixer.o_norm(out_XV, gate_XV).view(*shape, -1))  # type: ignore[no-any-return]
