"""The models that `harts bench` times: presets made large enough, published shapes, saved models."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from harts.cli.model import DtypeChoice, is_preset, load_model, to_dtype
from harts.testing.shapes import SHAPES, build_model

__all__ = ["MODEL", "Models"]

MODEL: Mapping[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
"""Sizes of a preset that is timed, and of its linear attention: a tiny model would time little but overhead."""

_LINEAR: Mapping[str, Any] = {
    "num_hidden_layers": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
}


@dataclass(frozen=True, eq=False)
class Models:
    """Makes the model that a batch is timed on; of a shape or directory there is one for all batches."""

    name: str
    layers: int | None
    dtype: DtypeChoice
    device: str
    made: dict[str, nn.Module] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.layers is not None and not self.are_random:
            raise ValueError(
                f"layers: expected none with a saved model, got {self.layers} for {self.name!r}; all of its layers run"
            )

    @property
    def are_random(self) -> bool:
        """Whether the weights are random, so that ids of the data can be numbered anew."""
        return is_preset(self.name) or self.name in SHAPES

    def get(self, vocabulary: int) -> nn.Module:
        """The model; `vocabulary` is that of a preset."""
        changes: dict[str, Any] = {} if self.layers is None else {"num_hidden_layers": self.layers}
        dtype = to_dtype(self.dtype)
        if is_preset(self.name):
            return _sized_preset(self.name, changes, max(64, vocabulary), dtype=dtype, device=self.device)
        if self.name not in self.made:
            if self.name in SHAPES:
                self.made[self.name] = build_model(changes, shape=self.name, dtype=dtype, device=self.device)  # type: ignore[arg-type]
            else:
                self.made[self.name] = load_model(self.name, dtype=dtype, device=self.device)
        return self.made[self.name]


def _sized_preset(name: str, changes: Mapping[str, Any], vocabulary: int, **place: Any) -> nn.Module:
    sizes: dict[str, Any] = {**MODEL, "vocab_size": vocabulary}
    if name.startswith("tiny-qwen3.5") or "next" in name:
        rotary = {"rope_type": "default", "rope_theta": 10_000_000.0, "partial_rotary_factor": 0.25}
        sizes |= {**_LINEAR, "rope_parameters": {**rotary, "mrope_section": [4, 2, 2]}}
    return load_model(name, **place, **{**sizes, **changes})
