"""A microbatch filled up with dummy rows is the same one: values, gradients, statistics; and nothing sees them."""

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor, nn

import harts
from harts.mixers import attention as attention_module
from harts.mixers import gated_delta_rule as delta_module
from harts.models import PRESETS, RouterConfig, row_floor, tiny_model
from harts.models.attach import find_backbone
from harts.models.fuse import fuse
from harts.models.recompute import recompute_activations
from harts.models.row_floor import cut_rows, fill_rows, repeat_first
from harts.ops.kernels import Kernels
from harts.testing.fp64 import all_fp64
from harts.testing.trees import AWKWARD, random_trajectories, trajectories_strategy
from harts.trajectory import Trajectory
from harts.tree import PrefixTree

HYBRID, EXPERTS = "tiny-qwen3.5", "tiny-qwen3.5-moe"
FP64: dict[str, Any] = {"dtype": torch.float64}
ROUTERS = RouterConfig(scope="microbatch", balance_coefficient=0.5, z_coefficient=0.1, routes=True)

Grads = dict[str, Tensor]


def pack(trajectories: list[Trajectory]) -> harts.PackedTree:
    return harts.pack(PrefixTree.build(trajectories))


def score(
    model: nn.Module, packed: harts.PackedTree, min_rows: int, router: RouterConfig | None = None
) -> tuple[Tensor, Grads, Any]:
    """Log-probs and entropies, gradients of a weighted sum of them and of auxiliary losses, and the routers' output."""
    kernels = Kernels(min_rows=min_rows)
    scores: Any = harts.logprobs(model, packed, entropy=True, kernels=kernels, router=router)
    values = torch.stack([scores.logprobs_N, scores.entropy_N])
    weight = torch.randn(values.shape, dtype=values.dtype, generator=torch.Generator().manual_seed(1))
    loss = (values * weight).sum()
    if router is not None:
        loss = loss + scores.router.aux_loss()
    model.zero_grad(set_to_none=True)
    loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return values.detach(), grads, scores.router


def assert_same(ours: tuple[Tensor, Grads, Any], plain: tuple[Tensor, Grads, Any]) -> None:
    assert float((ours[0] - plain[0]).abs().max()) < 1e-12
    assert ours[1].keys() == plain[1].keys()
    largest = max(float(grad.abs().max()) for grad in plain[1].values())
    for name, grad in plain[1].items():
        scale = max(float(grad.abs().max()), 1e-3 * largest)
        assert float((ours[1][name] - grad).abs().max()) <= 1e-12 * scale, name
    if plain[2] is not None:
        assert torch.equal(ours[2].routes_YTK, plain[2].routes_YTK)
        for field in ("load_UYE", "physical_YE", "tokens_U"):
            assert torch.equal(getattr(ours[2].statistics, field), getattr(plain[2].statistics, field)), field


# -- the law -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize("name", list(PRESETS))
def test_values_gradients_and_statistics_are_those_without(name: str, recomputed: bool) -> None:
    packed = pack(random_trajectories(np.random.default_rng(4), num_trajectories=5, max_length=70))
    with all_fp64():
        model = harts.attach(tiny_model(name, **FP64))
        router = ROUTERS if find_backbone(model).family.router else None
        plain = score(model, packed, 1, router)
        if recomputed:
            recompute_activations(model)
        assert_same(score(model, packed, packed.num_rows + 100, router), plain)


def test_random_trees_of_a_hybrid_model() -> None:
    with all_fp64():
        model = harts.attach(
            tiny_model(HYBRID, num_hidden_layers=2, layer_types=["linear_attention", "full_attention"], **FP64)
        )

        @settings(deadline=None, max_examples=10)
        @given(trajectories_strategy(max_trajectories=4, max_length=65))
        def check(trajectories: list[Trajectory]) -> None:
            packed = pack(trajectories)
            assert_same(score(model, packed, 140), score(model, packed, 1))

        check()


@pytest.mark.parametrize("name", [HYBRID, EXPERTS])
def test_fused_models(name: str) -> None:
    packed = pack(AWKWARD["one-token branches"])
    model = fuse(harts.attach(tiny_model(name)), impl="reference")
    ours, plain = score(model, packed, 200), score(model, packed, 1)
    assert torch.allclose(ours[0], plain[0], atol=1e-5)
    for key, grad in plain[1].items():
        assert torch.allclose(ours[1][key], grad, atol=1e-4 * float(grad.abs().max())), key


def test_lora() -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(
        r=4, target_modules=["in_proj_qkv", "out_proj", "q_proj", "o_proj"], init_lora_weights=False
    )
    torch.manual_seed(0)
    model = harts.attach(peft.get_peft_model(tiny_model(HYBRID, **FP64), config))
    packed = pack(AWKWARD["one-token branches"])
    with all_fp64():
        ours, plain = score(model, packed, 200), score(model, packed, 1)
    assert plain[1]
    assert all("lora" in name for name in plain[1])
    assert_same(ours, plain)


