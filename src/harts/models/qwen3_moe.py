"""What `harts.models.fuse` swaps into Qwen3-MoE; its attention goes through transformers' interface."""

from transformers.models.qwen3_moe.modeling_qwen3_moe import (
    Qwen3MoeExperts,
    Qwen3MoeMLP,
    Qwen3MoeRMSNorm,
)

from harts.models.fuse import FusedMLP, FusedNorm
from harts.models.fused_moe import FusedExperts

__all__ = ["FUSED"]


class FusedQwen3MoeRMSNorm(FusedNorm, Qwen3MoeRMSNorm):  # type: ignore[misc]
    """Stands in for a `Qwen3MoeRMSNorm`."""

    stands_for = Qwen3MoeRMSNorm


class FusedQwen3MoeMLP(FusedMLP, Qwen3MoeMLP):  # type: ignore[misc]
    """Stands in for a `Qwen3MoeMLP`."""

    stands_for = Qwen3MoeMLP


class FusedQwen3MoeExperts(FusedExperts, Qwen3MoeExperts):  # type: ignore[misc]
    """Stands in for a `Qwen3MoeExperts`."""

    stands_for = Qwen3MoeExperts


FUSED = (
    FusedQwen3MoeRMSNorm,
    FusedQwen3MoeMLP,
    FusedQwen3MoeExperts,
)
