"""Qwen3-Next's linear-attention mixer on a tree: two input projections, grouped by key head.

Shape suffixes: see `harts.models.gated_delta_net`.
"""

from typing import Any

import torch
from torch import Tensor
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

from harts.models.gated_delta_net import TreeMixer

__all__ = ["TreeGatedDeltaNet"]


class TreeGatedDeltaNet(TreeMixer, Qwen3NextGatedDeltaNet):  # type: ignore[misc]
    """Stands in for a `Qwen3NextGatedDeltaNet`."""

    def project(self, hidden_TD: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """See `TreeMixer.project`; which column is what, the original knows."""
        mixer: Any = self
        hidden_1TD = hidden_TD.unsqueeze(0)
        qkvz, ba = mixer.in_proj_qkvz(hidden_1TD), mixer.in_proj_ba(hidden_1TD)
        q, k, v, gate, b_1TG, a_1TG = mixer.fix_query_key_value_ordering(qkvz, ba)
        qkv_TC = torch.cat([part.flatten(2) for part in (q, k, v)], dim=-1)[0]
        return qkv_TC, gate.reshape(-1, mixer.head_v_dim), b_1TG[0], a_1TG[0]
