"""Calibration times a model and fits seconds; a calibration of another model is refused."""

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import harts
from harts.cost import Coefficients, CostModel, TimedRun, count, model_identity
from harts.models import tiny_model
from harts.testing.calibrate import calibrate
from harts.testing.trees import AWKWARD, random_trajectories
from harts.tree import PrefixTree

TRUE = Coefficients(rows=3e-6, pairs=2e-9, linear_rows=4e-6, trained_rows=5e-6, chains=8e-5)


def test_noise_free_times_are_predicted_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    def timed(model: Any, tree: PrefixTree, kernels: Any) -> TimedRun:
        counts = count(tree)
        return TimedRun(counts=counts, seconds=TRUE.of(counts) + 0.002, bytes=1e9 + 5e5 * counts.rows)

    monkeypatch.setattr(importlib.import_module("harts.testing.calibrate"), "_time", timed)
    found = calibrate(harts.attach(tiny_model("tiny-qwen3.5")), max_rows=2048)
    for run in found.runs:
        assert found.cost_model.time.of(run.counts) == pytest.approx(run.seconds, rel=1e-6)
        assert found.cost_model.memory.of(run.counts) == pytest.approx(run.bytes, rel=1e-6)
    assert max(found.left_out_errors) < 1e-6
    rng = np.random.default_rng(0)
    for _ in range(20):  # sizes and shapes that no run had
        new = timed(None, PrefixTree.build(random_trajectories(rng, num_trajectories=9, max_length=300)), None)
        assert found.cost_model.time.of(new.counts) == pytest.approx(new.seconds, rel=1e-6)
        assert found.cost_model.memory.of(new.counts) == pytest.approx(new.bytes, rel=1e-6)


def test_fits_seconds_that_a_plan_then_balances(tmp_path: Path) -> None:
    model = harts.attach(tiny_model("tiny-qwen3.5"))
    lines: list[str] = []
    found = calibrate(model, max_rows=512, log=lines.append)
    assert len(lines) == len(found.runs) == len(found.left_out_errors) == 18
    assert found.cost_model.unit == "seconds"
    assert all(found.cost_model.time.of(run.counts) > 0 for run in found.runs)
    found.cost_model.save(tmp_path / "cost.json")
    loaded = CostModel.load(tmp_path / "cost.json", model=model_identity(model.config))
    plan = harts.make_plan(harts.PrefixTree.build(AWKWARD["star"]), token_budget=600, cost_model=loaded)
    assert plan.cost_model.unit == "seconds"
    other = tiny_model("tiny-llama").config
    with pytest.raises(ValueError, match="calibrate this model"):
        CostModel.load(tmp_path / "cost.json", model=model_identity(other))


def test_too_small_runs_are_refused() -> None:
    with pytest.raises(ValueError, match="max_rows: expected at least 512, got 100"):
        calibrate(harts.attach(tiny_model("tiny-llama")), max_rows=100)
