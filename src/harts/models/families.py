"""The transformers model families that HARTS can run on a tree."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from harts.mixers import (
    Attention,
    GatedDeltaRule,
    KimiDeltaAttention,
    LatentAttention,
    LightningAttention,
    Mamba2,
    ShortConv,
    SlidingAttention,
)
from harts.models.family import Family, Layer
from harts.models.routers import ARGUMENT, Router

__all__ = ["FAMILIES"]


def _ready_made_mask(device: torch.device) -> Tensor:
    """A four-dimensional mask is taken as it is; ours is ignored by the attention function."""
    return torch.zeros(1, 1, 1, 1, device=device)


def _masks_by_mixer(device: torch.device) -> dict[str, None]:
    """None, by mixer, where both are in one layer."""
    return {"full_attention": None, "linear_attention": None}


_MODELS = "transformers.models"


def _attention(module: str, *, windows: bool = False) -> dict[str, Layer]:
    """Full attention, and with windows in some layers."""
    full = {"full_attention": Layer(f"{_MODELS}.{module}", Attention)}
    return {**full, "sliding_attention": Layer(f"{_MODELS}.{module}", SlidingAttention)} if windows else full


def _hybrid(module: str, attention: str, linear: str, twin: str) -> dict[str, Layer]:
    """Attention and gated delta rule."""
    return {
        **_attention(f"{module}:{attention}"),
        "linear_attention": Layer(f"{_MODELS}.{module}:{linear}", GatedDeltaRule, twin),
    }


def _mamba2(name: str, stem: str, mixer: str) -> dict[str, Layer]:
    """Attention or Mamba2."""
    module = f"{name}.modeling_{name}"
    return {
        **_attention(f"{module}:{stem}Attention"),
        "linear_attention": Layer(f"{_MODELS}.{module}:{stem}{mixer}", Mamba2, f"harts.models.{name}:TreeMamba2Mixer"),
    }


_NORMALIZED_BY_CONFIG: Mapping[str, Any] = {"normalized": "norm_topk_prob"}

_GROUPED_SIGMOIDS: Mapping[str, Any] = {
    **_NORMALIZED_BY_CONFIG,
    "scores": "sigmoid",
    "epsilon": 1e-20,
    "scale": "routed_scaling_factor",
    "groups": ("num_group", "topk_group"),
    "bias": "e_score_correction_bias",
}
"""The router of DeepSeek V3."""

_PLAIN: tuple[tuple[str, str], ...] = (
    ("arcee", "Arcee"),
    ("cohere", "Cohere"),
    ("cohere2", "Cohere2"),
    ("cwm", "Cwm"),
    ("ernie4_5", "Ernie4_5"),
    ("exaone4", "Exaone4"),
    ("gemma", "Gemma"),
    ("gemma2", "Gemma2"),
    ("gemma3_text", "Gemma3"),
    ("glm", "Glm"),
    ("glm4", "Glm4"),
    ("granite", "Granite"),
    ("granite_swa", "GraniteSWA"),
    ("helium", "Helium"),
    ("hunyuan_v1_dense", "HunYuanDenseV1"),
    ("llama", "Llama"),
    ("ministral", "Ministral"),
    ("ministral3", "Ministral3"),
    ("mistral", "Mistral"),
    ("nanochat", "NanoChat"),
    ("olmo", "Olmo"),
    ("olmo2", "Olmo2"),
    ("olmo3", "Olmo3"),
    ("phi", "Phi"),
    ("phi3", "Phi3"),
    ("qwen2", "Qwen2"),
    ("qwen3", "Qwen3"),
    ("seed_oss", "SeedOss"),
    ("smollm3", "SmolLM3"),
    ("starcoder2", "Starcoder2"),
    ("vaultgemma", "VaultGemma"),
)
"""Causal attention in every layer and a dense MLP: model type, stem of its classes."""

_SPARSE: tuple[tuple[str, str, str, Mapping[str, Any]], ...] = (
    (
        "afmoe",
        "Afmoe",
        "TokenChoiceRouter",
        {"scores": "sigmoid", "bias": ARGUMENT, "epsilon": 1e-20, "scale": "route_scale", "weight": "gate.weight"},
    ),
    ("dots1", "Dots1", "TopkRouter", _GROUPED_SIGMOIDS),
    (
        "ernie4_5_moe",
        "Ernie4_5_Moe",
        "TopKRouter",
        {"bias": "moe_statics.e_score_correction_bias", "floor": "norm_min"},
    ),
    ("exaone_moe", "ExaoneMoe", "TopkRouter", _GROUPED_SIGMOIDS),
    ("flex_olmo", "FlexOlmo", "TopKRouter", _NORMALIZED_BY_CONFIG),
    ("glm4_moe", "Glm4Moe", "TopkRouter", _GROUPED_SIGMOIDS),
    ("granitemoe", "GraniteMoe", "TopKRouter", {}),
    ("gpt_oss", "GptOss", "TopKRouter", {"added": "bias"}),
    ("granitemoe_swa", "GraniteMoeSWA", "TopKRouter", {}),
    ("granitemoeshared", "GraniteMoeShared", "TopKRouter", {}),
    ("hunyuan_v1_moe", "HunYuanMoEV1", "Gate", {"weight": "wg.weight"}),
    (
        "hy_v3",
        "HYV3",
        "TopKRouter",
        {"scores": "sigmoid", "bias": ARGUMENT, "epsilon": 1e-20, "scale": "router_scaling_factor"},
    ),
    (
        "laguna",
        "Laguna",
        "TopKRouter",
        {"scores": "sigmoid", "bias": "e_score_correction_bias", "cap": "router_logit_softcapping"},
    ),
    ("mellum", "Mellum", "TopKRouter", _NORMALIZED_BY_CONFIG),
    ("mimo_v2_flash", "MiMoV2Flash", "TopkRouter", _GROUPED_SIGMOIDS),
    ("minimax_m2", "MiniMaxM2", "TopKRouter", {"scores": "sigmoid", "bias": ARGUMENT}),
    ("mixtral", "Mixtral", "TopKRouter", {}),
    ("olmoe", "Olmoe", "TopKRouter", _NORMALIZED_BY_CONFIG),
    ("qwen2_moe", "Qwen2Moe", "TopKRouter", _NORMALIZED_BY_CONFIG),
    ("qwen3_moe", "Qwen3Moe", "TopKRouter", _NORMALIZED_BY_CONFIG),
    ("solar_open", "SolarOpen", "TopkRouter", _GROUPED_SIGMOIDS),
)
"""The same with experts: model type, stem of its classes, what follows it in the router's, what the router does."""

