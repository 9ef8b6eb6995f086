"""The Mamba2 mixer of Granite 4's hybrids on a tree."""

from transformers.models.granitemoehybrid.modeling_granitemoehybrid import GraniteMoeHybridMambaLayer

from harts.models.mamba2 import TreeMamba2

__all__ = ["TreeMamba2Mixer"]


class TreeMamba2Mixer(TreeMamba2, GraniteMoeHybridMambaLayer):  # type: ignore[misc]
    """Stands in for a `GraniteMoeHybridMambaLayer`."""
