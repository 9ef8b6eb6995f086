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
from harts.testing.arms import Batch, Setting, prepare, run_step
from harts.testing.measure import measure
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
        Setting(token_budget=900),
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
    assert all(arm.logprob_max_abs < 1e-12 for arm in measured.arms.values())
    assert {arm.compared_with for arm in measured.arms.values()} == {"rows"}
    assert all(arm.same_again for arm in measured.arms.values())
    assert len(rows.seconds) == len(tree.seconds) == 2
    ratios = [a / b for a, b in zip(rows.seconds, tree.seconds, strict=True)]
    assert measured.speedup() == pytest.approx(np.median(ratios))
    assert measured.efficiency() == pytest.approx(measured.speedup() / measured.flop_limit)
    assert tree.seconds[0] == tree.step_seconds[0] + tree.prepare_seconds[0] > tree.step_seconds[0] > 0
    assert rows.seconds == rows.step_seconds
    ratios = [a / b for a, b in zip(rows.seconds, tree.step_seconds, strict=True)]
    assert measured.efficiency(step_alone=True) == pytest.approx(np.median(ratios) / measured.flop_limit)
    # alternating order, the warm-up aside
    assert [line.split(",")[0] for line in lines[3:]] == ["rows", "merged", "tree", "tree", "merged", "rows"]
    assert all(parameter.grad is None for parameter in model.parameters())


def test_cut_trees_give_the_same_log_probs(model: torch.nn.Module, trajectories: list[Trajectory]) -> None:
    whole = run_step(model, prepare(trajectories, "tree", Setting(token_budget=2_000)))
    cut = prepare(trajectories, "tree", Setting(token_budget=400))
    assert len(cut.packed) > 1
    assert cut.plan.recomputed_rows > 0
    assert torch.allclose(run_step(model, cut), whole, rtol=0, atol=1e-12)
    assert torch.allclose(
        run_step(model, prepare(trajectories, "rows", Setting(token_budget=400))), whole, rtol=0, atol=1e-12
    )


def test_gradients_are_those_of_the_mean_log_prob(model: torch.nn.Module, trajectories: list[Trajectory]) -> None:
    seen: dict[str, torch.Tensor] = {}
    parameter = find_backbone(model).head.weight
    model.zero_grad(set_to_none=True)
    for name, arm, budget in [("rows", "rows", 400), ("tree", "tree", 400), ("whole", "tree", 2_000)]:
        run_step(model, prepare(trajectories, arm, Setting(token_budget=budget)))  # type: ignore[arg-type]
        assert parameter.grad is not None
        seen[name] = parameter.grad.clone()
        model.zero_grad(set_to_none=True)
    assert torch.allclose(seen["rows"], seen["tree"], rtol=1e-9, atol=1e-15)
    assert torch.allclose(seen["whole"], seen["tree"], rtol=1e-9, atol=1e-15)


def test_bad_input(model: torch.nn.Module, trajectories: list[Trajectory]) -> None:
    setting = Setting(token_budget=900)
    for bad in ((), ("trees",), ("tree", "tree")):
        with pytest.raises(ValueError, match="arms of rows, merged, tree, shuffled, plain"):
            measure(model, trajectories, setting, arms=bad)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="turns >= 1"):
        measure(model, trajectories, setting, turns=0)
    on_meta = tiny_model("tiny-llama").to("meta")
    with pytest.raises(ValueError, match="clock: expected 'wall' for a model on meta"):
        measure(on_meta, trajectories, setting, clock="cpu")
    with pytest.raises(ValueError, match="token_budget: expected at least 154"):
        measure(model, trajectories, Setting(token_budget=100))
    with pytest.raises(ValueError, match="LinearLike is not supported"):
        measure(type("LinearLike", (torch.nn.Linear,), {})(2, 2), trajectories, setting)
    routes = np.zeros((len(trajectories[1]), 4, 2), np.int16) + np.arange(2, dtype=np.int16)
    routed = [trajectories[0], dataclasses.replace(trajectories[1], routes=routes)]
    with pytest.raises(ValueError, match=f"plain.*{trajectories[1].name}.*field routes"):
        measure(model, routed, setting, arms=("rows", "plain"))
    untrained = [dataclasses.replace(each, loss_mask=np.zeros(len(each), np.bool_)) for each in trajectories]
    with pytest.raises(ValueError, match="expected a trained token"):
        measure(model, untrained, setting)


