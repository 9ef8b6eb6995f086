"""The rule by which kernels are chosen where nothing is named."""

import pytest
import torch
from transformers import GPT2Config

from harts.models import tiny_model
from harts.models.attach import find_backbone
from harts.models.describe import FamilyFacts, family_facts
from harts.models.kernel_choice import _choose, default_kernels
from harts.ops.kernels import Kernels
from harts.testing.shapes import QWEN3_5_4B

FASTEST = Kernels(
    gated_delta_rule="triton",
    causal_conv1d="triton",
    attention="fa4",
    row_logprobs="triton",
    chunk_rows=4096,
    min_rows=512,
)


def chosen(dtype: torch.dtype, **config: object) -> tuple[str, str, str]:
    from transformers import Qwen3_5TextConfig

    kernels = _choose(FASTEST, dtype, Qwen3_5TextConfig(**{**QWEN3_5_4B, **config}))
    assert (kernels.causal_conv1d, kernels.min_rows) == ("triton", 512)
    return kernels.gated_delta_rule, kernels.attention, kernels.row_logprobs


def test_each_op_runs_the_fastest_that_takes_the_model() -> None:
    assert chosen(torch.bfloat16) == ("triton", "fa4", "triton")
    assert chosen(torch.float16) == ("reference", "fa4", "triton")
    assert chosen(torch.float32) == ("reference", "reference", "triton")
    assert chosen(torch.float64) == ("reference", "reference", "chunked")
    assert chosen(torch.bfloat16, linear_key_head_dim=64) == ("reference", "fa4", "triton")
    assert chosen(torch.bfloat16, head_dim=20) == ("triton", "reference", "triton")
    assert chosen(torch.bfloat16, head_dim=512) == ("triton", "reference", "triton")


def test_models_without_linear_attention_or_a_head_size_have_a_choice_too() -> None:
    config = find_backbone(tiny_model("tiny-llama")).config
    assert _choose(FASTEST, torch.bfloat16, config) == FASTEST


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_cpu_runs_the_plain_ones(deterministic: bool) -> None:
    assert default_kernels(tiny_model("tiny-qwen3.5"), deterministic=deterministic) == Kernels(
        deterministic=deterministic
    )


def test_latent_attention_is_plain_on_a_gpu() -> None:
    """Its values are of another size than its keys."""
    config = tiny_model("tiny-deepseek-v3").config
    assert _choose(FASTEST, torch.bfloat16, config).attention == "reference"  # type: ignore[arg-type]


def test_facts_of_families_for_tables() -> None:
    def facts(name: str) -> FamilyFacts:
        return family_facts(tiny_model(name).config)

    hybrid, latent = facts("tiny-qwen3.5"), facts("tiny-deepseek-v3")
    assert (hybrid.mixers, hybrid.router) == (("attention", "gated delta rule"), None)
    assert hybrid.kernels == hybrid.mixers
    assert (latent.mixers, latent.kernels, latent.router) == (("latent attention",), (), "grouped sigmoid")
    windows = facts("tiny-olmo3")
    assert windows.mixers == ("attention", "sliding attention")
    assert windows.kernels == ("attention",)
    assert windows.model_type == "olmo3"
    with pytest.raises(ValueError, match=r"config: expected a model_type of .*, got 'gpt2'"):
        family_facts(GPT2Config())
