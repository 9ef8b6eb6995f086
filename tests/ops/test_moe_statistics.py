"""Router statistics on the tree equal those of the unmerged batch: integers exactly, losses and gradients in fp64."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from law import magnitude, relative
from torch import Tensor
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from harts.layout import PackedTree, pack
from harts.models.router_losses import (
    RouterStatistics,
    RouterStep,
    load_balancing_loss,
    loss_free_bias,
    max_violation,
    router_z_loss,
)
from harts.ops.moe import count_tokens, router_sums
from harts.testing.fp64 import all_fp64
from harts.testing.trees import AWKWARD, random_trajectories, trajectories_strategy
from harts.trajectory import Trajectory
from harts.tree import PrefixTree

EXPERTS, PER_TOKEN, LAYERS = 5, 2, 3
SCOPES = ["trajectory", "microbatch", "step"]


def draw_logits(packed: PackedTree, seed: int = 0) -> list[Tensor]:
    """Router logits of every layer, one row a tree row; a token's logits depend on its path only, as a model's do."""
    generator = torch.Generator().manual_seed(seed)
    shape = (packed.num_rows, EXPERTS)
    return [torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_() for _ in range(LAYERS)]


def choose(logits: Tensor) -> Tensor:
    return logits.softmax(-1).topk(PER_TOKEN).indices


def statistics_of(packed: PackedTree, logits: Sequence[Tensor], scope: Any, mask_N: Any = None) -> RouterStatistics:
    count = count_tokens(packed, scope=scope, mask_N=mask_N)
    sums = [router_sums(each, choose(each), count) for each in logits]
    return RouterStatistics(
        scope=scope,
        experts_per_token=PER_TOKEN,
        tokens_U=count.tokens_U,
        load_UYE=torch.stack([each.load_UE for each in sums], 1),
        physical_YE=torch.stack([each.physical_E for each in sums]),
        prob_UYE=torch.stack([each.prob_UE for each in sums], 1),
        z_UY=torch.stack([each.z_U for each in sums], 1),
    )


def random_mask(packed: PackedTree, seed: int = 4) -> Tensor:
    return torch.rand(packed.num_tokens, generator=torch.Generator().manual_seed(seed)) < 0.6


def unmerged(packed: PackedTree, logits: Sequence[Tensor], mask_N: Tensor) -> list[list[Tensor]]:
    """Logits of each trajectory's counted tokens, per layer, as the batch without sharing would have them."""
    rows = packed.split(packed.row_of_N)
    return [[each[r[m]] for r, m in zip(rows, packed.split(mask_N), strict=True)] for each in logits]


def assert_same(ours: Tensor, theirs: Tensor, inputs: Sequence[Tensor]) -> None:
    """Values and gradients."""
    assert relative(ours, theirs) < 1e-10
    terms = float(theirs.detach().abs().max())
    triples = zip(
        torch.autograd.grad(ours, inputs, retain_graph=True),
        torch.autograd.grad(theirs, inputs, retain_graph=True),
        inputs,
        strict=True,
    )
    assert max(relative(a, b, least=magnitude(terms, x)) for a, b, x in triples) < 1e-10


def packed_of(trajectories: Sequence[Trajectory]) -> PackedTree:
    return pack(PrefixTree.build(trajectories))


