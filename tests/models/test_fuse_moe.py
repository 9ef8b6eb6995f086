"""Fused mixture-of-experts models: the same model, with the same routers, statistics and recorded routes."""

import dataclasses
import os
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from harts.layout import PackedTree, pack
from harts.models import RouterConfig, attach, detach, logprobs, recompute_activations, tiny_model
from harts.models.fuse import fuse, unfuse
from harts.ops.kernels import Kernels
from harts.testing.fp64 import all_fp64
from harts.testing.trees import AWKWARD, random_trajectories
from harts.trajectory import Trajectory
from harts.tree import PrefixTree

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
STEMS = {"tiny-qwen3.5-moe": "Qwen3_5Moe", "tiny-qwen3-next": "Qwen3Next", "tiny-qwen3-moe": "Qwen3Moe"}
WITH_SHARED = ["tiny-qwen3.5-moe", "tiny-qwen3-next"]
ROUTER = RouterConfig(scope="microbatch", balance_coefficient=0.1, z_coefficient=0.1, routes=True)


def with_routes(trajectories: list[Trajectory], layers: int) -> list[Trajectory]:
    """Experts by token and depth, so that common prefixes still merge; none for the last token."""
    done = []
    for trajectory in trajectories:
        routes = np.stack(
            [
                np.stack([np.random.default_rng([at, token, y]).permutation(8)[:3] for y in range(layers)])
                for at, token in enumerate(trajectory.token_ids.tolist())
            ]
        )
        routes[-1] = -1
        done.append(dataclasses.replace(trajectory, routes=routes))
    return done


def score(
    model: nn.Module, packed: PackedTree, kernels: Kernels | None = None
) -> tuple[Tensor, Any, dict[str, Tensor]]:
    """Log-probs, what the routers gave, and gradients of both."""
    model.zero_grad()
    scores = logprobs(model, packed, router=ROUTER, kernels=kernels or Kernels())
    values, router = scores.logprobs_N, scores.router
    assert router is not None
    weight_N = torch.randn(len(values), generator=torch.Generator().manual_seed(2)).to(values)
    ((values * weight_N).sum() + router.aux_loss()).backward()
    return values.detach(), router, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_equal(ours: Any, theirs: Any, tolerance: float) -> None:
    (values, router, grads), (expected, expected_router, expected_grads) = ours, theirs
    assert float((values - expected).abs().max()) < tolerance
    assert torch.equal(router.routes_YTK, expected_router.routes_YTK)
    assert torch.equal(router.statistics.load_YE, expected_router.statistics.load_YE)
    assert list(grads) == list(expected_grads)
    largest = max(float(each.norm()) for each in expected_grads.values())
    for name, grad in expected_grads.items():
        error = float((grads[name] - grad).norm()) / max(float(grad.norm()), 1e-6 * largest)
        assert error < tolerance, f"{name}: {error:.1e}"


@pytest.mark.parametrize("how", ["plain", "recomputed", "recorded routes, recomputed"])
@pytest.mark.parametrize("name", STEMS)
def test_fused_model_equals_eager_experts_in_fp64(name: str, how: str) -> None:
    model: Any = attach(tiny_model(name, dtype=torch.float64)).to(DEVICE)
    trajectories = random_trajectories(np.random.default_rng(3), num_trajectories=4, max_length=70)
    if "routes" in how:
        trajectories = with_routes(trajectories, len(model.model.layers))
    packed = pack(PrefixTree.build(trajectories), device=DEVICE)
    with all_fp64():
        expected = score(model, packed)
        fuse(model, impl="reference")
        if "recomputed" in how:
            recompute_activations(model)
        assert_equal(score(model, packed), expected, 1e-10)


@pytest.mark.parametrize("name", STEMS)
def test_kernels_equal_eager_experts(name: str) -> None:
    packed = pack(PrefixTree.build(AWKWARD["one-token branches"]), device=DEVICE)
    model = attach(tiny_model(name)).to(DEVICE)
    expected = score(model, packed)
    assert_equal(score(recompute_activations(fuse(model)), packed), expected, 1e-4)


