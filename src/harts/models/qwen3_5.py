"""Qwen3.5's linear-attention mixer on a tree: four input projections.

Shape suffixes: see `harts.models.gated_delta_net`.
"""

from typing import Any

from torch import Tensor
from transformers.models.qwen3_5.modeling_qwen3_5 import (
    Qwen3_5Attention,
    Qwen3_5GatedDeltaNet,
    Qwen3_5MLP,
    Qwen3_5RMSNorm,
    Qwen3_5RMSNormGated,
)

from harts.models.fuse import FusedAttention, FusedGatedNorm, FusedMLP, FusedZeroCentredNorm
from harts.models.gated_delta_net import TreeMixer

__all__ = ["FUSED", "SeparateProjections", "TreeGatedDeltaNet"]


class SeparateProjections(TreeMixer):
    """Mixers with `in_proj_qkv`, `in_proj_z`, `in_proj_b` and `in_proj_a`."""

    def project(self, hidden_TD: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """See `TreeMixer.project`."""
        mixer: Any = self
        gate_XV = mixer.in_proj_z(hidden_TD).view(-1, mixer.head_v_dim)
        return mixer.in_proj_qkv(hidden_TD), gate_XV, mixer.in_proj_b(hidden_TD), mixer.in_proj_a(hidden_TD)


class TreeGatedDeltaNet(SeparateProjections, Qwen3_5GatedDeltaNet):  # type: ignore[misc]
    """Stands in for a `Qwen3_5GatedDeltaNet`."""


class FusedQwen3_5RMSNorm(FusedZeroCentredNorm, Qwen3_5RMSNorm):  # type: ignore[misc]
    """Stands in for a `Qwen3_5RMSNorm`."""

    stands_for = Qwen3_5RMSNorm


class FusedQwen3_5RMSNormGated(FusedGatedNorm, Qwen3_5RMSNormGated):  # type: ignore[misc]
    """Stands in for a `Qwen3_5RMSNormGated`."""

    stands_for = Qwen3_5RMSNormGated


class FusedQwen3_5MLP(FusedMLP, Qwen3_5MLP):  # type: ignore[misc]
    """Stands in for a `Qwen3_5MLP`."""

    stands_for = Qwen3_5MLP


class FusedQwen3_5Attention(FusedAttention, Qwen3_5Attention):  # type: ignore[misc]
    """Stands in for a `Qwen3_5Attention`."""

    stands_for = Qwen3_5Attention


FUSED = (FusedQwen3_5RMSNorm, FusedQwen3_5RMSNormGated, FusedQwen3_5MLP, FusedQwen3_5Attention)
"""What `harts.models.fuse` swaps in."""
