"""FLOPs of a model, from the sizes in its transformers config (read by attribute or key; nothing is imported).

A multiply-add counts 2. Counted are matrix products and the mixers; norms, activations, rotary embeddings and the
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
- Kimi delta attention: the same recurrence; projections of q, k, v, strengths, decays and output gate, the last two of
  low rank in Kimi Linear.
- Mamba2: 2 x hidden x (2 inner + 2 groups x state + heads) in and 2 x inner x hidden out, the short convolution's taps,
  and the chunked recurrence of Dao and Gu, "Transformers are SSMs" (2024): with chunks of C = 64, per head
  2C x (state + head_dim) for C B^T and its product with x, and 4 x state x head_dim for reading and updating the state.
- lightning attention: 2 x hidden x 5 heads x head_dim for q, k, v, the output gate and the output; the same recurrence
  with state = head_dim.
- short convolution with two gates (LFM2): 2 x hidden x 4 hidden for its projections, and the taps.
- MLP: 6 x hidden x intermediate, 4 x where it has no gate; mixture of experts: that of the experts chosen per token,
  the shared expert and the router.
- head: 2 x hidden x vocabulary for each trained row.

A backward counts twice its forward.
"""

import dataclasses
import hashlib
import json
from typing import Any

from harts.blocks import BLOCK
from harts.cost.counts import Coefficients
from harts.cost.experts import Experts, Reader, expert_sizes
from harts.cost.recurrent import Mamba2Sizes, mamba2_sizes

__all__ = ["forward_flops", "model_identity"]

_GATED_QUERIES = ("afmoe", "qwen3_5", "qwen3_next")
_PLAIN_MLP = ("arcee", "nemotron_h", "starcoder2", "nanochat", "phi")
_MLP_WIDTH = {"granitemoehybrid": "shared_intermediate_size"}
"""Fields with the width of the MLP of model types that call it otherwise."""
_ATTENTION = {"full_attention": "full_attention", "hybrid": "full_attention", "sliding_attention": "sliding_attention"}
"""Which pairs the attention of a layer's type sees."""
_LINEAR = ("linear_attention", "hybrid")
_LAYER_TYPES = {*_ATTENTION, *_LINEAR, "conv", "mlp", "moe"}
_TWICE_THE_KEYS = ("mimo_v2_flash",)
"""Model types whose layers with a sliding window have twice the key and value heads of the config."""
_GATED_HEADS = ("laguna",)
"""Model types with a gate on attention's output, of each head or of each channel, as `gating` says."""
_GATED_LATENTS = ("bailing_hybrid",)
"""Model types with a gate on each head of latent attention's output."""
_LIGHTNING = ("minimax",)
"""Model types whose linear attention is lightning attention."""
_ONE_PART = ("nemotron_h",)
"""Model types whose decoder layers are either a mixer or an MLP or experts."""
_IDENTITY_FIELDS = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_attention_heads_per_layer",
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
    "linear_head_dim",
    "linear_num_heads",
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
    pairs = dict.fromkeys(_ATTENTION.values(), 0.0)
    one_part = sizes.get("model_type", "") in _ONE_PART
    for layer, kind in enumerate(sizes.layer_types()):
        if kind in _ATTENTION and sizes.get("kv_lora_rank", 0):
            per_row, per_pair = _latent_attention(sizes, hidden)
            rows += per_row
            pairs[kind] += per_pair
        elif kind in _ATTENTION:
            per_row, per_pair = _softmax_attention(sizes, hidden, layer, kind)
            rows += per_row
            pairs[_ATTENTION[kind]] += per_pair
        if kind == "conv":
            rows += 2 * hidden * (4 * hidden + sizes.need("conv_L_cache"))
        if kind in _LINEAR:
            per_row, per_linear_row = _linear_attention(sizes, hidden)
            rows += per_row
            linear_rows += per_linear_row
        if kind in ("mlp", "moe") or not one_part:
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
    fields["num_hidden_layers"] = len(fields["layer_types"])
    if "kv_lora_rank" in fields:  # of latent attention it is one of the others, or missing
        fields.pop("head_dim", None)
    if sizes.window() is not None:
        fields["sliding_window"] = sizes.window()
    mamba2 = mamba2_sizes(sizes)
    if mamba2 is not None:
        fields["mamba2"] = dataclasses.astuple(mamba2)
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
        kinds = self.first(("layer_types", "layers_block_type"), None)
        number = len(kinds) if self.get("model_type", "") in _ONE_PART and kinds else self.need("num_hidden_layers")
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


