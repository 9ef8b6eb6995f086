"""FLOPs of a model, from the sizes in its transformers config (read by attribute or key; nothing is imported).

A multiply-add counts 2. Counted are matrix products and the two mixers; norms, activations, rotary embeddings and the
embedding's look-up are not. The formulas, per layer and row unless said otherwise:

- full attention: 2 x hidden x (queries + keys + values + output), queries doubled where an output gate is part of
  their projection; per visible pair 4 x heads x head_dim (scores and weighted values). With a sliding window of W, a
  row at depth d sees min(d + 1, W) rows.
- latent attention (MLA): 2 x hidden x (queries' latent + keys' latent + rotated key + output), the expansion of both
  latents, and per visible pair 2 x heads x (key_dim + value_dim).
- gated delta rule: 2 x hidden x (2 keys + 2 values + 2 value_heads) in and 2 x values x hidden out, the short
  convolution's taps, and the chunked recurrence of Yang et al., "Gated Delta Networks" (2024): with chunks of C = 64,
  per value head 2C x (3 key_dim + 2 value_dim) for K K^T, Q K^T and the triangular systems' products, and
  6 x key_dim x value_dim for reading and updating the state. Replayed rows repeat only the recurrence.
- short convolution with two gates (LFM2): 2 x hidden x 4 hidden for its projections, and the taps.
- MLP: 6 x hidden x intermediate, 4 x where it has no gate; mixture of experts: that of the experts chosen per token,
  the shared expert and the router.
- head: 2 x hidden x vocabulary for each trained row.

A backward counts twice its forward.
"""

import hashlib
import json
from typing import Any

from harts.blocks import BLOCK
from harts.cost.counts import Coefficients
from harts.cost.experts import Experts, Reader, expert_sizes

__all__ = ["forward_flops", "model_identity"]

_GATED_QUERIES = ("afmoe", "qwen3_5", "qwen3_next")
_PLAIN_MLP = ("arcee", "starcoder2")
_ATTENTION = ("full_attention", "sliding_attention")
_LAYER_TYPES = {*_ATTENTION, "linear_attention", "conv"}
_IDENTITY_FIELDS = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "layer_types",
    "linear_conv_kernel_dim",
    "conv_L_cache",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "decoder_sparse_step",
    "mlp_only_layers",
)


def forward_flops(config: Any) -> Coefficients:
    """FLOPs of one forward for one of each of `Counts`.

    Args:
        config: config of a Qwen3.5, Qwen3-Next, Qwen3, Llama or Mixtral-like model, dense or mixture of experts; the
            whole one or its text part; an object or a dictionary.

    Raises:
        ValueError: a size is missing, or a layer is of another type.
    """
    sizes = _Sizes(config)
    hidden = sizes.need("hidden_size")
    experts = expert_sizes(sizes)
    rows = linear_rows = 0.0
    pairs = dict.fromkeys(_ATTENTION, 0.0)
    for layer, kind in enumerate(sizes.layer_types()):
        if kind in _ATTENTION and sizes.get("kv_lora_rank", 0):
            per_row, per_pair = _latent_attention(sizes, hidden)
            rows += per_row
            pairs[kind] += per_pair
        elif kind in _ATTENTION:
            heads, head_dim = sizes.need("num_attention_heads"), sizes.head_dim()
            queries, keys = heads * head_dim, sizes.get("num_key_value_heads", heads) * head_dim
            rows += 2 * hidden * (queries * (2 + sizes.has_query_gate()) + 2 * keys)
            pairs[kind] += 4 * queries
        elif kind == "conv":
            rows += 2 * hidden * (4 * hidden + sizes.need("conv_L_cache"))
        else:
            per_row, per_linear_row = _gated_delta_rule(sizes, hidden)
            rows += per_row
            linear_rows += per_linear_row
        rows += _mlp(sizes, experts, layer, hidden)
    head = 2.0 * hidden * sizes.need("vocab_size")
    return Coefficients(
        rows=rows,
        pairs=pairs["full_attention"],
        window_pairs=pairs["sliding_attention"],
        linear_rows=linear_rows,
        trained_rows=head,
        window=sizes.window(),
    )