_GROUPED_SOFTMAX: Mapping[str, Any] = {
    "scale": "routed_scaling_factor",
    "groups": ("num_group", "topk_group"),
}

_LATENT: tuple[tuple[str, str, Mapping[str, Any] | None], ...] = (
    ("axk1", "AXK1", _GROUPED_SIGMOIDS),
    (
        "deepseek_v2",
        "DeepseekV2",
        {
            **_GROUPED_SOFTMAX,
            "normalized": False,
            "group_best": 1,
            "grouped": ("topk_method", "group_limited_greedy"),
        },
    ),
    ("deepseek_v3", "DeepseekV3", _GROUPED_SIGMOIDS),
    ("glm4_moe_lite", "Glm4MoeLite", _GROUPED_SIGMOIDS),
    ("minicpm3", "MiniCPM3", None),
    ("mistral4", "Mistral4", {**_GROUPED_SOFTMAX, **_NORMALIZED_BY_CONFIG, "epsilon": 1e-20}),
    ("youtu", "Youtu", None),
)
"""Latent attention in every layer: model type, stem of its classes, what its router does; None: a dense MLP."""

_WINDOW_BY_TYPE = (
    *("afmoe", "cohere2", "cwm", "dots1", "exaone4", "exaone_moe", "gemma2", "gemma3_text", "gpt_oss", "granite_swa"),
    *(
        "granitemoe_swa",
        "laguna",
        "mellum",
        "mimo_v2_flash",
        "ministral",
        "olmo3",
        "qwen2",
        "qwen2_moe",
        "qwen3",
        "smollm3",
        "vaultgemma",
    ),
)
"""Those of them whose layers may have sliding windows, as `layer_types` says; they take a dictionary of masks."""

_ONE_WINDOW = ("ministral3", "mistral", "mixtral", "phi3", "qwen3_moe", "starcoder2")
"""Those in which a window is every layer's."""


def _plain(name: str, stem: str, **more: Any) -> Family:
    module = f"{name.removesuffix('_text')}.modeling_{name.removesuffix('_text')}:{stem}Attention"
    by_type = name in _WINDOW_BY_TYPE
    return Family(
        layers=_attention(module, windows=by_type or name in _ONE_WINDOW),
        mask=None if by_type else _ready_made_mask,
        **more,
    )


def _latent(name: str, stem: str, what: Mapping[str, Any] | None) -> Family:
    module = f"{_MODELS}.{name}.modeling_{name}:{stem}"
    return Family(
        layers={"full_attention": Layer(f"{module}Attention", LatentAttention)},
        mask=_ready_made_mask,
        router=None if what is None else Router(module=f"{module}TopkRouter", **what),
    )


def _kimi(name: str, stem: str) -> Family:
    """Latent attention or Kimi delta attention, and DeepSeek's experts."""
    module = f"{_MODELS}.{name}.modeling_{name}:{stem}"
    return Family(
        layers={
            "full_attention": Layer(f"{module}Attention", LatentAttention),
            "linear_attention": Layer(
                f"{module}DeltaAttention", KimiDeltaAttention, f"harts.models.{name}:TreeDeltaAttention"
            ),
        },
        router=Router(module=f"{module}TopkRouter", **_GROUPED_SIGMOIDS),
    )


