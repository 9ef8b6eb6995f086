"""Configs of tiny models of the supported families, for tests, checks and a first run."""

from collections.abc import Mapping
from typing import Any

__all__ = ["COMMON", "PRESETS"]

COMMON: Mapping[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 262_144,
    "tie_word_embeddings": False,
}

_HYBRID: Mapping[str, Any] = {
    "num_hidden_layers": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}

# a quarter of the head is rotated; the sections share its 2 frequencies among text, height and width
_QUARTER_ROTARY: Mapping[str, Any] = {
    "rope_type": "default",
    "rope_theta": 10_000_000.0,
    "partial_rotary_factor": 0.25,
}
_THREE_SECTIONS = {"rope_parameters": {**_QUARTER_ROTARY, "mrope_section": [1, 1, 0]}}

_MAMBA2: Mapping[str, Any] = {
    "mamba_n_heads": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 8,
    "mamba_expand": 2,
    "mamba_d_head": 16,
    "mamba_chunk_size": 32,
}

_EXPERTS: Mapping[str, Any] = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "experts_implementation": "eager",  # the others have no fp64
}

_LOCAL_EXPERTS: Mapping[str, Any] = {
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "intermediate_size": 32,
    "experts_implementation": "eager",
}

# experts of two of four groups
_GROUPED: Mapping[str, Any] = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "n_group": 4,
    "topk_group": 2,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "experts_implementation": "eager",
}

_MIXED: Mapping[str, Any] = {"sliding_window": 24, "layer_types": ["full_attention", "sliding_attention"]}

# low enough to bend what random weights give
_CAPS: Mapping[str, Any] = {"attn_logit_softcapping": 0.5, "final_logit_softcapping": 0.7}

# keys of 8 + 8 channels, values of 12; `head_dim` is what is rotated
_LATENT: Mapping[str, Any] = {
    "num_key_value_heads": 4,
    "head_dim": 8,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}

_LATENT_AND_LINEAR: Mapping[str, Any] = {
    "num_hidden_layers": 2,
    **_GROUPED,
    "mlp_layer_types": ["dense", "sparse"],
    "n_shared_experts": 1,
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": None,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 4,
    "v_head_dim": 10,
    "pad_token_id": 0,
}