def test_forced_and_exact_routes() -> None:
    trajectories = random_trajectories(np.random.default_rng(4), num_trajectories=4, max_length=50)
    rng = np.random.default_rng(0)
    recorded = [
        dataclasses.replace(each, routes=rng.permuted(np.tile(np.arange(8), (len(each), 2, 1)), axis=-1)[:, :, :3])
        for each in trajectories
    ]
    model = harts.attach(tiny_model("tiny-qwen3-moe", **FP64))
    for batch, exact in ((recorded, False), (recorded, True), (trajectories, True)):
        packed, router = pack(batch), dataclasses.replace(ROUTERS, exact=exact)
        with all_fp64():
            plain = score(model, packed, 1, router)
            assert_same(score(model, packed, packed.num_rows + 50, router), plain)
        assert plain[2].statistics.physical_YE.sum(1).tolist() == [3 * packed.num_rows] * 2


# -- what dummy rows touch -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("fused", [False, True])
def test_no_tree_op_runs_on_dummy_rows_and_no_gradient_reaches_them(
    monkeypatch: pytest.MonkeyPatch, fused: bool
) -> None:
    packed = pack(AWKWARD["one-token branches"])
    rows, floor = packed.num_rows, packed.num_rows + 30
    model: Any = harts.attach(tiny_model(EXPERTS))
    if fused:
        fuse(model, impl="reference")
    seen: list[int] = []
    for owner, name in (
        (attention_module, "attention"),
        (delta_module, "causal_conv1d"),
        (delta_module, "gated_delta_rule_and_states"),
    ):
        op = getattr(owner, name)

        def spy(x: Tensor, *args: Any, op: Any = op, **kwargs: Any) -> Tensor:
            seen.append(len(x))
            result: Tensor = op(x, *args, **kwargs)
            return result

        monkeypatch.setattr(owner, name, spy)
    mixed: list[Tensor] = []
    hidden: list[Tensor] = []
    for layer in model.model.layers:
        projection = layer.self_attn.o_proj if hasattr(layer, "self_attn") else layer.linear_attn.out_proj
        projection.register_forward_pre_hook(lambda module, args: mixed.append(args[0].detach().flatten(0, -2)))
        layer.register_forward_hook(lambda module, args, output: hidden.append(output))
    for module in model.model.modules():
        module.register_forward_hook(check_finite)
    values = harts.logprobs(model, packed, kernels=Kernels(min_rows=floor))
    for output in hidden:
        output.retain_grad()
    values.sum().backward()
    assert seen == [rows] * (3 * 2 + 1)  # three layers with a convolution and a recurrence, one with attention
    for x_FX in mixed:
        assert len(x_FX) == floor
        assert (x_FX[:rows] != 0).any()
        assert (x_FX[rows:] == 0).all()
    assert len(hidden) == 4
    for output in hidden:
        assert output.shape[1] == floor
        assert output.grad is not None
        assert (output.grad[:, :rows] != 0).any()
        assert (output.grad[:, rows:] == 0).all()
    assert all(bool(p.grad.isfinite().all()) for p in model.parameters() if p.grad is not None)


def check_finite(module: nn.Module, args: Any, output: Any) -> None:
    for tensor in output if isinstance(output, tuple) else (output,):
        if isinstance(tensor, Tensor):
            assert tensor.isfinite().all(), module


def test_large_microbatches_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = pack(AWKWARD["star"])
    model = harts.attach(tiny_model(EXPERTS))
    expected = harts.logprobs(model, packed)

    def refuse(*args: Any, **kwargs: Any) -> Tensor:
        raise AssertionError("a copy was made")

    x_TX = torch.arange(6).view(3, 2)
    for same in (cut_rows(x_TX, 3), fill_rows(x_TX, 3), repeat_first(x_TX, 3)):
        assert same is x_TX
    monkeypatch.setattr(row_floor, "pad", refuse)
    assert torch.equal(harts.logprobs(model, packed, kernels=Kernels(min_rows=packed.num_rows)), expected)
    with pytest.raises(AssertionError, match="a copy was made"):
        harts.logprobs(model, packed, kernels=Kernels(min_rows=packed.num_rows + 1))


def test_rows_are_cut_and_filled_at_the_end() -> None:
    x_TX = torch.arange(1, 7).view(3, 2)
    assert fill_rows(x_TX, 4, value=-1).tolist() == [[1, 2], [3, 4], [5, 6], [-1, -1]]
    assert repeat_first(x_TX, 5).tolist() == [[1, 2], [3, 4], [5, 6], [1, 2], [1, 2]]
    assert torch.equal(cut_rows(fill_rows(x_TX, 9), 3), x_TX)


@pytest.mark.parametrize("bad", [0, -1, 2.5, True, None])
def test_bad_floors_are_refused(bad: Any) -> None:
    with pytest.raises(ValueError, match="field min_rows: expected an integer of at least 1, got"):
        Kernels(min_rows=bad)