FAMILIES: dict[str, Family] = {
    "qwen3_5_text": Family(
        layers=_hybrid(
            "qwen3_5.modeling_qwen3_5",
            "Qwen3_5Attention",
            "Qwen3_5GatedDeltaNet",
            "harts.models.qwen3_5:TreeGatedDeltaNet",
        ),
        fused="harts.models.qwen3_5:FUSED",
    ),
    **{name: _plain(name, stem) for name, stem in _PLAIN},
    **{
        name: _plain(
            name,
            stem,
            router=Router(module=f"{_MODELS}.{name}.modeling_{name}:{stem}{suffix}", **what),
            fused="harts.models.qwen3_moe:FUSED" if name == "qwen3_moe" else None,
        )
        for name, stem, suffix, what in _SPARSE
    },
    **{name: _latent(name, stem, what) for name, stem, what in _LATENT},
    "bamba": Family(layers=_mamba2("bamba", "Bamba", "Mixer")),
    "bailing_hybrid": _kimi("bailing_hybrid", "BailingHybrid"),
    "falcon_h1": Family(
        layers={
            "hybrid": Layer(
                f"{_MODELS}.falcon_h1.modeling_falcon_h1:FalconH1Mixer",
                Mamba2,
                "harts.models.falcon_h1:TreeMamba2Mixer",
                beside=Layer(f"{_MODELS}.falcon_h1.modeling_falcon_h1:FalconH1Attention", Attention),
            )
        },
        mask=_masks_by_mixer,
    ),
    "granitemoehybrid": Family(
        layers=_mamba2("granitemoehybrid", "GraniteMoeHybrid", "MambaLayer"),
        router=Router(module=f"{_MODELS}.granitemoehybrid.modeling_granitemoehybrid:GraniteMoeHybridTopKRouter"),
    ),
    "minimax": Family(
        layers={
            **_attention("minimax.modeling_minimax:MiniMaxAttention"),
            "linear_attention": Layer(
                f"{_MODELS}.minimax.modeling_minimax:MiniMaxLightningAttention",
                LightningAttention,
                "harts.models.minimax:TreeLightningAttention",
            ),
        },
        router=Router(module=f"{_MODELS}.minimax.modeling_minimax:MiniMaxTopKRouter"),
    ),
    "nemotron_h": Family(
        layers={**_mamba2("nemotron_h", "NemotronH", "Mamba2Mixer"), "mlp": None, "moe": None},
        router=Router(module=f"{_MODELS}.nemotron_h.modeling_nemotron_h:NemotronHTopkRouter", **_GROUPED_SIGMOIDS),
        block=(f"{_MODELS}.nemotron_h.modeling_nemotron_h:NemotronHBlock", "harts.models.nemotron_h:TreeBlock"),
    ),
    "kimi_linear": _kimi("kimi_linear", "KimiLinear"),
    "lfm2": Family(
        layers={
            **_attention("lfm2.modeling_lfm2:Lfm2Attention"),
            "conv": Layer(f"{_MODELS}.lfm2.modeling_lfm2:Lfm2ShortConv", ShortConv, "harts.models.lfm2:TreeShortConv"),
        },
        since="5.18",
    ),
    "lfm2_moe": Family(
        layers={
            **_attention("lfm2_moe.modeling_lfm2_moe:Lfm2MoeAttention"),
            "conv": Layer(
                f"{_MODELS}.lfm2_moe.modeling_lfm2_moe:Lfm2MoeShortConv",
                ShortConv,
                "harts.models.lfm2_moe:TreeShortConv",
            ),
        },
        router=Router(
            module=f"{_MODELS}.lfm2_moe.modeling_lfm2_moe:Lfm2MoeTopKRouter",
            scores="sigmoid",
            epsilon=1e-6,
            scale="routed_scaling_factor",
            bias=ARGUMENT,
            **_NORMALIZED_BY_CONFIG,
        ),
        since="5.18",
    ),
    "olmo_hybrid": Family(
        layers=_hybrid(
            "olmo_hybrid.modeling_olmo_hybrid",
            "OlmoHybridAttention",
            "OlmoHybridGatedDeltaNet",
            "harts.models.olmo_hybrid:TreeGatedDeltaNet",
        ),
    ),
    "qwen3_5_moe_text": Family(
        layers=_hybrid(
            "qwen3_5_moe.modeling_qwen3_5_moe",
            "Qwen3_5MoeAttention",
            "Qwen3_5MoeGatedDeltaNet",
            "harts.models.qwen3_5_moe:TreeGatedDeltaNet",
        ),
        router=Router(module=f"{_MODELS}.qwen3_5_moe.modeling_qwen3_5_moe:Qwen3_5MoeTopKRouter"),
        fused="harts.models.qwen3_5_moe:FUSED",
    ),
    "qwen3_next": Family(
        layers=_hybrid(
            "qwen3_next.modeling_qwen3_next",
            "Qwen3NextAttention",
            "Qwen3NextGatedDeltaNet",
            "harts.models.qwen3_next:TreeGatedDeltaNet",
        ),
        router=Router(module=f"{_MODELS}.qwen3_next.modeling_qwen3_next:Qwen3NextTopKRouter", **_NORMALIZED_BY_CONFIG),
        fused="harts.models.qwen3_next:FUSED",
    ),
}
"""By `model_type` of the text config."""
