"""The linear-attention mixer of Qwen3.5's mixture-of-experts models on a tree."""

from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import (
    Qwen3_5MoeAttention,
    Qwen3_5MoeExperts,
    Qwen3_5MoeGatedDeltaNet,
    Qwen3_5MoeMLP,
    Qwen3_5MoeRMSNorm,
    Qwen3_5MoeRMSNormGated,
    Qwen3_5MoeSparseMoeBlock,
)

from harts.models.fuse import FusedAttention, FusedGatedNorm, FusedMLP, FusedZeroCentredNorm
from harts.models.fused_moe import FusedExperts, FusedSharedExpertBlock
from harts.models.qwen3_5 import SeparateProjections

__all__ = ["FUSED", "TreeGatedDeltaNet"]


class TreeGatedDeltaNet(SeparateProjections, Qwen3_5MoeGatedDeltaNet):  # type: ignore[misc]
    """Stands in for a `Qwen3_5MoeGatedDeltaNet`."""


class FusedQwen3_5MoeRMSNorm(FusedZeroCentredNorm, Qwen3_5MoeRMSNorm):  # type: ignore[misc]
    """Stands in for a `Qwen3_5MoeRMSNorm`."""

    stands_for = Qwen3_5MoeRMSNorm


class FusedQwen3_5MoeRMSNormGated(FusedGatedNorm, Qwen3_5MoeRMSNormGated):  # type: ignore[misc]
    """Stands in for a `Qwen3_5MoeRMSNormGated`."""

    stands_for = Qwen3_5MoeRMSNormGated


class FusedQwen3_5MoeMLP(FusedMLP, Qwen3_5MoeMLP):  # type: ignore[misc]
    """Stands in for a `Qwen3_5MoeMLP`."""

    stands_for = Qwen3_5MoeMLP


class FusedQwen3_5MoeAttention(FusedAttention, Qwen3_5MoeAttention):  # type: ignore[misc]
    """Stands in for a `Qwen3_5MoeAttention`."""

    stands_for = Qwen3_5MoeAttention


class FusedQwen3_5MoeExperts(FusedExperts, Qwen3_5MoeExperts):  # type: ignore[misc]
    """Stands in for a `Qwen3_5MoeExperts`."""

    stands_for = Qwen3_5MoeExperts


class FusedQwen3_5MoeSparseMoeBlock(FusedSharedExpertBlock, Qwen3_5MoeSparseMoeBlock):  # type: ignore[misc]
    """Stands in for a `Qwen3_5MoeSparseMoeBlock`."""

    stands_for = Qwen3_5MoeSparseMoeBlock


FUSED = (
    FusedQwen3_5MoeRMSNorm,
    FusedQwen3_5MoeRMSNormGated,
    FusedQwen3_5MoeMLP,
    FusedQwen3_5MoeAttention,
    FusedQwen3_5MoeExperts,
    FusedQwen3_5MoeSparseMoeBlock,
)
"""What `harts.models.fuse` swaps in."""