# -- sums ----------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=40)
@given(trajectories_strategy(max_length=140), st.sampled_from(SCOPES), st.booleans())
def test_sums_equal_the_unmerged_batch(trajectories: list[Trajectory], scope: str, masked: bool) -> None:
    packed = packed_of(trajectories)
    logits = draw_logits(packed)
    mask_N = random_mask(packed) if masked else torch.ones(packed.num_tokens, dtype=torch.bool)
    ours = statistics_of(packed, logits, scope, mask_N if masked else None)
    parts = unmerged(packed, logits, mask_N)
    if scope != "trajectory":
        parts = [[torch.cat(layer)] for layer in parts]
    load = torch.stack([torch.stack([count_choices(x) for x in layer]) for layer in parts], 1)
    assert torch.equal(ours.load_UYE, load)
    assert ours.tokens_U.tolist() == [len(x) for x in parts[0]]
    assert torch.equal(ours.physical_YE, torch.stack([count_choices(each) for each in logits]))
    prob = torch.stack([torch.stack([x.softmax(-1).sum(0) for x in layer]) for layer in parts], 1)
    z = torch.stack([torch.stack([x.logsumexp(-1).square().sum() for x in layer]) for layer in parts], 1)
    weight = torch.randn(prob.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    assert_same((ours.prob_UYE * weight).sum() + ours.z_UY.sum(), (prob * weight).sum() + z.sum(), logits)


def count_choices(logits: Tensor) -> Tensor:
    return torch.bincount(choose(logits).flatten(), minlength=EXPERTS)


@pytest.mark.parametrize("shape", [name for name in AWKWARD if name != "caterpillar"])
def test_sums_per_trajectory_on_awkward_trees(shape: str) -> None:
    packed = packed_of(AWKWARD[shape])
    logits = draw_logits(packed)
    ours = statistics_of(packed, logits, "trajectory", packed.loss_mask_N)
    parts = unmerged(packed, logits, packed.loss_mask_N)
    for layer, rows in enumerate(parts):
        assert torch.equal(ours.load_UYE[:, layer], torch.stack([count_choices(x) for x in rows]))
        prob = torch.stack([x.softmax(-1).sum(0) for x in rows])
        assert float((ours.prob_UYE[:, layer] - prob).detach().abs().max()) < 1e-10


# -- losses --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("masked", [False, True])
def test_batch_wise_loss_is_that_of_transformers(masked: bool) -> None:
    packed = packed_of(random_trajectories(np.random.default_rng(1)))
    logits = draw_logits(packed)
    mask_N = random_mask(packed)
    ours = load_balancing_loss(statistics_of(packed, logits, "microbatch", mask_N if masked else None))
    with all_fp64():
        batch = tuple(each[packed.row_of_N] for each in logits)
        attention_mask = mask_N.long().unsqueeze(0) if masked else None
        theirs = load_balancing_loss_func(batch, EXPERTS, PER_TOKEN, attention_mask)
        assert_same(ours, theirs, logits)


def test_sequence_wise_loss_is_that_of_deepseek_v3() -> None:
    packed = packed_of(AWKWARD["comb"])
    logits = draw_logits(packed)
    statistics = statistics_of(packed, logits, "trajectory")
    ours = load_balancing_loss(statistics, layers="sum", load_per="assignment")
    losses = []
    for rows in packed.split(packed.row_of_N):  # one sequence after the other, token by token
        for each in logits:
            affinity = each[rows].softmax(-1)
            chosen = torch.nn.functional.one_hot(choose(each[rows]), EXPERTS).sum(1)
            f = EXPERTS / (PER_TOKEN * len(rows)) * chosen.sum(0).double()
            losses.append((f * affinity.mean(0)).sum())
    theirs = torch.stack(losses).sum() / packed.tree.num_trajectories
    assert_same(ours, theirs, logits)


@pytest.mark.parametrize("layers", ["pooled", "sum"])
def test_z_loss_is_that_of_st_moe(layers: Any) -> None:
    packed = packed_of(AWKWARD["star"])
    logits = draw_logits(packed)
    ours = router_z_loss(statistics_of(packed, logits, "microbatch"), layers=layers)
    per_layer = [each[packed.row_of_N].logsumexp(-1).square().mean() for each in logits]
    theirs = torch.stack(per_layer).mean() if layers == "pooled" else torch.stack(per_layer).sum()
    assert_same(ours, theirs, logits)


@settings(deadline=None, max_examples=25)
@given(
    trajectories_strategy(max_length=70, max_trajectories=7),
    st.lists(st.integers(0, 2), min_size=7, max_size=7),
    st.sampled_from(["trajectory", "step"]),
    st.sampled_from(["pooled", "mean", "sum"]),
)
def test_any_split_into_microbatches_gives_the_gradients_of_the_step(
    trajectories: list[Trajectory], slots: list[int], scope: str, layers: Any
) -> None:
    """A token's logits are those of its row in the tree of the whole step, whichever microbatch it runs in."""
    whole = packed_of(trajectories)
    logits = draw_logits(whole)
    one = statistics_of(whole, logits, scope)
    rows_of = whole.split(whole.row_of_N)
    parts = []
    for slot in sorted(set(slots[: len(trajectories)])):
        members = [index for index in range(len(trajectories)) if slots[index] == slot]
        packed = packed_of([trajectories[index] for index in members])
        row_T = torch.empty(packed.num_rows, dtype=torch.int64)
        row_T[packed.row_of_N] = torch.cat([rows_of[index] for index in members])
        parts.append(statistics_of(packed, [each[row_T] for each in logits], scope))
    step = RouterStep.from_statistics(parts)
    assert step.tokens == whole.num_tokens
    assert torch.equal(step.load_YE, one.load_YE)
    for loss in (load_balancing_loss, router_z_loss):
        together = loss(one, layers=layers, step=RouterStep.from_statistics([one]))
        assert_same(torch.stack([loss(part, layers=layers, step=step) for part in parts]).sum(), together, logits)


def test_in_scope_microbatch_the_plan_changes_the_loss() -> None:
    """Why a scope has to be chosen."""
    trajectories = AWKWARD["star"]
    whole = packed_of(trajectories)
    logits = draw_logits(whole)
    together = load_balancing_loss(statistics_of(whole, logits, "microbatch"))
    halves = []
    for members in (range(4), range(4, 8)):
        packed = packed_of([trajectories[index] for index in members])
        row_T = torch.empty(packed.num_rows, dtype=torch.int64)
        row_T[packed.row_of_N] = torch.cat([whole.split(whole.row_of_N)[index] for index in members])
        halves.append(load_balancing_loss(statistics_of(packed, [each[row_T] for each in logits], "microbatch")))
    assert abs(float((together - torch.stack(halves).mean()).detach())) > 1e-6


def test_counts_of_a_step_need_no_pass() -> None:
    trajectories = [*AWKWARD["empty response"], *AWKWARD["star"]]
    packed = packed_of(trajectories)
    logits = draw_logits(packed)
    for tokens, mask_N in (("all", None), ("trained", packed.loss_mask_N)):
        from_pass = RouterStep.from_statistics([statistics_of(packed, logits, "trajectory", mask_N)])
        counted = RouterStep.from_trajectories(trajectories, tokens=tokens)  # type: ignore[arg-type]
        assert (counted.tokens, counted.trajectories) == (from_pass.tokens, from_pass.trajectories)


# -- twins ---------------------------------------------------------------------------------------------------------


def test_law_fails_when_multiplicities_are_ignored() -> None:
    packed = packed_of(AWKWARD["duplicates"])
    broken = count_tokens(packed, scope="microbatch")
    broken = dataclasses.replace(broken, weight_T=torch.ones_like(broken.weight_T))
    logits = draw_logits(packed)
    right = statistics_of(packed, logits, "microbatch")
    wrong = router_sums(logits[0], choose(logits[0]), broken)
    assert torch.equal(wrong.load_UE[0], right.physical_YE[0])
    assert not torch.equal(wrong.load_UE[0], right.load_YE[0])
    assert relative(wrong.prob_UE, right.prob_UYE[:, 0]) > 1e-3


# -- loss-free balancing and metrics -------------------------------------------------------------------------------


def test_loss_free_bias_moves_against_the_load() -> None:
    load = torch.tensor([[9, 3, 6], [4, 4, 4]])
    bias = torch.tensor([[0.5, 0.0, -0.5], [0.0, 0.1, 0.2]])
    ours = loss_free_bias(bias, load, rate=0.1)
    torch.testing.assert_close(ours, torch.tensor([[0.4, 0.1, -0.5], [0.0, 0.1, 0.2]]))


def test_max_violation() -> None:
    assert max_violation(torch.tensor([[9, 3, 6], [4, 4, 4]])).tolist() == [0.5, 0.0]


# -- bad input -----------------------------------------------------------------------------------------------------


def test_steps_that_do_not_fit_are_refused() -> None:
    packed = packed_of(AWKWARD["star"])
    logits = draw_logits(packed)
    step = RouterStep(tokens=10**6, trajectories=100)
    with pytest.raises(ValueError, match="scope 'microbatch' divides by the tokens of the microbatch"):
        load_balancing_loss(statistics_of(packed, logits, "microbatch"), step=step)
    with pytest.raises(ValueError, match="scope 'step' divides by the tokens of the step"):
        router_z_loss(statistics_of(packed, logits, "step"))
    with pytest.raises(ValueError, match=r"expected loads \[3, 5\] of the whole step, got none"):
        load_balancing_loss(statistics_of(packed, logits, "step"), step=step)
    with pytest.raises(ValueError, match=r"expected at least the microbatch's .* was it counted over other"):
        router_z_loss(statistics_of(packed, logits, "trajectory"), step=RouterStep(tokens=10**6, trajectories=7))


def test_unknown_names_and_shapes_are_refused() -> None:
    packed = packed_of(AWKWARD["star"])
    logits = draw_logits(packed)
    statistics = statistics_of(packed, logits, "microbatch")
    with pytest.raises(ValueError, match="scope: expected 'trajectory', 'microbatch' or 'step', got 'batch'"):
        count_tokens(packed, scope="batch")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="mask_N: expected bool"):
        count_tokens(packed, scope="step", mask_N=torch.ones(3, dtype=torch.bool))
    with pytest.raises(ValueError, match="layers: expected 'pooled', 'mean' or 'sum'"):
        router_z_loss(statistics, layers="all")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="load_per: expected 'token' or 'assignment'"):
        load_balancing_loss(statistics, load_per="row")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="router_sums: expected"):
        router_sums(logits[0][1:], choose(logits[0]), count_tokens(packed, scope="step"))
