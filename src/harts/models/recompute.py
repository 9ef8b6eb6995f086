"""Activation recomputation: memory of one layer instead of all, for one more forward."""

from typing import Any

from torch import nn

from harts.models.attach import find_backbone

__all__ = ["keep_activations", "recompute_activations"]


def recompute_activations(model: nn.Module) -> nn.Module:
    """Puts a model into training mode and lets every decoder layer recompute its activations in the backward.

    The same as transformers' own switch, which was renamed in 5.2x. Returns the same model.
    """
    text: Any = find_backbone(model).text
    enable = getattr(text, "activation_checkpointing_enable", None) or text.gradient_checkpointing_enable
    enable({"use_reentrant": False})
    return model.train()


def keep_activations(model: nn.Module) -> nn.Module:
    """Undoes `recompute_activations`, but for the training mode. Returns the same model."""
    text: Any = find_backbone(model).text
    (getattr(text, "activation_checkpointing_disable", None) or text.gradient_checkpointing_disable)()
    return model