def test_each_arm_warms_up_with_its_own_first_microbatch(
    model: torch.nn.Module, trajectories: list[Trajectory], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = harts.testing.measure.run_step
    ran: list[tuple[str, int, int | None]] = []

    def watched(model: torch.nn.Module, batch: Batch, *, most: int | None = None, **settings: Any) -> torch.Tensor:
        scores = plain(model, batch, most=most, **settings)
        ran.append((batch.arm, int(scores.count_nonzero()), most))
        return scores

    monkeypatch.setattr(harts.testing.measure, "run_step", watched)
    setting = Setting(token_budget=900)  # 5 rows of 154 tokens
    measured = measure(model, trajectories, setting, turns=1, arms=("rows", "tree", "plain"))
    trained = [each.num_trained for each in trajectories]
    assert ran[:3] == [("plain", sum(trained[:5]), 5), ("tree", sum(trained), 1), ("rows", sum(trained[:5]), 1)]
    assert [(arm, count) for arm, count, _ in ran[3:]] == [(arm, sum(trained)) for arm in ("rows", "tree", "plain")]
    assert measured.arms["plain"].microbatches == len(trajectories)  # its calls
    ran.clear()
    assert set(measure(model, trajectories, setting, seconds=-1.0).left_out) == {"rows", "tree"}
    assert not ran


def test_log_probs_that_are_no_numbers_are_seen(
    model: torch.nn.Module, trajectories: list[Trajectory], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = harts.testing.measure.run_step

    def broken(model: torch.nn.Module, batch: Batch, **settings: Any) -> torch.Tensor:
        scores = plain(model, batch, **settings)
        return scores * torch.nan if batch.tree.sharing > 1.5 else scores

    monkeypatch.setattr(harts.testing.measure, "run_step", broken)
    measured = measure(model, trajectories, Setting(token_budget=2_000), turns=1)
    assert np.isnan(measured.arms["tree"].logprob_max_abs)
    assert measured.arms["rows"].logprob_max_abs == 0


def test_plans_balance_the_cost_model_that_is_given(model: torch.nn.Module, trajectories: list[Trajectory]) -> None:
    cost_model = CostModel.from_config(find_backbone(model).config)
    batch = prepare(trajectories, "tree", Setting(token_budget=400, cost_model=cost_model))
    assert batch.plan.cost_model == cost_model


def test_a_long_arm_has_one_turn_and_one_that_would_not_fit_none(
    model: torch.nn.Module, trajectories: list[Trajectory]
) -> None:
    setting = Setting(token_budget=900)
    parts: list[Any] = []
    once = measure(model, trajectories, setting, turns=3, once_above=0.0, keep=parts.append)
    assert [len(each.seconds) for each in once.arms.values()] == [1, 1]
    assert once.arms["tree"].same_again is None
    assert once.speedup() == pytest.approx(once.arms["rows"].median_s / once.arms["tree"].median_s)
    assert [list(part.arms) for part in parts] == [["rows"], ["rows", "tree"]]
    none = measure(model, trajectories, setting, turns=1, seconds=-1.0)
    assert (none.arms, none.left_out, none.speedup()) == ({}, {"rows": "time", "tree": "time"}, None)


def test_an_arm_that_the_memory_does_not_hold_is_left_out(
    model: torch.nn.Module, trajectories: list[Trajectory], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = harts.testing.measure.run_step

    def full(model: torch.nn.Module, batch: Batch, **settings: Any) -> torch.Tensor:
        if batch.arm == "rows" and batch.tree.num_tokens > 2000:
            raise torch.OutOfMemoryError
        return plain(model, batch, **settings)

    monkeypatch.setattr(harts.testing.measure, "run_step", full)
    measured = measure(model, trajectories, Setting(token_budget=900), turns=2)
    assert measured.left_out == {"rows": "memory"}
    assert len(measured.arms["tree"].seconds) == 2
    assert measured.arms["tree"].compared_with == "tree"


def test_where_merging_merges_nothing_merged_rows_are_rows(
    model: torch.nn.Module, trajectories: list[Trajectory]
) -> None:
    measured = measure(model, trajectories, Setting(token_budget=900), turns=1)
    assert measured.speedup("merged") == measured.speedup("rows")
    whole = trajectories[0]
    start = dataclasses.replace(whole, token_ids=whole.token_ids[:-1], loss_mask=whole.loss_mask[:-1], advantages=None)
    nested = [*trajectories[:2], start]
    assert measure(model, nested, Setting(token_budget=900), turns=1).speedup("merged") is None


def test_arms_within_a_memory(model: torch.nn.Module, trajectories: list[Trajectory]) -> None:
    whole = measure(model, trajectories, Setting(token_budget=2_000), turns=1, clock="cpu")
    measured = measure(model, trajectories, Setting(token_budget=1, memory="16MiB"), turns=1, clock="cpu")
    rows, tree = measured.arms["rows"], measured.arms["tree"]
    assert tree.logprob_max_abs < 1e-12
    for arm in (rows, tree):
        assert arm.chosen is not None
        assert arm.chosen.predicted_bytes <= 16 * 2**20
        assert arm.microbatches == arm.chosen.pieces > 1
    assert measured.flop_limit == whole.flop_limit
    assert tree.flops == whole.arms["tree"].flops
    with pytest.raises(ValueError, match="arms: expected some of rows, merged, tree within a memory, got plain"):
        measure(model, trajectories, Setting(token_budget=1, memory="16MiB"), arms=("plain",))
    with pytest.raises(ValueError, match="memory: expected at least"):
        measure(model, trajectories, Setting(token_budget=1, memory="1MiB"), turns=1)