@pytest.mark.parametrize("name", STEMS)
def test_dummy_rows_change_nothing(name: str) -> None:
    model = fuse(attach(tiny_model(name, dtype=torch.float64)).to(DEVICE), impl="reference")
    packed = pack(PrefixTree.build(AWKWARD["star"]), device=DEVICE)
    with all_fp64():
        expected = score(model, packed)
        assert_equal(score(model, packed, Kernels(min_rows=packed.num_rows + 37)), expected, 1e-10)


@pytest.mark.parametrize("name", STEMS)
def test_everything_is_swapped_and_swapped_back(name: str) -> None:
    model = tiny_model(name)
    tokens = torch.arange(12)[None]
    before, expected = [type(module) for module in model.modules()], model(tokens, use_cache=False).logits
    names = list(model.state_dict())
    fuse(attach(model), impl="reference")
    assert torch.allclose(model(tokens, use_cache=False).logits, expected, atol=1e-5)
    kinds = [type(module).__name__ for module in model.modules()]
    shared = name in WITH_SHARED  # only there is the block fused, and attention gated
    for kind in ("RMSNorm", "Experts", *(("RMSNormGated", "MLP", "Attention", "SparseMoeBlock") if shared else ())):
        assert f"{STEMS[name]}{kind}" not in kinds
        assert [each.__name__ for each in before].count(f"{STEMS[name]}{kind}") == kinds.count(
            f"Fused{STEMS[name]}{kind}"
        )
    assert list(model.state_dict()) == names
    detach(unfuse(model) if shared else model)
    assert [type(module) for module in model.modules()] == before
    assert torch.equal(model(tokens, use_cache=False).logits, expected)


@pytest.mark.parametrize("name", WITH_SHARED)
def test_a_broken_shared_gate_is_noticed(name: str) -> None:
    """The twin: the shared expert's gate matters at the tolerance of the laws above."""
    packed = pack(PrefixTree.build(AWKWARD["star"]), device=DEVICE)
    model: Any = fuse(attach(tiny_model(name)).to(DEVICE), impl="reference")
    expected = logprobs(model, packed)
    model.model.layers[-1].mlp.shared_expert_gate.weight.data.mul_(-1)
    assert float((logprobs(model, packed) - expected).detach().abs().max()) > 1e-4


def test_lora_on_experts_runs_and_on_the_shared_gate_is_refused() -> None:
    peft = pytest.importorskip("peft")
    packed = pack(PrefixTree.build(AWKWARD["star"]), device=DEVICE)
    config = peft.LoraConfig(
        r=2,
        target_modules=["out_proj"],
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        init_lora_weights=False,
    )
    lora = attach(peft.get_peft_model(tiny_model("tiny-qwen3.5-moe", num_hidden_layers=2).to(DEVICE), config))
    expected = logprobs(lora, packed)
    for impl in ("reference", "triton"):
        fused_values = logprobs(fuse(lora, impl=impl), packed)
        assert torch.allclose(fused_values, expected, atol=1e-5)
        unfuse(lora)
    fuse(lora, impl="reference")
    logprobs(lora, packed).sum().backward()
    grads = [p.grad for n, p in lora.named_parameters() if "experts" in n and "lora" in n]
    assert len(grads) == 8
    assert all(grad is not None and grad.any() for grad in grads)
    config = peft.LoraConfig(r=2, target_modules=["shared_expert_gate"])
    lora = fuse(
        attach(peft.get_peft_model(tiny_model("tiny-qwen3.5-moe", num_hidden_layers=2).to(DEVICE), config)),
        impl="reference",
    )
    with pytest.raises(ValueError, match="leave it out of LoRA"):
        logprobs(lora, packed)
