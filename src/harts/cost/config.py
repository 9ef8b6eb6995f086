"""FLOPs of a model, from the sizes in its transformers config (read by attribute or key; nothing is imported).

A multiply-add counts 2. Counted are matrix products and the mixers; norms, activations, rotary embeddings and the
embedding's look-up are not. The formulas, per layer and row unless said otherwise:

- mixers: see `harts.cost.mixers`.
- MLP: 6 x hidden x intermediate, 4 x where it has no gate; mixture of experts: that of the experts chosen per token,
  the shared expert and the router.
- head: 2 x hidden x vocabulary for each trained row.

A backward counts twice its forward.
"""

import dataclasses
import hashlib
import json
from typing import Any

from harts.cost.counts import Coefficients
from harts.cost.experts import Experts, expert_sizes
from harts.cost.mixers import mixers_of
from harts.cost.recurrent import mamba2_sizes
from harts.cost.sizes import ONE_PART, Sizes

__all__ = ["forward_flops", "model_identity"]

_PLAIN_MLP = ("arcee", "nemotron_h", "starcoder2", "nanochat", "phi")
_MLP_WIDTH = {"granitemoehybrid": "shared_intermediate_size"}
"""Fields with the width of the MLP of model types that call it otherwise."""
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
    sizes = Sizes(config)
    hidden, experts = sizes.need("hidden_size"), expert_sizes(sizes)
    one_part = sizes.get("model_type", "") in ONE_PART
    total = Coefficients(trained_rows=2.0 * hidden * sizes.need("vocab_size"), window=sizes.window())
    for layer, kind in enumerate(sizes.layer_types()):
        for price in mixers_of(sizes, kind):
            total += price(sizes, layer, kind)
        if kind in ("mlp", "moe") or not one_part:
            total += Coefficients(rows=_mlp(sizes, experts, layer, hidden))
    return total


def model_identity(config: Any) -> str:
    """Names a model's architecture, e.g. `qwen3_5_text 32x2560 1f0c9a77`: type, layers x hidden, hash of all sizes."""
    sizes = Sizes(config)
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


def _mlp(sizes: Sizes, experts: Experts | None, layer: int, hidden: int) -> float:
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


def _adjusted_width(sizes: Sizes) -> int:
    """The width of LFM2's MLP: two thirds of what the config names, times a factor, up to a multiple."""
    width = int(sizes.get("block_ffn_dim_multiplier", 1.0) * (2 * sizes.need("intermediate_size") // 3))
    multiple = sizes.need("block_multiple_of")
    return -(-width // multiple) * multiple
