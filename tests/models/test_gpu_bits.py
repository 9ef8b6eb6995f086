"""On a GPU: log-probs and experts of a tree are, bit for bit, those of packed rows and of rows one at a time."""

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from harts.layout import PackedTree, pack
from harts.models import RouterConfig, logprobs
from harts.models.fuse import fuse, unfuse
from harts.models.recompute import keep_activations, recompute_activations
from harts.ops.kernels import Kernels
from harts.testing.routes import route_stability
from harts.testing.shapes import build_model
from harts.testing.trees import to_trajectories
from harts.testing.workloads import workload
from harts.trajectory import Trajectory
from harts.tree import PrefixTree, Share

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]

# The widths of the real models: of narrower products cuBLAS picks another kernel for every number of rows.
VOCABULARY = 32_768
LAYERS = {"vocab_size": VOCABULARY, "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
SMALL = (5, 33, 100, 300, 700)
"""Rows of a tree: below and above all numbers up to which a product was found to have other bits."""
UNFUSED_EXPERTS = 4096
"""Rows from which on the product with a shared expert's gate was found to keep its bits."""


@pytest.fixture(scope="module")
def dense() -> nn.Module:
    return build_model({**LAYERS, "num_hidden_layers": 4, "layer_types": LAYERS["layer_types"] * 2})  # type: ignore[operator]


@pytest.fixture(scope="module")
def experts() -> nn.Module:
    return build_model(LAYERS, shape="qwen3.5-35b-a3b")


@pytest.fixture(params=[True, False], ids=["fused", "unfused"])
def fused(request: pytest.FixtureRequest, dense: nn.Module, experts: nn.Module) -> Iterator[bool]:
    """Whether the models of a test are fused."""
    for model in (dense, experts) if request.param else ():
        fuse(model)
    yield request.param
    for model in (dense, experts) if request.param else ():
        unfuse(model)


def star(rows: int) -> list[Trajectory]:
    """Four trajectories with a common stem, of so many rows in all; every token but the first is trained."""
    rng = np.random.default_rng(rows)
    own = max(rows // 6, 1)
    stem = rng.integers(0, VOCABULARY, rows - 4 * own)
    branches = [np.append(index, rng.integers(0, VOCABULARY, own - 1)) for index in range(4)]
    return to_trajectories(rng, [np.concatenate([stem, branch]) for branch in branches], trained_share=1)


def packed_tree(trajectories: Sequence[Trajectory], share: Share = "tree") -> PackedTree:
    return pack(PrefixTree.build(trajectories, share=share), device="cuda")


def score(model: nn.Module, packed: PackedTree, kernels: Kernels, exact: bool = False) -> Tensor:
    """Log-probs of all tokens; `exact` routes as `RouterConfig` says."""
    if exact:
        return logprobs(model, packed, kernels=kernels, router=RouterConfig(scope="microbatch", exact=True)).logprobs_N
    return logprobs(model, packed, kernels=kernels)


def arms(
    model: nn.Module, trajectories: Sequence[Trajectory], kernels: Kernels, exact: bool = False
) -> dict[str, Tensor]:
    """Log-probs of the tree, of packed rows, of rows in two microbatches and of one row at a time."""
    halves = [packed_tree(trajectories[i::2], "none") for i in range(2)]
    split = [part.split(score(model, part, kernels, exact)) for part in halves]
    return {
        "tree": score(model, packed_tree(trajectories), kernels, exact),
        "packed rows": score(model, packed_tree(trajectories, "none"), kernels, exact),
        "two microbatches": torch.cat([split[i % 2][i // 2] for i in range(len(trajectories))]),
        "one row at a time": torch.cat([score(model, packed_tree([each]), kernels, exact) for each in trajectories]),
    }


def assert_equal_bits(found: dict[str, Tensor]) -> None:
    expected = found.pop("packed rows")
    assert expected.isfinite().all()
    for arm, values in found.items():
        different = int((values != expected).sum())
        assert different == 0, f"{arm}: {different} of {len(expected)} tokens, {(values - expected).abs().max():.1e}"


# -- a dense model -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", SMALL)
def test_small_microbatches(dense: nn.Module, fused: bool, rows: int) -> None:
    assert packed_tree(star(rows)).num_rows == rows
    with torch.no_grad():
        assert_equal_bits(arms(dense, star(rows), Kernels.fastest()))


@pytest.mark.parametrize("name", ["star3", "grpo", "thin", "search"])
def test_workloads(dense: nn.Module, fused: bool, name: str) -> None:
    trajectories = workload(name, scale=0.1)
    for attention in {"varlen", Kernels.fastest().attention}:
        kernels = dataclasses.replace(Kernels.fastest(), attention=attention)
        with torch.no_grad():
            found = {
                "tree": score(dense, packed_tree(trajectories), kernels),
                "packed rows": score(dense, packed_tree(trajectories, "none"), kernels),
            }
        assert_equal_bits(found)


def test_small_microbatches_have_other_bits_without_a_floor(dense: nn.Module) -> None:
    """The twin: where this fails, the floor is not needed any more."""
    kernels = dataclasses.replace(Kernels.fastest(), min_rows=1)
    with torch.no_grad():
        found = arms(dense, star(100), kernels)
    assert any(not torch.equal(values, found["packed rows"]) for values in found.values())


def test_gradients_and_recomputation_change_no_bit_of_the_forward(dense: nn.Module) -> None:
    packed = packed_tree(star(300))
    with torch.no_grad():
        expected = score(dense, packed, Kernels.fastest())
    assert torch.equal(score(dense, packed, Kernels.fastest()), expected)
    try:
        for keep_attention in (False, True):
            recompute_activations(dense, keep_attention=keep_attention)
            assert torch.equal(score(dense, packed, Kernels.fastest()), expected)
    finally:
        keep_activations(dense)


@pytest.mark.parametrize("name", ["small", "star3"])
def test_gradients_of_two_runs_have_the_same_bits(dense: nn.Module, name: str) -> None:
    trajectories = star(100) if name == "small" else workload(name, scale=0.1)
    fuse(dense)
    try:
        packed = packed_tree(trajectories)
        runs = []
        for keep_attention in (False, False, True):
            recompute_activations(dense, keep_attention=keep_attention)
            logprobs(dense, packed, kernels=Kernels.fastest(deterministic=True)).sum().backward()
            runs.append([p.grad for p in dense.parameters() if p.grad is not None])
            dense.zero_grad(set_to_none=True)
    finally:
        keep_activations(dense)
        unfuse(dense)
    assert len(runs[0]) > 40
    for again in runs[1:]:
        assert all(torch.equal(first, second) for first, second in zip(runs[0], again, strict=True))


# -- a mixture of experts ------------------------------------------------------------------------------------------


def expert_kernels(fused: bool) -> Kernels:
    return Kernels.fastest() if fused else dataclasses.replace(Kernels.fastest(), min_rows=UNFUSED_EXPERTS)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("rows", SMALL)
def test_small_microbatches_of_experts(experts: nn.Module, fused: bool, rows: int, exact: bool) -> None:
    kernels = expert_kernels(fused)
    with torch.no_grad():
        assert_equal_bits(arms(experts, star(rows), kernels, exact))
    found = route_stability(experts, star(rows), kernels=kernels, exact=exact)
    assert (found.tree_fraction, found.repeat_fraction) == (0, 0)


@pytest.mark.parametrize("name", ["star3", "search"])
def test_workloads_of_experts(experts: nn.Module, name: str) -> None:
    """Fused: unfused, the product with a shared expert's gate was found to have other bits on search, too."""
    trajectories, kernels = workload(name, scale=0.1), Kernels.fastest()
    fuse(experts)
    try:
        with torch.no_grad():
            trees = {share: packed_tree(trajectories, share) for share in ("tree", "none")}
            found = {share: score(experts, tree, kernels, exact=True) for share, tree in trees.items()}
        stability = route_stability(experts, trajectories, kernels=kernels, exact=True)
    finally:
        unfuse(experts)
    assert torch.equal(found["tree"], found["none"])
    assert (stability.tree_fraction, stability.repeat_fraction) == (0, 0)


@pytest.mark.parametrize("rows", [1, 7, 300, 4095, 4097, 20_000])
def test_router_logits_do_not_depend_on_the_rows_beside(rows: int) -> None:
    from harts.ops.moe import router_logits

    generator = torch.Generator("cuda").manual_seed(0)
    for dtype in (torch.bfloat16, torch.float32):
        hidden = torch.randn(40_000, 2048, dtype=dtype, device="cuda", generator=generator)
        weight = torch.randn(256, 2048, dtype=dtype, device="cuda", generator=generator)
        whole = router_logits(hidden, weight)
        assert torch.equal(router_logits(hidden[:rows], weight), whole[:rows])
        assert torch.equal(router_logits(hidden[-rows:], weight), whole[-rows:])
        assert torch.equal(router_logits(hidden, weight), whole)
