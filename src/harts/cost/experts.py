"""The mixture-of-experts layers that a transformers config names, under the names of its many families."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["Experts", "Reader", "expert_sizes"]

_NUMBER = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k")
_SHARED = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
_SHARED_WIDTH = ("shared_intermediate_size", "moe_shared_expert_intermediate_size")
_WITHOUT_GATE = ("nemotron_h",)
_FIRST_DENSE = ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index")
_EVERY = ("decoder_sparse_step", "moe_layer_interval")
_NO_SHARED_GATE = ("laguna",)
"""Model types whose shared expert, though its width is named like that of gated ones, has no gate."""
_SHARED_MLP = ("hunyuan_v1_moe",)
"""Model types with an MLP of `intermediate_size` beside their experts, which no field of the config says."""


class Reader:
    """Reads the text part of a transformers config by attribute or key."""

    def __init__(self, config: Any) -> None:
        inner = self._read(config, "text_config")
        self.config = config if inner is None else inner

    @staticmethod
    def _read(config: Any, name: str) -> Any:
        return config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)

    def get(self, name: str, default: Any) -> Any:
        """A field, or `default` where it is missing or None."""
        value = self._read(self.config, name)
        return default if value is None else value

    def first(self, names: tuple[str, ...], default: Any) -> Any:
        """The first of several fields that is there."""
        return next((value for name in names if (value := self._read(self.config, name)) is not None), default)

    def need(self, name: str) -> int:
        """A field that must be an integer of at least 1.

        Raises:
            ValueError: it is not.
        """
        return _size(name, self.get(name, None), "pass the model's config")


@dataclass(frozen=True, kw_only=True)
class Experts:
    """The mixture-of-experts layers of a model.

    Attributes:
        number: experts of a layer, but those that all rows share.
        per_token: those that a row runs on.
        width: intermediate size of one.
        shared_width: of the MLP that all rows run on; 0 without one.
        shared_gate: whether that has a gate of one channel.
        layers: for each decoder layer, whether it has experts.
        gated: whether an expert has a gate: three products, else two.
        latent: channels that rows are projected to in front of the experts, and back behind them; None: they are not.
    """

    number: int
    per_token: int
    width: int
    shared_width: int
    shared_gate: bool
    layers: tuple[bool, ...]
    gated: bool = True
    latent: int | None = None


def expert_sizes(config: Any) -> Experts | None:
    """Reads them; None for a dense model.

    Raises:
        ValueError: a size is missing, is not the same for all layers, or does not fit the others.
    """
    reader = config if isinstance(config, Reader) else Reader(config)
    number = reader.first(_NUMBER, 0)
    if not number:
        return None
    number = _size("num_experts", number, _ONE_SIZE)
    per_token = _size("num_experts_per_tok", reader.first(_PER_TOKEN, None), _ONE_SIZE)
    if per_token > number:
        raise ValueError(
            f"config.num_experts_per_tok = {per_token}: expected a number from 1 to config.num_experts = {number}"
        )
    width = _size(
        "moe_intermediate_size", reader.first(("moe_intermediate_size", "intermediate_size"), None), _ONE_SIZE
    )
    gated: int = reader.get("shared_expert_intermediate_size", 0)
    gate = gated > 0 and reader.get("model_type", "") not in _NO_SHARED_GATE
    shared = gated or reader.first(_SHARED_WIDTH, 0) or reader.first(_SHARED, 0) * width
    if reader.get("model_type", "") in _SHARED_MLP:
        shared = reader.need("intermediate_size")
    kinds = reader.get("layers_block_type", ())
    number_of_layers = len(kinds) or reader.need("num_hidden_layers")
    return Experts(
        number=number,
        per_token=per_token,
        width=width,
        shared_width=shared,
        shared_gate=gate,
        layers=tuple(_is_sparse(reader, layer) for layer in range(number_of_layers)),
        gated=reader.get("model_type", "") not in _WITHOUT_GATE,
        latent=reader.get("moe_latent_size", None),
    )


_ONE_SIZE = "all layers with experts must have the same"


def _size(name: str, value: Any, hint: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"config, field {name}: expected an integer >= 1, got {value!r}; {hint}")
    return value


def _is_sparse(reader: Reader, layer: int) -> bool:
    if reader.get("model_type", "") == "nemotron_h":
        return bool(reader.get("layers_block_type", ())[layer] == "moe")
    kinds = reader.get("mlp_layer_types", None)
    if kinds is not None:
        return bool(kinds[layer] == "sparse")
    last = reader.get("moe_layer_end_index", -1)
    return (
        layer not in reader.get("mlp_only_layers", ())
        and layer >= reader.first(_FIRST_DENSE, 0)
        and (last < 0 or layer <= last)
        and (layer + 1) % reader.first(_EVERY, 1) == 0
    )
