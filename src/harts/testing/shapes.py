"""Models of the shapes that are timed on a GPU, with random weights."""

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import nn

from harts.models import attach
from harts.models.tiny import remember

__all__ = ["QWEN3_5_4B", "QWEN3_5_35B_A3B", "SHAPES", "Shape", "build_model"]

_ROTARY: Mapping[str, Any] = {
    "rope_type": "default",
    "rope_theta": 10_000_000.0,
    "partial_rotary_factor": 0.25,
    "mrope_section": [11, 11, 10],
}

QWEN3_5_4B: Mapping[str, Any] = {
    "vocab_size": 248_320,
    "hidden_size": 2560,
    "intermediate_size": 9216,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "max_position_embeddings": 262_144,
    "tie_word_embeddings": True,
    "rope_parameters": _ROTARY,
}
"""Fields of the model's text config."""

QWEN3_5_35B_A3B: Mapping[str, Any] = {
    "vocab_size": 248_320,
    "hidden_size": 2048,
    "num_hidden_layers": 40,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "max_position_embeddings": 262_144,
    "tie_word_embeddings": False,
    "experts_implementation": "grouped_mm",
    "rope_parameters": _ROTARY,
}
"""The same of the mixture of experts. A layer and its gradients take 3.2 GiB in bf16: choose how many fit."""

Shape = Literal["qwen3.5-4b", "qwen3.5-35b-a3b"]

SHAPES: Mapping[Shape, tuple[str, Mapping[str, Any]]] = {
    "qwen3.5-4b": ("Qwen3_5", QWEN3_5_4B),
    "qwen3.5-35b-a3b": ("Qwen3_5Moe", QWEN3_5_35B_A3B),
}
"""Stem of transformers' classes, and config."""


def build_model(
    changes: Mapping[str, Any] | None = None,
    *,
    shape: Shape = "qwen3.5-4b",
    device: torch.device | str = "cuda",
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
) -> nn.Module:
    """A model of a shape of Qwen3.5 with random weights that keep 90-99.9 % of a state per token, attached.

    Args:
        changes: config fields to set otherwise, `num_hidden_layers` say.
        shape: one of `SHAPES`.
        device: where the weights are drawn.
        dtype: of the weights.
        seed: of the weights.
    """
    import transformers

    stem, fields = SHAPES[shape]
    config = getattr(transformers, f"{stem}TextConfig")(**{**fields, **(changes or {})})
    before = torch.get_default_dtype()
    torch.manual_seed(seed)
    try:
        torch.set_default_dtype(dtype)
        with torch.device(device):
            model = getattr(transformers, f"{stem}ForCausalLM")(config)
    finally:
        torch.set_default_dtype(before)
    remember(model)
    model.config._attn_implementation = "sdpa"
    return attach(model).train()
