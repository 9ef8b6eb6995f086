"""The timing core: arms run what they should, counts and limits are those of the cost model, bad input is refused."""

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

import harts.testing.measure
from harts.cost import CostModel
from harts.flops import flops
from harts.models import attach, tiny_model
from harts.models.attach import find_backbone
from harts.testing.measure import Batch, measure, prepare, run_step
from harts.testing.workloads import workload
from harts.trajectory import Trajectory
from harts.tree import PrefixTree


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return attach(tiny_model("tiny-qwen3.5", vocab_size=1024, dtype=torch.float64))


@pytest.fixture(scope="module")
def trajectories() -> list[Trajectory]:
    return workload("star3", scale=0.01)


def test_measure_counts_what_ran(model: torch.nn.Module, trajectories: list[Trajectory]) -> None:
    lines: list[str] = []
    measured = measure(
        model,
        trajectories,
        token_budget=900,
        turns=2,
        clock="cpu",
        arms=("rows", "merged", "tree"),
        progress=lines.append,
    )
    rows, tree = measured.arms["rows"], measured.arms["tree"]
    assert rows.counts.rows == sum(map(len, trajectories))
    assert tree.counts.rows == PrefixTree.build(trajectories).num_rows
    assert measured.flop_limit == pytest.approx(rows.flops / tree.flops)
    assert tree.flops == pytest.approx(flops(find_backbone(model).config, tree.counts))
    assert 0 < measured.head_share < 1
    assert rows.microbatches > tree.microbatches == 1
    assert (tree.recomputed_rows, rows.replayed_rows) == (0, 0)
    assert measured.logprob_max_abs < 1e-12
    assert len(rows.seconds) == len(tree.seconds) == 2
    ratios = [a / b for a, b in zip(rows.seconds, tree.seconds, strict=True)]
    assert measured.speedup() == pytest.approx(np.median(ratios))
    assert measured.efficiency == pytest.approx(measured.speedup() / measured.flop_limit)
    # alternating order, the warm-up aside
    assert [line.split(",")[0] for line in lines[3:]] == ["rows", "merged", "tree", "tree", "merged", "rows"]
    assert all(parameter.grad is None for parameter in model.parameters())


def test_cut_trees_give_the_same_log_probs(model: torch.nn.Module, trajectories: list[Trajectory]) -> None:
    whole = run_step(model, prepare(trajectories, "tree", token_budget=2_000))
    cut = prepare(trajectories, "tree", token_budget=400)
    assert len(cut.packed) > 1
    assert cut.plan.recomputed_rows > 0
    assert torch.allclose(run_step(model, cut), whole, rtol=0, atol=1e-12)
    assert torch.allclose(run_step(model, prepare(trajectories, "none", token_budget=400)), whole, rtol=0, atol=1e-12)


def test_gradients_are_those_of_the_mean_log_prob(model: torch.nn.Module, trajectories: list[Trajectory]) -> None:
    seen: dict[str, list[float]] = {}
    parameter = find_backbone(model).head.weight
    for name, share, budget in [("rows", "none", 400), ("tree", "tree", 400), ("whole", "tree", 2_000)]:
        batch = prepare(trajectories, share, token_budget=budget)  # type: ignore[arg-type]
        grads: list[torch.Tensor] = []
        hook = parameter.register_post_accumulate_grad_hook(lambda p, grads=grads: grads.append(p.grad.clone()))
        run_step(model, batch)
        hook.remove()
        seen[name] = grads[-1]
    assert torch.allclose(seen["rows"], seen["tree"], rtol=1e-9, atol=1e-15)
    assert torch.allclose(seen["whole"], seen["tree"], rtol=1e-9, atol=1e-15)


def test_bad_input(model: torch.nn.Module, trajectories: list[Trajectory]) -> None:
    with pytest.raises(ValueError, match="arms 'rows', 'tree'"):
        measure(model, trajectories, token_budget=900, arms=("tree",))
    with pytest.raises(ValueError, match="turns >= 1"):
        measure(model, trajectories, token_budget=900, turns=0)
    on_meta = attach(tiny_model("tiny-llama")).to("meta")
    with pytest.raises(ValueError, match="clock: expected 'wall' for a model on meta"):
        measure(on_meta, trajectories, token_budget=900, clock="cpu")
    with pytest.raises(ValueError, match="token_budget: expected at least 154"):
        measure(model, trajectories, token_budget=100)
    with pytest.raises(ValueError, match="not attached"):
        measure(tiny_model("tiny-qwen3.5", vocab_size=1024), trajectories, token_budget=900)
    untrained = [dataclasses.replace(each, loss_mask=np.zeros(len(each), np.bool_)) for each in trajectories]
    with pytest.raises(ValueError, match="expected a trained token"):
        measure(model, untrained, token_budget=900)


def test_log_probs_that_are_no_numbers_are_seen(
    model: torch.nn.Module, trajectories: list[Trajectory], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = harts.testing.measure.run_step

    def broken(model: torch.nn.Module, batch: Batch, **settings: Any) -> torch.Tensor:
        scores = plain(model, batch, **settings)
        return scores * torch.nan if batch.tree.sharing > 1.5 else scores

    monkeypatch.setattr(harts.testing.measure, "run_step", broken)
    assert np.isnan(measure(model, trajectories, token_budget=2_000, turns=1).logprob_max_abs)


def test_plans_balance_the_cost_model_that_is_given(model: torch.nn.Module, trajectories: list[Trajectory]) -> None:
    cost_model = CostModel.from_config(find_backbone(model).config)
    batch = prepare(trajectories, "tree", token_budget=400, cost_model=cost_model)
    assert batch.plan.cost_model == cost_model
