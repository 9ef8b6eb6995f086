"""Activation recomputation: memory of one layer instead of all, for one more forward."""

from typing import Any

from torch import nn

from harts.models.attach import find_backbone
from harts.ops.attention.kept import keep_outputs
from harts.ops.kernels import Kernels

__all__ = ["check_kept", "keep_activations", "recompute_activations"]


def recompute_activations(model: nn.Module, *, keep_attention: bool = False) -> nn.Module:
    """Puts a model into training mode and lets every decoder layer recompute its activations in the backward.

    The same as transformers' own switch, which was renamed in 5.2x. Returns the same model.

    Args:
        model: of a supported family.
        keep_attention: keep the outputs of full attention instead of computing them twice: query heads x head size
            values in the model's dtype a row and full-attention layer, and an fp32 number a head. The bits are the
            same. Attention with impl="reference" is computed again nevertheless.
    """
    text: Any = find_backbone(model).text
    enable = getattr(text, "activation_checkpointing_enable", None) or text.gradient_checkpointing_enable
    enable({"use_reentrant": False, **({"context_fn": keep_outputs} if keep_attention else {})})
    return model.train()


def check_kept(kernels: Kernels, *, recompute: bool, keep_attention: bool) -> None:
    """Refuses `keep_attention` where it would do nothing.

    Raises:
        ValueError: nothing is recomputed, or attention runs as the reference, which hands over neither outputs nor
            log-sum-exps.
    """
    if keep_attention and not recompute:
        raise ValueError("keep_attention: expected recomputation, got none; everything is kept without it")
    if keep_attention and kernels.attention == "reference":
        raise ValueError(
            "keep_attention: expected attention by a flash kernel ('fa4' or 'varlen', in bf16 or fp16 on a CUDA GPU), "
            "got 'reference'; leave keep_attention out"
        )


def keep_activations(model: nn.Module) -> nn.Module:
    """Undoes `recompute_activations`, but for the training mode. Returns the same model."""
    text: Any = find_backbone(model).text
    (getattr(text, "activation_checkpointing_disable", None) or text.gradient_checkpointing_disable)()
    return model