def model_identity(config: Any) -> str:
    """Names a model's architecture, e.g. `qwen3_5_text 32x2560 1f0c9a77`: type, layers x hidden, hash of all sizes."""
    sizes = _Sizes(config)
    fields = {name: sizes.get(name, None) for name in _IDENTITY_FIELDS}
    fields = {name: value for name, value in fields.items() if value is not None}
    fields["layer_types"] = sizes.layer_types()
    if "kv_lora_rank" in fields:  # of latent attention it is one of the others, or missing
        fields.pop("head_dim", None)
    if sizes.window() is not None:
        fields["sliding_window"] = sizes.window()
    experts = expert_sizes(sizes)
    fields["num_experts"] = 0 if experts is None else experts.number
    if experts is not None:
        fields["num_experts_per_tok"] = experts.per_token
        fields["shared_width"], fields["sparse_layers"] = experts.shared_width, sum(experts.layers)
    digest = hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:8]
    return f"{fields.get('model_type', 'model')} {len(fields['layer_types'])}x{sizes.need('hidden_size')} {digest}"


class _Sizes(Reader):
    """The sizes of a config's text part."""

    def head_dim(self) -> int:
        head_dim: int = self.get("head_dim", self.need("hidden_size") // self.need("num_attention_heads"))
        return head_dim

    def has_query_gate(self) -> bool:
        of_type = str(self.get("model_type", "")).startswith(_GATED_QUERIES)
        return bool(self.get("attn_output_gate", of_type))

    def layer_types(self) -> list[str]:
        number = self.need("num_hidden_layers")
        every = self.get("full_attention_interval", None)
        kinds = self.get("layer_types", None)
        if kinds is None and every is not None:
            kinds = ["full_attention" if (at + 1) % every == 0 else "linear_attention" for at in range(number)]
        alike = "sliding_attention" if self.get("sliding_window", 0) else "full_attention"
        kinds = list(kinds) if kinds is not None else [alike] * number
        unknown = sorted(set(kinds) - _LAYER_TYPES)
        if unknown or len(kinds) != number:
            got = f"{unknown}" if unknown else f"{len(kinds)} of them for {number} layers"
            raise ValueError(
                f"config, field layer_types: expected one of {', '.join(sorted(_LAYER_TYPES))} for each layer, got "
                f"{got}"
            )
        return kinds

    def window(self) -> int | None:
        """Of layers with a sliding window; None without any."""
        return self.need("sliding_window") if "sliding_attention" in self.layer_types() else None


def _gated_delta_rule(sizes: _Sizes, hidden: int) -> tuple[float, float]:
    """FLOPs of one layer per row, and per row of the recurrence."""
    key_dim, value_dim = sizes.need("linear_key_head_dim"), sizes.need("linear_value_head_dim")
    key_heads, value_heads = sizes.need("linear_num_key_heads"), sizes.need("linear_num_value_heads")
    keys, values = key_heads * key_dim, value_heads * value_dim
    convolution = 2 * sizes.need("linear_conv_kernel_dim") * (2 * keys + values)
    projections = 2 * hidden * (2 * keys + 2 * values + 2 * value_heads) + 2 * values * hidden
    chunk = 2 * BLOCK * (3 * key_dim + 2 * value_dim) + 6 * key_dim * value_dim
    return projections + convolution, value_heads * chunk


def _latent_attention(sizes: _Sizes, hidden: int) -> tuple[float, float]:
    """FLOPs of one layer per row, and per visible pair."""
    heads, latent, of_queries = (
        sizes.need("num_attention_heads"),
        sizes.need("kv_lora_rank"),
        sizes.get("q_lora_rank", 0),
    )
    rotated, plain, values = (sizes.need(name) for name in ("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"))
    keys = heads * (plain + rotated)
    queries = of_queries * (hidden + keys) if of_queries else hidden * keys
    expanded = hidden * (latent + rotated) + latent * heads * (plain + values)
    return 2.0 * (queries + expanded + heads * values * hidden), 2.0 * (keys + heads * values)


def _mlp(sizes: _Sizes, experts: Experts | None, layer: int, hidden: int) -> float:
    """FLOPs of one layer's MLP or chosen experts per row."""
    if sizes.get("block_auto_adjust_ff_dim", False):
        return 6.0 * hidden * _adjusted_width(sizes)
    if experts is None or not experts.layers[layer]:
        products = 2 if sizes.get("model_type", "") in _PLAIN_MLP else 3
        return 2.0 * products * hidden * sizes.need("intermediate_size")
    widths = experts.per_token * experts.width + experts.shared_width
    return 6.0 * hidden * widths + 2.0 * hidden * (experts.number + experts.shared_gate)


def _adjusted_width(sizes: _Sizes) -> int:
    """The width of LFM2's MLP: two thirds of what the config names, times a factor, up to a multiple."""
    width = int(sizes.get("block_ffn_dim_multiplier", 1.0) * (2 * sizes.need("intermediate_size") // 3))
    multiple = sizes.need("block_multiple_of")
    return -(-width // multiple) * multiple
