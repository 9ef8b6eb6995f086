"""Models that a tree cannot run rightly: each is refused by name, when it is attached or put into training mode."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import harts
from harts.models import tiny_model
from harts.models.saved import load_saved
from harts.testing.trees import AWKWARD
from harts.tree import PrefixTree

PACKED = harts.pack(PrefixTree.build(AWKWARD["star"]))
HYBRID, DENSE, EXPERTS = "tiny-qwen3.5", "tiny-qwen3", "tiny-qwen3-moe"


# -- configs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("preset", "settings", "message"),
    [
        (HYBRID, {"linear_conv_kernel_dim": 5}, r"config\.linear_conv_kernel_dim = 5 is not supported; .* at most 4"),
        (HYBRID, {"hidden_act": "gelu"}, r"config\.hidden_act = 'gelu' is not supported; .* 'silu' or 'swish'"),
        ("tiny-qwen3-next", {"num_experts": 0}, r"config\.num_experts = 0 is not supported for qwen3_next"),
        ("tiny-qwen3.5-moe", {"num_experts": 0}, r"config\.num_experts = 0 is not supported for qwen3_5_moe_text"),
        (EXPERTS, {"num_experts": 0}, r"config\.num_experts = 0 is not supported for qwen3_moe"),
        (EXPERTS, {"num_experts_per_tok": 9}, r"config\.num_experts_per_tok = 9: expected a number from 1 to .* = 8"),
        (HYBRID, {"linear_num_value_heads": 3}, r"config\.linear_num_value_heads = 3: expected a multiple of .* = 2"),
        ("tiny-bamba", {"mamba_d_conv": 5}, r"config\.mamba_d_conv = 5 is not supported; .* at most 4"),
        ("tiny-bamba", {"hidden_act": "gelu"}, r"config\.hidden_act = 'gelu' is not supported; .* 'silu' or 'swish'"),
        (
            "tiny-bamba",
            {"mamba_n_groups": 3, "mamba_n_heads": 8},
            r"mamba_n_heads: expected a multiple of .* = 3, got 8",
        ),
        (DENSE, {"num_key_value_heads": 3}, r"config\.num_attention_heads = 4: expected a multiple of .* = 3"),
    ],
)
def test_options_that_the_ops_do_not_have_are_refused_at_attach(preset: str, settings: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        harts.attach(tiny_model(preset, **settings))


@pytest.mark.parametrize(
    ("preset", "settings"),
    [
        (HYBRID, {"linear_conv_kernel_dim": 2}),
        (HYBRID, {"hidden_act": "swish"}),
        (DENSE, {"hidden_act": "gelu"}),  # only linear attention has it inside
        (HYBRID, {"hidden_act": "gelu", "layer_types": ["full_attention"] * 4}),
        (EXPERTS, {"mlp_only_layers": [0, 1]}),
        ("tiny-granite-hybrid", {"num_local_experts": 0}),
        (DENSE, {"return_dict": False}),
    ],
)
def test_options_that_they_have_run(preset: str, settings: Any) -> None:
    assert harts.logprobs(harts.attach(tiny_model(preset, **settings)), PACKED).isfinite().all()


def test_a_head_of_adapters_is_refused_at_attach() -> None:
    peft = pytest.importorskip("peft")
    lora = peft.get_peft_model(tiny_model(DENSE), peft.LoraConfig(r=2, target_modules=["q_proj", "lm_head"]))
    with pytest.raises(ValueError, match="leave the head out"):
        harts.attach(lora)


def adapters(peft: Any, kind: str) -> Any:
    common = {"task_type": "CAUSAL_LM", "target_modules": ["q_proj"], "r": 2}
    return {
        "aLoRA": lambda: peft.LoraConfig(**common, alora_invocation_tokens=[1, 2]),
        "POLY": lambda: peft.PolyConfig(**common, n_tasks=2),
        "prompt learning": lambda: peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2),
    }[kind]()


@pytest.mark.parametrize("kind", ["aLoRA", "POLY", "prompt learning"])
def test_adapters_that_need_the_forward_of_peft_are_refused_at_attach_and_at_logprobs(kind: str) -> None:
    peft = pytest.importorskip("peft")
    model = harts.attach(tiny_model(DENSE))
    lora = peft.get_peft_model(model, adapters(peft, kind))
    for call in (harts.attach, lambda each: harts.logprobs(each, PACKED)):
        with pytest.raises(ValueError, match=kind):
            call(lora)


# -- draws and statistics of a batch -----------------------------------------------------------------------------------


class StochasticDepthOfSomeone(nn.Module):
    """As vision libraries have it."""

    def __init__(self, drop_prob: float) -> None:
        super().__init__()
        self.drop_prob = drop_prob

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Drops whole rows."""
        return x * (torch.rand(x.shape[:-1]) >= self.drop_prob).to(x)[..., None] if self.training else x


