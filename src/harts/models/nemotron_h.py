"""Nemotron-H's Mamba2 mixer on a tree, and its layers of experts, which have no mixer."""

from typing import Any

from torch import Tensor
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHBlock, NemotronHMamba2Mixer

from harts.models.mamba2 import TreeMamba2
from harts.models.router_hooks import announce

__all__ = ["TreeBlock", "TreeMamba2Mixer"]


class TreeMamba2Mixer(TreeMamba2, NemotronHMamba2Mixer):  # type: ignore[misc]
    """Stands in for a `NemotronHMamba2Mixer`."""


class TreeBlock(NemotronHBlock):  # type: ignore[misc]
    """Stands in for a `NemotronHBlock`: mixers say which layer a router is of, a layer of experts says it itself."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """As the original."""
        if self.block_type == "moe":
            announce(self.layer_idx, kwargs.pop("routing", None))
        return super().forward(hidden_states, *args, **kwargs)  # type: ignore[no-any-return]
