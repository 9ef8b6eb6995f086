"""The transformers model families that HARTS can run on a tree."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["FAMILIES", "Family"]


@dataclass(frozen=True, kw_only=True)
class Family:
    """What `attach` has to know of one `model_type`.

    Attributes:
        attention: "module:Class" of the full-attention mixer; it goes through transformers' attention interface.
        linear_mixer: "module:Class" of the linear-attention mixer and of ours that takes its place; None without one.
        mask: what to hand the backbone as `attention_mask` so that it builds none of its own.
        router: "module:Class" of the router of a mixture-of-experts layer, which gives (logits [T, experts], weights
            and indices [T, experts per token]); None without one.
        fused: "module:NAME" of the classes, a tuple, that `harts.models.fuse` swaps in; None where nothing is fused.
    """

    attention: str
    linear_mixer: tuple[str, str] | None
    mask: Callable[[torch.device], Any]
    router: str | None = None
    fused: str | None = None

    def attention_class(self) -> type[nn.Module]:
        """The class named by `attention`."""
        return _load(self.attention)  # type: ignore[no-any-return]

    def linear_classes(self) -> tuple[type[nn.Module], type[nn.Module]] | None:
        """The classes named by `linear_mixer`: theirs and ours."""
        return None if self.linear_mixer is None else (_load(self.linear_mixer[0]), _load(self.linear_mixer[1]))

    def router_class(self) -> type[nn.Module] | None:
        """The class named by `router`."""
        return None if self.router is None else _load(self.router)

    def fused_classes(self) -> dict[type[nn.Module], type[nn.Module]]:
        """The classes named by `fused`, by those that they stand for."""
        return {} if self.fused is None else {twin.stands_for: twin for twin in _load(self.fused)}


def _load(path: str) -> Any:
    module, name = path.split(":")
    return getattr(importlib.import_module(module), name)


def _no_mask_per_layer_type(_: torch.device) -> dict[str, None]:
    return {"full_attention": None, "linear_attention": None}


def _ready_made_mask(device: torch.device) -> Tensor:
    """A four-dimensional mask is taken as it is; ours is ignored by the attention function."""
    return torch.zeros(1, 1, 1, 1, device=device)


_MODELS = "transformers.models"

FAMILIES: dict[str, Family] = {
    "qwen3_5_text": Family(
        attention=f"{_MODELS}.qwen3_5.modeling_qwen3_5:Qwen3_5Attention",
        linear_mixer=(
            f"{_MODELS}.qwen3_5.modeling_qwen3_5:Qwen3_5GatedDeltaNet",
            "harts.models.qwen3_5:TreeGatedDeltaNet",
        ),
        fused="harts.models.qwen3_5:FUSED",
        mask=_no_mask_per_layer_type,
    ),
    "qwen3": Family(
        attention=f"{_MODELS}.qwen3.modeling_qwen3:Qwen3Attention", linear_mixer=None, mask=_no_mask_per_layer_type
    ),
    "llama": Family(
        attention=f"{_MODELS}.llama.modeling_llama:LlamaAttention", linear_mixer=None, mask=_ready_made_mask
    ),
    "qwen3_5_moe_text": Family(
        attention=f"{_MODELS}.qwen3_5_moe.modeling_qwen3_5_moe:Qwen3_5MoeAttention",
        linear_mixer=(
            f"{_MODELS}.qwen3_5_moe.modeling_qwen3_5_moe:Qwen3_5MoeGatedDeltaNet",
            "harts.models.qwen3_5_moe:TreeGatedDeltaNet",
        ),
        router=f"{_MODELS}.qwen3_5_moe.modeling_qwen3_5_moe:Qwen3_5MoeTopKRouter",
        fused="harts.models.qwen3_5_moe:FUSED",
        mask=_no_mask_per_layer_type,
    ),
    "qwen3_next": Family(
        attention=f"{_MODELS}.qwen3_next.modeling_qwen3_next:Qwen3NextAttention",
        linear_mixer=(
            f"{_MODELS}.qwen3_next.modeling_qwen3_next:Qwen3NextGatedDeltaNet",
            "harts.models.qwen3_next:TreeGatedDeltaNet",
        ),
        router=f"{_MODELS}.qwen3_next.modeling_qwen3_next:Qwen3NextTopKRouter",
        fused="harts.models.qwen3_next:FUSED",
        mask=_no_mask_per_layer_type,
    ),
    "qwen3_moe": Family(
        attention=f"{_MODELS}.qwen3_moe.modeling_qwen3_moe:Qwen3MoeAttention",
        linear_mixer=None,
        router=f"{_MODELS}.qwen3_moe.modeling_qwen3_moe:Qwen3MoeTopKRouter",
        fused="harts.models.qwen3_moe:FUSED",
        mask=_ready_made_mask,
    ),
}
"""By `model_type` of the text config."""
