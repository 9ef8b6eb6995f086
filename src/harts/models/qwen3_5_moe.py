"""The linear-attention mixer of Qwen3.5's mixture-of-experts models on a tree."""

from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeGatedDeltaNet

from harts.models.qwen3_5 import SeparateProjections

__all__ = ["TreeGatedDeltaNet"]


class TreeGatedDeltaNet(SeparateProjections, Qwen3_5MoeGatedDeltaNet):  # type: ignore[misc]
    """Stands in for a `Qwen3_5MoeGatedDeltaNet`."""
