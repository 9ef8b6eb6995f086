"""Options of transformers' text configs that a tree does not take, named when a model is attached."""

from collections.abc import Callable, Collection, Mapping
from typing import Any

from harts.cost import expert_sizes, mamba2_sizes
from harts.mixers import GatedDeltaRule, KimiDeltaAttention, Mamba2, Mixer
from harts.models.family import Layer, layer_types

__all__ = ["check_adapters", "check_config"]

_TAPS = 4
"""Of the short convolution: a row of the tree knows its three ancestors."""

_ACTIVATIONS = ("silu", "swish")

_DENSE_TOO = ("granitemoehybrid", "nemotron_h")
"""Model types that may have no experts at all."""

_BY_WHOLE_FORWARD = ("XLORA", "POLY", "SHADOW")
"""Kinds of adapters whose layers take what the forward of peft's wrapper makes of the whole row or of its arguments."""


def check_adapters(model: Any) -> None:
    """Refuses adapters of peft that do more than their layers.

    Args:
        model: a `PeftModel`.

    Raises:
        ValueError: prompt learning, aLoRA, or another kind that needs the forward of peft's wrapper.
    """
    for name, config in getattr(model, "peft_config", {}).items():
        kind = str(getattr(config.peft_type, "value", config.peft_type)).upper()
        if config.is_prompt_learning:
            raise ValueError(
                "model: prompt learning puts virtual tokens before every row, which a tree does not; use LoRA, or "
                "write the prompt into the trajectories"
            )
        if getattr(config, "alora_invocation_tokens", None):
            kind = "aLoRA (alora_invocation_tokens)"
        elif kind not in _BY_WHOLE_FORWARD:
            continue
        raise ValueError(
            f"model: adapter {name!r}, {kind}, depends on where it starts in a row, or on the whole row, which peft's "
            "own forward gives its layers and a tree does not; use LoRA"
        )


# Options of mixture-of-experts models, under the names that models and trainers use, and why sharing forbids them.
_COUPLING = (
    (
        ("expert_capacity", "capacity_factor", "expert_capacity_factor", "moe_capacity_factor", "drop_tokens"),
        "with a capacity, whether an expert drops a token depends on the tokens beside it, and a shared row would be "
        "dropped for all its trajectories at once; set it to None (no token is dropped)",
    ),
    (
        ("router_jitter_noise", "router_noise", "router_jitter", "input_jitter_noise", "noisy_gate_policy"),
        "noise is drawn once for a shared row, where each of its trajectories would draw its own; set it to 0",
    ),
    (
        ("expert_dropout", "expert_dropout_prob", "moe_dropout", "router_dropout"),
        "a row of the tree stands for several trajectories, which would no longer be dropped alone; set it to 0",
    ),
)


def check_config(config: Any, known: Mapping[str, Layer | None], *, has_router: bool) -> None:
    """Refuses options of a text config that the tree ops do not have, or that sharing would change.

    Args:
        config: the text config of a supported family.
        known: types of decoder layers that the family has.
        has_router: whether the family is a mixture of experts.

    Raises:
        ValueError: the message names the option, what it is set to, and what is expected.
    """
    types = layer_types(config)
    _check_types(config, types, known)
    _check_coupling(config)
    _check_attention(config)
    layers = [known[kind] for kind in dict.fromkeys(types)]
    mixers = {each.mixer for layer in layers if layer is not None for each in layer.mixers()}
    for mixer, check in _CHECKS.items():
        if mixer in mixers:
            check(config)
    if has_router and config.model_type not in _DENSE_TOO:
        _check_experts(config)


def _check_types(config: Any, types: Collection[str], known: Collection[str]) -> None:
    window = getattr(config, "sliding_window", None)
    if unknown := sorted(set(types) - set(known)):
        which = f" (config.sliding_window = {window})" if "sliding_attention" in unknown else ""
        raise ValueError(
            f"model: layer types {unknown}{which} are not supported for {config.model_type}; expected "
            f"{' and '.join(known)} only"
        )
    if "sliding_attention" in types and (isinstance(window, bool) or not isinstance(window, int) or window < 1):
        raise ValueError(
            f"model: config.sliding_window = {window!r}: expected a number of rows of at least 1, as some layers are "
            "of type 'sliding_attention'"
        )


def _check_coupling(config: Any) -> None:
    for names, reason in _COUPLING:
        for name in names:
            if getattr(config, name, None):
                raise ValueError(f"model: config.{name} = {getattr(config, name)!r} is not supported: {reason}")
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") in ("dynamic", "longrope"):
        raise ValueError(
            f"model: rope_type {rope['rope_type']!r} depends on the length of the whole batch, so a token's position "
            "would depend on the rows beside it; use a fixed one (default, linear, yarn, llama3)"
        )


def _check_attention(config: Any) -> None:
    if getattr(config, "use_bidirectional_attention", None):
        raise ValueError(
            f"model: config.use_bidirectional_attention = {config.use_bidirectional_attention!r} is not supported: a "
            "row would see rows behind it, which differ between the trajectories that share it; set it to False"
        )
    heads, groups = config.num_attention_heads, getattr(config, "num_key_value_heads", None)
    if groups is not None and heads % groups:
        raise ValueError(
            f"model: config.num_attention_heads = {heads}: expected a multiple of config.num_key_value_heads = {groups}"
        )


def _check_convolution(config: Any, taps: str, activation: str) -> None:
    """By the names of its fields."""
    if getattr(config, taps) > _TAPS:
        raise ValueError(
            f"model: config.{taps} = {getattr(config, taps)} is not supported; the short convolution on a tree has at "
            f"most {_TAPS} taps"
        )
    if getattr(config, activation) not in _ACTIVATIONS:
        raise ValueError(
            f"model: config.{activation} = {getattr(config, activation)!r} is not supported; linear attention on a "
            f"tree has {' or '.join(map(repr, _ACTIVATIONS))} behind its short convolution"
        )


def _check_mamba2(config: Any) -> None:
    mamba2_sizes(config)
    _check_convolution(
        config,
        next(name for name in ("mamba_d_conv", "conv_kernel") if hasattr(config, name)),
        "mamba_hidden_act" if hasattr(config, "mamba_hidden_act") else "hidden_act",
    )


def _check_linear(config: Any) -> None:
    _check_convolution(config, "linear_conv_kernel_dim", "hidden_act")
    heads, groups = config.linear_num_value_heads, config.linear_num_key_heads
    if heads % groups:
        raise ValueError(
            f"model: config.linear_num_value_heads = {heads}: expected a multiple of config.linear_num_key_heads = "
            f"{groups}"
        )


def _check_experts(config: Any) -> None:
    if expert_sizes(config) is None:
        raise ValueError(
            f"model: config.num_experts = 0 is not supported for {config.model_type}; expected a mixture of "
            "experts, or layers made dense by config.mlp_only_layers"
        )


def _check_kimi(config: Any) -> None:
    _check_convolution(config, "linear_conv_kernel_dim", "hidden_act")


_CHECKS: Mapping[type[Mixer], Callable[[Any], None]] = {
    GatedDeltaRule: _check_linear,
    KimiDeltaAttention: _check_kimi,
    Mamba2: _check_mamba2,
}
