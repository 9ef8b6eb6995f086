"""Qwen3-Next's linear-attention mixer on a tree: two input projections, grouped by key head.

Shape suffixes: see `harts.models.gated_delta_net`.
"""

from typing import Any

import torch
from torch import Tensor
from transformers.models.qwen3_next.modeling_qwen3_next import (
    Qwen3NextAttention,
    Qwen3NextExperts,
    Qwen3NextGatedDeltaNet,
    Qwen3NextMLP,
    Qwen3NextRMSNorm,
    Qwen3NextRMSNormGated,
    Qwen3NextSparseMoeBlock,
)

from harts.models.fuse import FusedAttention, FusedGatedNorm, FusedMLP, FusedZeroCentredNorm
from harts.models.fused_moe import FusedExperts, FusedSharedExpertBlock
from harts.models.gated_delta_net import TreeMixer

__all__ = ["FUSED", "TreeGatedDeltaNet"]


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


class FusedQwen3NextRMSNorm(FusedZeroCentredNorm, Qwen3NextRMSNorm):  # type: ignore[misc]
    """Stands in for a `Qwen3NextRMSNorm`."""

    stands_for = Qwen3NextRMSNorm


class FusedQwen3NextRMSNormGated(FusedGatedNorm, Qwen3NextRMSNormGated):  # type: ignore[misc]
    """Stands in for a `Qwen3NextRMSNormGated`."""

    stands_for = Qwen3NextRMSNormGated


class FusedQwen3NextMLP(FusedMLP, Qwen3NextMLP):  # type: ignore[misc]
    """Stands in for a `Qwen3NextMLP`."""

    stands_for = Qwen3NextMLP


class FusedQwen3NextAttention(FusedAttention, Qwen3NextAttention):  # type: ignore[misc]
    """Stands in for a `Qwen3NextAttention`."""

    stands_for = Qwen3NextAttention


class FusedQwen3NextExperts(FusedExperts, Qwen3NextExperts):  # type: ignore[misc]
    """Stands in for a `Qwen3NextExperts`."""

    stands_for = Qwen3NextExperts


class FusedQwen3NextSparseMoeBlock(FusedSharedExpertBlock, Qwen3NextSparseMoeBlock):  # type: ignore[misc]
    """Stands in for a `Qwen3NextSparseMoeBlock`."""

    stands_for = Qwen3NextSparseMoeBlock


FUSED = (
    FusedQwen3NextRMSNorm,
    FusedQwen3NextRMSNormGated,
    FusedQwen3NextMLP,
    FusedQwen3NextAttention,
    FusedQwen3NextExperts,
    FusedQwen3NextSparseMoeBlock,
)
"""What `harts.models.fuse` swaps in."""