class Transposed(nn.Module):
    """A module for [batch, channels, places] in a model of [batch, places, channels]."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[1, F, D] -> [1, F, D]."""
        return self.inner(x.mT).mT  # type: ignore[no-any-return]


def rate_of_its_own(module: nn.Module) -> nn.Module:
    module.dropout = 0.1  # type: ignore[assignment]
    return module


DRAWS: dict[str, tuple[Callable[[], nn.Module], Callable[[], nn.Module] | None]] = {
    "Dropout with p=0.5": (nn.Dropout, lambda: nn.Dropout(0)),
    "Dropout1d with p=0.5": (nn.Dropout1d, lambda: nn.Dropout1d(0)),
    "Dropout2d with p=0.5": (nn.Dropout2d, lambda: nn.Dropout2d(0)),
    "Dropout3d with p=0.5": (nn.Dropout3d, lambda: nn.Dropout3d(0)),
    "AlphaDropout with p=0.1": (lambda: nn.AlphaDropout(0.1), lambda: nn.AlphaDropout(0)),
    "FeatureAlphaDropout with p=0.1": (lambda: nn.FeatureAlphaDropout(0.1), lambda: nn.FeatureAlphaDropout(0)),
    "RReLU draws its slopes": (nn.RReLU, lambda: nn.RReLU(0.2, 0.2)),
    "StochasticDepthOfSomeone": (lambda: StochasticDepthOfSomeone(0.2), lambda: StochasticDepthOfSomeone(0)),
    "Identity with dropout=0.1": (lambda: rate_of_its_own(nn.Identity()), nn.Identity),
    "normalises over the rows of a batch (BatchNorm1d)": (lambda: Transposed(nn.BatchNorm1d(64)), None),
}


@pytest.mark.parametrize("what", DRAWS)
def test_modules_that_draw_or_normalise_over_a_batch_are_refused_in_training_mode(what: str) -> None:
    active, harmless = DRAWS[what]
    model: Any = harts.attach(tiny_model(DENSE))
    model.model.layers[0].mlp = nn.Sequential(model.model.layers[0].mlp, active())
    harts.logprobs(model.eval(), PACKED)
    with pytest.raises(ValueError) as caught:
        harts.logprobs(model.train(), PACKED)
    assert what in str(caught.value)
    assert "model.layers.0.mlp.1" in str(caught.value)
    if harmless is not None:
        model.model.layers[0].mlp[1] = harmless().train()
        harts.logprobs(model, PACKED)


@pytest.mark.parametrize("kind", ["BatchNorm1d", "InstanceNorm1d"])
def test_statistics_of_the_batch_are_refused_in_evaluation_too_where_they_are_used_there(kind: str) -> None:
    model: Any = harts.attach(tiny_model(DENSE))
    norm = getattr(nn, kind)(64, track_running_stats=False)
    model.model.layers[0].mlp = nn.Sequential(model.model.layers[0].mlp, Transposed(norm))
    with pytest.raises(ValueError, match=rf"normalises over the rows of a batch \({kind}\)"):
        harts.logprobs(model.eval(), PACKED)


