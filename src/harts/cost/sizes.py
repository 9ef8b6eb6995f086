"""Sizes of a model and the types of its layers, from its transformers config."""

from harts.cost.experts import Reader

__all__ = ["ONE_PART", "Sizes"]

_GATED_QUERIES = ("afmoe", "qwen3_5", "qwen3_next")
_LAYER_TYPES = {"full_attention", "sliding_attention", "hybrid", "linear_attention", "conv", "mlp", "moe"}
ONE_PART = ("nemotron_h",)
"""Model types whose decoder layers are either a mixer or an MLP or experts."""


class Sizes(Reader):
    """The sizes of a config's text part."""

    def head_dim(self) -> int:
        """Of attention."""
        head_dim: int = self.get("head_dim", self.need("hidden_size") // self.need("num_attention_heads"))
        return head_dim

    def has_query_gate(self) -> bool:
        """Whether an output gate is part of the queries' projection."""
        of_type = str(self.get("model_type", "")).startswith(_GATED_QUERIES)
        return bool(self.get("attn_output_gate", of_type))

    def layer_types(self) -> list[str]:
        """The type of each decoder layer.

        Raises:
            ValueError: one is unknown, or there are not as many as layers.
        """
        kinds = self.first(("layer_types", "layers_block_type"), None)
        number = len(kinds) if self.get("model_type", "") in ONE_PART and kinds else self.need("num_hidden_layers")
        kinds = list(kinds) if kinds is not None else self._types_of_other_fields(number)
        unknown = sorted(set(kinds) - _LAYER_TYPES)
        if unknown or len(kinds) != number:
            got = f"{unknown}" if unknown else f"{len(kinds)} of them for {number} layers"
            raise ValueError(
                f"config, field layer_types: expected one of {', '.join(sorted(_LAYER_TYPES))} for each layer, got "
                f"{got}"
            )
        return kinds

    def _types_of_other_fields(self, number: int) -> list[str]:
        every = self.get("full_attention_interval", None)
        if every is not None:
            return ["full_attention" if (at + 1) % every == 0 else "linear_attention" for at in range(number)]
        kind = self.get("model_type", "")
        if kind == "bamba":
            full = self.get("attn_layer_indices", ())
            return ["full_attention" if at in full else "linear_attention" for at in range(number)]
        alike = "sliding_attention" if self.get("sliding_window", 0) else "full_attention"
        return ["hybrid" if kind == "falcon_h1" else alike] * number

    def window(self) -> int | None:
        """Of layers with a sliding window; None without any."""
        return self.need("sliding_window") if "sliding_attention" in self.layer_types() else None
