"""Counts of a tree against rows counted one by one, and FLOPs against the models' parameters."""

import math
from typing import Any

import numpy as np
import pytest

from harts.blocks import Blocks
from harts.cost import Coefficients, Counts, count, count_trained_rows
from harts.flops import flop_limit, flops, forward_flops, model_identity
from harts.testing.trees import AWKWARD, random_trajectories
from harts.trajectory import Trajectory
from harts.tree import PrefixTree

QWEN3 = {
    "model_type": "qwen3", "vocab_size": 1000, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
}  # fmt: skip
HYBRID = {
    **QWEN3, "model_type": "qwen3_5_text", "num_hidden_layers": 4, "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 8, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}  # fmt: skip
EXPERTS = {**QWEN3, "model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24}


def counted_one_by_one(tree: PrefixTree, window: int | None = None) -> Counts:
    blocks = Blocks.of_tree(tree)
    heads = {
        (int(rows[position - 1]), trajectory.temperature)
        for index, trajectory in enumerate(tree.trajectories)
        for rows in [tree.rows_of(index)]
        for position in np.flatnonzero(trajectory.loss_mask)
    }
    return Counts(
        rows=tree.num_rows,
        pairs=sum(int(depth) + 1 for depth in tree.depth_T),
        window_pairs=0 if window is None else sum(min(int(depth) + 1, window) for depth in tree.depth_T),
        linear_rows=tree.num_rows + blocks.replayed_rows,
        trained_rows=len(heads),
        chains=blocks.chains.num_chains,
        gathered_keys=int(blocks.chains.length_C.sum()),
        microbatches=1,
        window=window,
    )


def test_counts_equal_rows_counted_one_by_one() -> None:
    rng = np.random.default_rng(0)
    for batch in [*AWKWARD.values(), *[random_trajectories(rng, num_trajectories=10) for _ in range(30)]]:
        tree = PrefixTree.build(batch)
        assert count(tree) == counted_one_by_one(tree)
        for window in (1, 64, 10_000):
            assert count(tree, window) == counted_one_by_one(tree, window)


def test_siblings_of_other_temperatures_do_not_share_the_head() -> None:
    def one(last: int, temperature: float) -> Trajectory:
        mask = np.array([False, False, True])
        return Trajectory(token_ids=np.array([1, 2, last]), loss_mask=mask, temperature=temperature)

    assert count_trained_rows(PrefixTree.build([one(3, 1.0), one(4, 1.0)])) == 1
    assert count_trained_rows(PrefixTree.build([one(3, 1.0), one(4, 0.5)])) == 2


def test_counts_add_up() -> None:
    total = Counts(rows=3, pairs=6, linear_rows=5, microbatches=1) + Counts(rows=1, pairs=1, linear_rows=1, chains=2)
    assert total == Counts(rows=4, pairs=7, linear_rows=6, chains=2, microbatches=1)
    assert total.replayed_rows == 2
    assert total.without_replay().linear_rows == 4
    both = Counts(rows=1, window_pairs=3, window=2) + Counts(window_pairs=4, window=2)
    assert (both.window_pairs, both.window) == (7, 2)
    with pytest.raises(ValueError, match="counts: expected those of one window, got 2 and None"):
        _ = both + Counts(rows=1)


def test_flops_of_a_dense_model_by_hand() -> None:
    forward = forward_flops(QWEN3)
    attention = 64 * 128 + 2 * 64 * 64 + 128 * 64
    assert forward.rows == 2 * 2 * (attention + 3 * 64 * 96)
    assert forward.pairs == 2 * 4 * 128
    assert forward.trained_rows == 2 * 64 * 1000
    assert forward.linear_rows == 0


def test_a_window_caps_the_pairs() -> None:
    tree = PrefixTree.build(AWKWARD["comb"])
    windowed = {**QWEN3, "layer_types": ["full_attention", "sliding_attention"], "sliding_window": 9}
    forward = forward_flops(windowed)
    assert (forward.pairs, forward.window_pairs, forward.window) == (4 * 128, 4 * 128, 9)
    assert forward_flops({**QWEN3, "sliding_window": 9}).window_pairs == 2 * 4 * 128  # every layer's
    depth_T = tree.depth_T.astype(np.int64)
    less = 4 * 128 * int((depth_T + 1 - np.minimum(depth_T + 1, 9)).sum())
    assert flops(QWEN3, tree, backward=False) - flops(windowed, tree, backward=False) == less
    kept = flops(windowed, tree, recompute=True) - flops(windowed, tree, recompute=True, keep_attention=True)
    assert kept == 4 * 128 * int((depth_T + 1 + np.minimum(depth_T + 1, 9)).sum())
    assert model_identity(windowed) != model_identity({**windowed, "sliding_window": 10})
    with pytest.raises(ValueError, match="counts: expected those of window 9, got window None"):
        flops(windowed, count(tree))
    with pytest.raises(ValueError, match=r"field window: expected an integer >= 1, got None"):
        Coefficients(window_pairs=1.0)
    with pytest.raises(ValueError, match="coefficients: expected those of one window, got 9 and 10"):
        _ = Coefficients(window=9) + Coefficients(window=10)
    assert Coefficients(rows=1.0) + Coefficients(rows=2.0, window=9) == Coefficients(rows=3.0, window=9)


def test_flops_of_a_hybrid_model_by_hand() -> None:
    forward = forward_flops(HYBRID)
    keys, values = 32, 32
    linear = 2 * 64 * (2 * keys + 2 * values + 2 * 4) + 2 * values * 64 + 2 * 4 * (2 * keys + values)
    attention = 2 * 64 * (2 * 128 + 2 * 64) + 2 * 128 * 64  # queries and their gate, keys and values, output
    assert forward.rows == 3 * linear + attention + 4 * 6 * 64 * 96
    assert forward.linear_rows == 3 * 4 * (2 * 64 * (3 * 16 + 2 * 8) + 6 * 16 * 8)
    assert forward.pairs == 4 * 128


def test_flops_of_experts_count_the_chosen_ones() -> None:
    dense, sparse = forward_flops(QWEN3), forward_flops(EXPERTS)
    assert sparse.rows - dense.rows == 2 * (6 * 64 * 2 * 24 + 2 * 64 * 8 - 6 * 64 * 96)
    alternating = {**EXPERTS, "decoder_sparse_step": 2}
    assert forward_flops(alternating).rows == (sparse.rows + dense.rows) / 2
    assert forward_flops({**EXPERTS, "mlp_only_layers": [0]}).rows == (sparse.rows + dense.rows) / 2


DENSE = "Qwen3_5Text,Qwen3,Llama,Mistral,Qwen2,Olmo2,Arcee,Ernie4_5,Gemma,Glm,Glm4,Granite,Helium,HunYuanDenseV1,"
DENSE += "Ministral3,Olmo,Phi3,SeedOss,SmolLM3,Starcoder2,Cohere2,Cwm,Exaone4,Gemma2,Gemma3Text,GraniteSWA,Ministral,"
DENSE += "MiniCPM3,Youtu,Olmo3,VaultGemma,Bamba,FalconH1,GraniteMoeHybrid,OlmoHybrid,Cohere,NanoChat,Phi"


DENSE_OPTIONS: dict[str, dict[str, Any]] = {
    "Bamba": {"attn_layer_indices": [1]},
    "FalconH1": {"mamba_d_ssm": 2048},
    "GraniteMoeHybrid": {"num_local_experts": 0, "layer_types": ["linear_attention"] * 3 + ["full_attention"]},
}


@pytest.mark.parametrize("stem", DENSE.split(","))
def test_flops_per_row_are_twice_the_parameters(stem: str) -> None:
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    options = DENSE_OPTIONS.get(stem, {})
    config: Any = getattr(transformers, f"{stem}Config")(num_hidden_layers=4, tie_word_embeddings=False, **options)
    if getattr(config, "head_dim", 0) is None:  # Hunyuan's class has no default
        config.head_dim = config.hidden_size // config.num_attention_heads
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    matrices = [p for key, p in model.named_parameters() if p.dim() >= 2 and "embed" not in key]
    forward = forward_flops(config)
    assert forward.rows + forward.trained_rows == 2 * sum(p.numel() for p in matrices)
    assert forward_flops(config.to_dict()) == forward
    assert model_identity(config.to_dict()) == model_identity(config)


SPARSE: dict[str, dict[str, Any]] = {
    "Qwen3Moe": {},
    "Qwen2Moe": {},
    "Qwen3Next": {"mlp_only_layers": [1]},
    "Lfm2Moe": {"layer_types": ["conv", "full_attention", "conv", "full_attention"]},
    "BailingHybrid": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "KimiLinear": {},
    "MiniMax": {},
    "Mixtral": {},
    "NemotronH": {"layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"], "moe_latent_size": 512},
    "Olmoe": {},
    "AXK1": {},
    "DeepseekV2": {"q_lora_rank": None, "n_routed_experts": 16, "num_experts_per_tok": 4},
    "DeepseekV3": {},
    "Glm4MoeLite": {},
    "Mistral4": {},
    "Afmoe": {},
    "ExaoneMoe": {},
    "GptOss": {},
    "GraniteMoeSWA": {"shared_intermediate_size": 512},
    "Laguna": {
        "layer_types": 2 * ["full_attention", "sliding_attention"],
        "num_attention_heads_per_layer": [8, 16] * 2,
    },
    "Mellum": {},
    "MiMoV2Flash": {"n_routed_experts": 16},
    "Dots1": {"n_routed_experts": 16, "n_shared_experts": 2, "num_experts_per_tok": 4, "first_k_dense_replace": 2},
    "Ernie4_5_Moe": {},
    "FlexOlmo": {},
    "Glm4Moe": {},
    "GraniteMoe": {},
    "GraniteMoeHybrid": {},
    "GraniteMoeShared": {"shared_intermediate_size": 512},
    "HunYuanMoEV1": {"num_experts": 16, "moe_topk": 4, "head_dim": 128},
    "HYV3": {},
    "MiniMaxM2": {},
    "SolarOpen": {},
}


@pytest.mark.parametrize("stem", list(SPARSE))
def test_flops_per_row_of_a_mixture_are_twice_the_parameters_that_a_row_meets(stem: str) -> None:
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    config: Any = getattr(transformers, f"{stem}Config")(num_hidden_layers=4, tie_word_embeddings=False, **SPARSE[stem])
    with torch.device("meta"):
        model = getattr(transformers, f"{stem}ForCausalLM")(config)
    expected = 0.0
    for name, parameter in model.named_parameters():
        if parameter.dim() >= 2 and not any(part in name for part in ("embed", "moe_statics", "proj_bias", "A_log")):
            share = 1.0
            if ".experts." in name:  # [experts, out, in]
                share = (config.to_dict().get("moe_topk") or config.num_experts_per_tok) / len(parameter)
            expected += 2 * share * parameter.numel()
    forward = forward_flops(config)
    assert forward.rows + forward.trained_rows == pytest.approx(expected, rel=1e-12)
    assert forward_flops(config.to_dict()) == forward
    assert model_identity(config.to_dict()) == model_identity(config)


def test_flops_of_latent_attention_by_hand() -> None:
    sizes = {"q_lora_rank": 8, "kv_lora_rank": 16, "qk_nope_head_dim": 12, "qk_rope_head_dim": 4, "v_head_dim": 10}
    forward = forward_flops({**QWEN3, **sizes, "head_dim": 4})
    queries = 64 * 8 + 8 * 4 * 16
    keys_and_values = 64 * (16 + 4) + 16 * 4 * (12 + 10)
    assert forward.rows == 2 * 2 * (queries + keys_and_values + 4 * 10 * 64 + 3 * 64 * 96)
    assert forward.pairs == 2 * 2 * 4 * (16 + 10)


def test_layers_of_a_mixture_must_have_one_size() -> None:
    with pytest.raises(ValueError, match=r"num_experts_per_tok: expected an integer >= 1, got .2, 3.; all layers"):
        forward_flops({**EXPERTS, "num_experts_per_tok": [2, 3]})


def test_backward_and_recomputation_multiply_the_forward() -> None:
    tree = PrefixTree.build(AWKWARD["comb"])
    forward = flops(HYBRID, tree, backward=False)
    assert flops(HYBRID, tree) == 3 * forward
    assert flops(HYBRID, tree, recompute=True) == 4 * forward
    assert flops(HYBRID, tree, backward=False, recompute=True) == forward
    replayed = count(tree).replayed_rows * forward_flops(HYBRID).linear_rows
    assert flops(HYBRID, tree, backward=False, replayed=True) == pytest.approx(forward + replayed)


def test_flop_limit_lies_below_the_ratio_of_rows_when_the_head_is_not_shared() -> None:
    trajectories = AWKWARD["star"]
    tree, separate = PrefixTree.build(trajectories), PrefixTree.build(trajectories, share="none")
    limit = flop_limit(HYBRID, separate, tree)
    assert 1 < limit < tree.sharing
    rows_only = Coefficients(rows=1.0)
    assert rows_only.of(count(separate)) / rows_only.of(count(tree)) == tree.sharing
    assert flop_limit(HYBRID, tree, tree) == 1


def test_identity_tells_models_apart_and_reads_the_text_part() -> None:
    assert model_identity({"text_config": HYBRID, "vision_config": {}}) == model_identity(HYBRID)
    assert model_identity(HYBRID).startswith("qwen3_5_text 4x64 ")
    assert model_identity({**HYBRID, "intermediate_size": 97}) != model_identity(HYBRID)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": None}, "hidden_size: expected an integer >= 1, got None"),
        ({"vocab_size": 0}, "vocab_size"),
        ({"layer_types": ["full_attention", "chunked_attention"]}, "chunked_attention"),
        (
            {"layer_types": ["full_attention", "sliding_attention"]},
            "sliding_window: expected an integer >= 1",
        ),
        ({"layer_types": ["full_attention"]}, "1 of them for 2 layers"),
        ({"layer_types": ["linear_attention"] * 2}, "linear_key_head_dim"),
    ],
)
def test_configs_that_say_too_little_are_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        forward_flops({**QWEN3, **change})


def test_coefficients_are_never_negative() -> None:
    for value in (-1.0, math.nan, math.inf, "1"):
        with pytest.raises(ValueError, match="coefficient rows: expected a finite number >= 0"):
            Coefficients(rows=value)  # type: ignore[arg-type]