PRESETS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "tiny-qwen3.5": ("Qwen3_5Text", {**_HYBRID, **_THREE_SECTIONS}),
    "tiny-qwen3": ("Qwen3", {"num_hidden_layers": 2}),
    "tiny-llama": ("Llama", {"num_hidden_layers": 2}),
    "tiny-mistral": ("Mistral", {"num_hidden_layers": 2, "sliding_window": 24}),
    "tiny-qwen2": (
        "Qwen2",
        {"num_hidden_layers": 2, "use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1},
    ),
    "tiny-olmo2": ("Olmo2", {"num_hidden_layers": 2}),
    "tiny-arcee": ("Arcee", {"num_hidden_layers": 2}),
    "tiny-cohere": ("Cohere", {"num_hidden_layers": 2, "logit_scale": 0.3, "pad_token_id": 0}),
    "tiny-cohere2": ("Cohere2", {"num_hidden_layers": 2, **_MIXED, "logit_scale": 0.3, "pad_token_id": 0}),
    "tiny-cwm": ("Cwm", {"num_hidden_layers": 2, **_MIXED, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2}),
    "tiny-exaone4": ("Exaone4", {"num_hidden_layers": 2, **_MIXED}),
    "tiny-gemma2": ("Gemma2", {"num_hidden_layers": 2, **_MIXED, "query_pre_attn_scalar": 12, **_CAPS}),
    "tiny-gemma3": ("Gemma3Text", {"num_hidden_layers": 2, **_MIXED, "query_pre_attn_scalar": 12}),
    "tiny-granite-swa": ("GraniteSWA", {"num_hidden_layers": 2, **_MIXED, "logits_scaling": 2.0}),
    "tiny-ministral": ("Ministral", {"num_hidden_layers": 2, **_MIXED}),
    "tiny-olmo3": ("Olmo3", {"num_hidden_layers": 2, **_MIXED}),
    "tiny-vaultgemma": ("VaultGemma", {"num_hidden_layers": 2, **_MIXED, **_CAPS}),
    "tiny-ernie4.5": ("Ernie4_5", {"num_hidden_layers": 2}),
    "tiny-gemma": ("Gemma", {"num_hidden_layers": 2, "pad_token_id": 0}),
    "tiny-glm": ("Glm", {"num_hidden_layers": 2, "pad_token_id": 0}),
    "tiny-glm4": ("Glm4", {"num_hidden_layers": 2, "pad_token_id": 0}),
    "tiny-granite": (
        "Granite",
        {
            "num_hidden_layers": 2,
            "logits_scaling": 2.0,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.5,
            "attention_multiplier": 0.1,
        },
    ),
    "tiny-helium": ("Helium", {"num_hidden_layers": 2, "pad_token_id": 0}),
    "tiny-hunyuan": ("HunYuanDenseV1", {"num_hidden_layers": 2}),
    "tiny-ministral3": ("Ministral3", {"num_hidden_layers": 2, "sliding_window": None}),
    "tiny-nanochat": ("NanoChat", {"num_hidden_layers": 2}),
    "tiny-phi": ("Phi", {"num_hidden_layers": 2}),
    "tiny-olmo": ("Olmo", {"num_hidden_layers": 2}),
    "tiny-phi3": ("Phi3", {"num_hidden_layers": 2, "pad_token_id": 0, "sliding_window": 24}),
    "tiny-seed-oss": (
        "SeedOss",
        {"num_hidden_layers": 2, "residual_dropout": 0.0, "attention_dropout": 0.0},
    ),
    "tiny-smollm3": ("SmolLM3", {"num_hidden_layers": 4, "pad_token_id": 0}),  # the fourth has no rotary embedding
    "tiny-starcoder2": (
        "Starcoder2",
        {"num_hidden_layers": 2, "sliding_window": 24, "residual_dropout": 0.0, "embedding_dropout": 0.0},
    ),
    "tiny-bamba": ("Bamba", {"num_hidden_layers": 3, **_MAMBA2, "attn_layer_indices": [1], "pad_token_id": 0}),
    "tiny-bailing-hybrid": (
        "BailingHybrid",
        {**_LATENT_AND_LINEAR, "head_dim": 16, "layer_types": ["linear_attention", "full_attention"]},
    ),
    "tiny-kimi-linear": (
        "KimiLinear",
        {
            **_LATENT_AND_LINEAR,
            "linear_head_dim": 16,
            "linear_num_heads": 4,
            "layer_types": ["linear_attention", "full_attention"],
        },
    ),
    "tiny-olmo-hybrid": (
        "OlmoHybrid",
        {
            "num_hidden_layers": 2,
            "layer_types": ["linear_attention", "full_attention"],
            "linear_key_head_dim": 12,
            "linear_value_head_dim": 24,
            "linear_num_key_heads": 4,
            "linear_num_value_heads": 4,
            "pad_token_id": 0,
        },
    ),
    "tiny-minimax": (
        "MiniMax",
        {
            "num_hidden_layers": 3,
            **_LOCAL_EXPERTS,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "block_size": 32,
            "linear_attn_alpha_factor": 1.1,
            "linear_attn_beta_factor": 0.9,
            "full_attn_alpha_factor": 1.2,
            "mlp_beta_factor": 0.8,
        },
    ),
    "tiny-falcon-h1": (
        "FalconH1",
        {
            "num_hidden_layers": 2,
            **_MAMBA2,
            "mamba_d_ssm": 128,
            "pad_token_id": 0,
            "embedding_multiplier": 3.0,
            "lm_head_multiplier": 0.5,
            "key_multiplier": 0.7,
            "attention_in_multiplier": 1.2,
            "attention_out_multiplier": 0.8,
            "ssm_in_multiplier": 1.1,
            "ssm_out_multiplier": 0.9,
            "ssm_multipliers": [0.9, 1.1, 0.8, 1.2, 0.7],
            "mlp_multipliers": [0.9, 1.1],
        },
    ),
    "tiny-nemotron-h": (
        "NemotronH",
        {
            "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp", "moe", "linear_attention"],
            **_GROUPED,
            "mamba_num_heads": 8,
            "mamba_head_dim": 16,
            "n_groups": 2,
            "ssm_state_size": 8,
            "chunk_size": 32,
            "moe_shared_expert_intermediate_size": 48,
            "moe_latent_size": 24,
        },
    ),
    "tiny-granite-hybrid": (
        "GraniteMoeHybrid",
        {
            "num_hidden_layers": 3,
            **_MAMBA2,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            **_LOCAL_EXPERTS,
            "shared_intermediate_size": 96,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.5,
            "attention_multiplier": 0.1,
            "logits_scaling": 2.0,
            "time_step_limit": (0.9, 1.1),
        },
    ),
    "tiny-lfm2": (
        "Lfm2",
        {"layer_types": ["conv", "full_attention", "conv", "conv"], "num_hidden_layers": 4, "conv_bias": True},
    ),
    "tiny-lfm2-moe": (
        "Lfm2Moe",
        {
            "layer_types": ["conv", "full_attention", "conv"],
            "num_hidden_layers": 3,
            **_EXPERTS,
            "num_dense_layers": 1,
            "routed_scaling_factor": 1.5,
        },
    ),
    "tiny-qwen3.5-moe": (
        "Qwen3_5MoeText",
        {**_HYBRID, **_THREE_SECTIONS, **_EXPERTS, "shared_expert_intermediate_size": 32},
    ),
    "tiny-qwen3-next": (
        "Qwen3Next",
        {**_HYBRID, "rope_parameters": _QUARTER_ROTARY, **_EXPERTS, "shared_expert_intermediate_size": 32},
    ),
    "tiny-axk1": ("AXK1", {"num_hidden_layers": 2, **_LATENT, **_GROUPED, "n_shared_experts": 1}),
    "tiny-deepseek-v2": (
        "DeepseekV2",
        {
            "num_hidden_layers": 2,
            **_LATENT,
            **_GROUPED,
            "q_lora_rank": None,
            "topk_method": "group_limited_greedy",
            "first_k_dense_replace": 1,
            "n_shared_experts": 2,
        },
    ),
    "tiny-deepseek-v3": (
        "DeepseekV3",
        {"num_hidden_layers": 2, **_LATENT, **_GROUPED, "first_k_dense_replace": 1, "n_shared_experts": 1},
    ),
    "tiny-glm4-moe-lite": ("Glm4MoeLite", {"num_hidden_layers": 2, **_LATENT, **_GROUPED, "n_shared_experts": 1}),
    "tiny-minicpm3": ("MiniCPM3", {"num_hidden_layers": 2, **_LATENT, "dim_model_base": 32, "pad_token_id": 0}),
    "tiny-mistral4": (
        "Mistral4",
        {"num_hidden_layers": 2, **_LATENT, **_GROUPED, "head_dim": 16, "n_shared_experts": 1},
    ),
    "tiny-youtu": ("Youtu", {"num_hidden_layers": 2, **_LATENT}),
    "tiny-gpt-oss": ("GptOss", {"num_hidden_layers": 2, **_MIXED, **_LOCAL_EXPERTS, "swiglu_limit": 0.02}),
    "tiny-afmoe": (
        "Afmoe",
        {
            "num_hidden_layers": 2,
            **_MIXED,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "num_shared_experts": 1,
            "num_dense_layers": 1,
            "route_scale": 1.5,
            "experts_implementation": "eager",
        },
    ),
    "tiny-exaone-moe": (
        "ExaoneMoe",
        {
            "num_hidden_layers": 2,
            **_MIXED,
            **{name: value for name, value in _GROUPED.items() if name != "n_routed_experts"},
            "num_experts": 8,
        },
    ),
    "tiny-granite-moe-swa": (
        "GraniteMoeSWA",
        {"num_hidden_layers": 2, **_MIXED, **_LOCAL_EXPERTS, "shared_intermediate_size": 32, "logits_scaling": 2.0},
    ),
    "tiny-laguna": (
        "Laguna",
        {
            "num_hidden_layers": 2,
            **_MIXED,
            **_EXPERTS,
            "shared_expert_intermediate_size": 32,
            "num_attention_heads_per_layer": [4, 6],
            "moe_routed_scaling_factor": 1.5,
            "moe_router_logit_softcapping": 0.9,
        },
    ),
    "tiny-mimo-v2": ("MiMoV2Flash", {"num_hidden_layers": 2, **_MIXED, **_GROUPED, "v_head_dim": 12}),
    "tiny-mellum": ("Mellum", {"num_hidden_layers": 2, **_MIXED, **_EXPERTS}),
    "tiny-mixtral": (
        "Mixtral",
        {"num_hidden_layers": 2, **_LOCAL_EXPERTS},
    ),
    "tiny-olmoe": ("Olmoe", {"num_hidden_layers": 2, **_EXPERTS, "intermediate_size": 32, "norm_topk_prob": False}),
    "tiny-qwen2-moe": ("Qwen2Moe", {"num_hidden_layers": 2, **_EXPERTS, "shared_expert_intermediate_size": 32}),
    "tiny-dots1": (
        "Dots1",
        {"num_hidden_layers": 2, **_GROUPED, "sliding_window": None, "first_k_dense_replace": 1, "n_shared_experts": 2},
    ),
    "tiny-ernie4.5-moe": (
        "Ernie4_5_Moe",
        {
            "num_hidden_layers": 3,
            "moe_num_experts": 8,
            "moe_k": 3,
            "moe_intermediate_size": 32,
            "moe_num_shared_experts": 2,
            "experts_implementation": "eager",
        },
    ),
    "tiny-flex-olmo": (
        "FlexOlmo",
        {"num_hidden_layers": 2, **_EXPERTS, "intermediate_size": 32, "norm_topk_prob": False, "pad_token_id": 0},
    ),
    "tiny-glm4-moe": (
        "Glm4Moe",
        {"num_hidden_layers": 2, **_GROUPED, "first_k_dense_replace": 1, "n_shared_experts": 1, "use_qk_norm": True},
    ),
    "tiny-granite-moe": ("GraniteMoe", {"num_hidden_layers": 2, **_LOCAL_EXPERTS, "attention_multiplier": 0.1}),
    "tiny-granite-moe-shared": (
        "GraniteMoeShared",
        {"num_hidden_layers": 2, **_LOCAL_EXPERTS, "attention_multiplier": 0.1, "shared_intermediate_size": 48},
    ),
    "tiny-hunyuan-moe": (
        "HunYuanMoEV1",
        {
            "num_hidden_layers": 2,
            "num_experts": 8,
            "moe_topk": 3,
            "intermediate_size": 32,
            "experts_implementation": "eager",
        },
    ),
    "tiny-hunyuan3": ("HYV3", {"num_hidden_layers": 2, **_EXPERTS, "num_shared_experts": 1}),
    "tiny-minimax-m2": ("MiniMaxM2", {"num_hidden_layers": 2, **_LOCAL_EXPERTS}),
    "tiny-solar": ("SolarOpen", {"num_hidden_layers": 2, **_GROUPED, "n_shared_experts": 1}),
    "tiny-qwen3-moe": ("Qwen3Moe", {"num_hidden_layers": 2, **_EXPERTS}),
}
"""Name -> (class stem in transformers, changes to the common config)."""