def test_noise_on_embeddings_is_refused_in_training_mode() -> None:
    from transformers.integrations.neftune import neftune_post_forward_hook

    model: Any = harts.attach(tiny_model(DENSE))
    model.model.embed_tokens.neftune_noise_alpha = 5.0
    handle = model.model.embed_tokens.register_forward_hook(neftune_post_forward_hook)
    harts.logprobs(model.eval(), PACKED)
    with pytest.raises(ValueError, match=r"model\.embed_tokens: Embedding with noise \(neftune_noise_alpha=5\.0\)"):
        harts.logprobs(model.train(), PACKED)
    handle.remove()
    harts.logprobs(model, PACKED)


@pytest.mark.parametrize("name", ["rank_dropout", "module_dropout"])
def test_dropout_that_adapters_keep_as_a_number_is_refused(name: str) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoHaConfig(r=2, target_modules=["q_proj"], **{name: 0.5})
    model = harts.attach(peft.get_peft_model(tiny_model(DENSE), config))
    harts.logprobs(model.eval(), PACKED)
    with pytest.raises(ValueError, match=rf"q_proj.*with {name}="):
        harts.logprobs(model.train(), PACKED)


def test_adapters_that_sample_are_refused_where_they_do() -> None:
    peft = pytest.importorskip("peft")
    model = harts.attach(peft.get_peft_model(tiny_model(DENSE), peft.PveraConfig(r=2, target_modules=["q_proj"])))
    harts.logprobs(model.eval(), PACKED)
    with pytest.raises(ValueError, match=r"q_proj.* of PVeRA, which samples"):
        harts.logprobs(model.train(), PACKED)


# -- models from directories -------------------------------------------------------------------------------------------


def test_a_model_of_a_hub_is_not_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"model 'ORG/NAME': expected a directory or .* HARTS fetches nothing"):
        load_saved("ORG/NAME", dtype=torch.float32)


def test_code_of_a_directory_is_never_run(tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    settings = {"model_type": "mine", "auto_map": {"AutoConfig": "code.C", "AutoModelForCausalLM": "code.M"}}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    (tmp_path / "code.py").write_text(f"open({str(ran)!r}, 'w').close()\n")
    with pytest.raises(ValueError, match="one that brings its own code, which HARTS never runs"):
        load_saved(tmp_path, dtype=torch.float32)
    assert not ran.exists()


def test_a_directory_that_is_damaged_is_refused_by_name(tmp_path: Path) -> None:
    tiny_model(DENSE).save_pretrained(tmp_path)  # type: ignore[operator]
    whole = load_saved(tmp_path, dtype=torch.float32)
    assert not whole.training
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ValueError, match=rf"model '{tmp_path}': cannot load it \(.*\); pass a folder"):
        load_saved(tmp_path, dtype=torch.float32)
    (tmp_path / "config.json").unlink()
    with pytest.raises(ValueError, match=rf"model '{tmp_path}': cannot load it"):
        load_saved(tmp_path, dtype=torch.float32)


def test_weights_that_are_not_there_are_not_made_up(tmp_path: Path) -> None:
    model = tiny_model(DENSE)
    weights = {name: value for name, value in model.state_dict().items() if "layers.1.mlp" not in name}
    model.save_pretrained(tmp_path, state_dict=weights)  # type: ignore[operator]
    with pytest.raises(ValueError, match=r"got none for model\.layers\.1\.mlp\.down_proj\.weight and 2 others"):
        load_saved(tmp_path, dtype=torch.float32)


def test_dropout_of_residuals_is_refused() -> None:
    model = harts.attach(tiny_model("tiny-qwen3")).train()
    model.get_submodule("model.layers.0.mlp").residual_dropout = 0.1  # type: ignore[assignment]
    with pytest.raises(ValueError, match=r"layers\.0\.mlp: .* with residual_dropout=0\.1"):
        harts.logprobs(model, [harts.Trajectory(token_ids=[1, 2], loss_mask=[0, 1])])
