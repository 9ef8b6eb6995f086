"""Which implementations of the ops a model runs with where nothing is named."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from harts.mixers import Attention, GatedDeltaRule, Mixer, ShortConv
from harts.models.attach import find_backbone
from harts.models.family import layer_types
from harts.models.sharded import compute_device, compute_dtype
from harts.ops.kernels import Kernels

__all__ = ["default_kernels", "has_kernel"]

_HALF = (torch.bfloat16, torch.float16)
_SINKS = ("gpt_oss", "granite_swa", "granitemoe_swa", "mimo_v2_flash")
_OP_OF_MIXER: dict[type[Mixer], str] = {
    Attention: "attention",
    GatedDeltaRule: "gated_delta_rule",
    ShortConv: "causal_conv1d",
}
"""Those that have kernels which are taken by default."""


def default_kernels(model: nn.Module, *, deterministic: bool = False) -> Kernels:
    """The fastest of this installation that take the model's device, dtype and head sizes, by a fixed rule.

    On a CUDA GPU `Kernels.fastest()`, but the gated delta rule is plain for any dtype but bf16 and any head size but
    128, attention is plain above 16 bits or with a head size that is no multiple of 8 or above 256, and log-probs are
    plain in fp64. Attention with sliding windows, sinks, soft-capped scores or latents (MLA) is plain too: `"varlen"`
    and `"fa4"` take the first two where they are named, but have not been measured with them on a GPU. The
    recurrences of Mamba2, Kimi delta attention and lightning attention have no kernel and are plain always. Dtype and
    device are those that FSDP2 computes with, if the model is sharded. The plain ones elsewhere. `harts train` and
    `harts bench` write down what ran.

    Args:
        model: of a supported family; its parameters lie on one device.
        deterministic: see `Kernels`.
    """
    if compute_device(model).type != "cuda":
        return Kernels(deterministic=deterministic)
    return _choose(Kernels.fastest(deterministic=deterministic), compute_dtype(model), find_backbone(model).config)


def _is_special(config: Any) -> bool:
    """Whether attention has windows, sinks, soft-capped scores, or values of another size than keys."""
    capped = getattr(config, "attn_logit_softcapping", None) is not None
    latent = getattr(config, "kv_lora_rank", None) is not None
    return capped or latent or "sliding_attention" in layer_types(config) or config.model_type in _SINKS


def _choose(fastest: Kernels, dtype: torch.dtype, config: Any) -> Kernels:
    plain = Kernels()
    changes: dict[str, Any] = {}
    linear = {getattr(config, f"linear_{name}_head_dim", 128) for name in ("key", "value")}
    if dtype != torch.bfloat16 or linear != {128}:
        changes["gated_delta_rule"] = plain.gated_delta_rule
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if dtype not in _HALF or size % 8 or size > 256 or _is_special(config):
        changes["attention"] = plain.attention
    if dtype == torch.float64:
        changes |= {"row_logprobs": plain.row_logprobs, "chunk_rows": plain.chunk_rows}
    return dataclasses.replace(fastest, **changes)


def has_kernel(mixer: type[Mixer], config: Any) -> bool:
    """Whether a mixer runs a kernel by default on a CUDA GPU in bf16, in a model without sliding windows and with heads
    of 128 channels.

    Args:
        mixer: of the model's family.
        config: the model's text config.
    """
    op = _OP_OF_MIXER.get(mixer)
    if op is None:
        return False
    heads = dict.fromkeys(("head_dim", "linear_key_head_dim", "linear_value_head_dim"), 128)
    config = SimpleNamespace(**{**config.to_dict(), **heads, "layer_types": ["full_attention"]})
    fastest = Kernels(gated_delta_rule="triton", causal_conv1d="triton", attention="varlen")
    return bool(getattr(_choose(fastest, torch.bfloat16, config), op) == getattr(fastest, op))