def _softmax_attention(sizes: _Sizes, hidden: int, layer: int, kind: str) -> tuple[float, float]:
    """FLOPs of one layer per row, and per visible pair."""
    heads, head_dim = sizes.need("num_attention_heads"), sizes.head_dim()
    value_dim = sizes.get("v_head_dim", head_dim)
    groups = sizes.get("num_key_value_heads", heads)
    of_layer = sizes.get("num_attention_heads_per_layer", None)
    if of_layer is not None:
        heads = of_layer[layer]
    model_type = sizes.get("model_type", "")
    if model_type in _TWICE_THE_KEYS and kind == "sliding_attention":
        groups *= 2
    columns = heads * (head_dim + value_dim) + groups * (head_dim + value_dim)
    if sizes.has_query_gate():
        columns += heads * head_dim
    if model_type in _GATED_HEADS:
        columns += heads if sizes.get("gating", True) in (True, "per-head") else heads * head_dim
    return 2.0 * hidden * columns, 2.0 * heads * (head_dim + value_dim)


def _linear_attention(sizes: _Sizes, hidden: int) -> tuple[float, float]:
    """FLOPs of one layer per row, and per row of the recurrence."""
    mamba2 = mamba2_sizes(sizes)
    if mamba2 is not None:
        return _mamba2(mamba2, hidden)
    if sizes.get("model_type", "") in _LIGHTNING:
        return _lightning(sizes, hidden)
    return _kimi(sizes, hidden) if sizes.get("linear_num_heads", 0) else _gated_delta_rule(sizes, hidden)


def _lightning(sizes: _Sizes, hidden: int) -> tuple[float, float]:
    heads, size = sizes.need("num_attention_heads"), sizes.head_dim()
    return 10 * hidden * heads * size, heads * (4 * BLOCK * size + 4 * size * size)


def _kimi(sizes: _Sizes, hidden: int) -> tuple[float, float]:
    heads, size = sizes.need("linear_num_heads"), sizes.need("linear_head_dim")
    inner = heads * size
    low_rank = sizes.get("model_type", "") == "kimi_linear"  # the projections of decay and output gate
    gates = 2 * (hidden + inner) * size if low_rank else 2 * hidden * inner
    projections = 2 * (hidden * (3 * inner + heads) + gates + inner * hidden)
    return projections + 6 * sizes.need("linear_conv_kernel_dim") * inner, heads * _delta_chunk(size, size)


def _delta_chunk(key_dim: int, value_dim: int) -> int:
    return 2 * BLOCK * (3 * key_dim + 2 * value_dim) + 6 * key_dim * value_dim


def _mamba2(sizes: Mamba2Sizes, hidden: int) -> tuple[float, float]:
    projections = 2 * hidden * (sizes.inner + sizes.channels + sizes.heads) + 2 * sizes.inner * hidden
    state, size = sizes.state_size, sizes.head_size
    chunk = 2 * BLOCK * (state + size) + 4 * state * size
    return projections + 2 * sizes.taps * sizes.channels, sizes.heads * chunk


def _gated_delta_rule(sizes: _Sizes, hidden: int) -> tuple[float, float]:
    key_dim, value_dim = sizes.need("linear_key_head_dim"), sizes.need("linear_value_head_dim")
    key_heads, value_heads = sizes.need("linear_num_key_heads"), sizes.need("linear_num_value_heads")
    keys, values = key_heads * key_dim, value_heads * value_dim
    convolution = 2 * sizes.need("linear_conv_kernel_dim") * (2 * keys + values)
    projections = 2 * hidden * (2 * keys + 2 * values + 2 * value_heads) + 2 * values * hidden
    return projections + convolution, value_heads * _delta_chunk(key_dim, value_dim)


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
    gate = heads * hidden if sizes.get("model_type", "") in _GATED_LATENTS else 0
    return 2.0 * (queries + expanded + gate + heads * values * hidden), 2.0 * (keys + heads * values)


def _mlp(sizes: _Sizes, experts: Experts | None, layer: int, hidden: int) -> float:
    """FLOPs of one layer's MLP or chosen experts per row."""
    if sizes.get("block_auto_adjust_ff_dim", False):
        return 6.0 * hidden * _adjusted_width(sizes)
    if experts is None or not experts.layers[layer]:
        kind = sizes.get("model_type", "")
        products = 2 if kind in _PLAIN_MLP else 3
        return 2.0 * products * hidden * sizes.need(_MLP_WIDTH.get(kind, "intermediate_size"))
    products = 3 if experts.gated else 2
    routed = 2.0 * products * (experts.latent or hidden) * experts.per_token * experts.width
    shared = 2.0 * products * hidden * experts.shared_width
    around = 2.0 * hidden * (experts.number + experts.shared_gate + 2 * (experts.latent or 0))
    return routed + shared + around


def _adjusted_width(sizes: _Sizes) -> int:
    """The width of LFM2's MLP: two thirds of what the config names, times a factor, up to a multiple."""
    width = int(sizes.get("block_ffn_dim_multiplier", 1.0) * (2 * sizes.need("intermediate_size") // 3))
    multiple = sizes.need("block_multiple_of")
    return -(-width // multiple) * multiple
