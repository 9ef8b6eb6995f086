"""Calibration times a model and fits seconds; a calibration of another model is refused."""

from pathlib import Path

import pytest

import harts
from harts.cost import CostModel, model_identity
from harts.models import tiny_model
from harts.testing.calibrate import calibrate
from harts.testing.trees import AWKWARD


def test_fits_seconds_that_a_plan_then_balances(tmp_path: Path) -> None:
    model = harts.attach(tiny_model("tiny-qwen3.5"))
    lines: list[str] = []
    found = calibrate(model, max_rows=512, log=lines.append)
    assert len(lines) == len(found.runs) == len(found.left_out_errors) == 18
    assert found.cost_model.unit == "seconds"
    largest = max(found.runs, key=lambda run: run.seconds)
    assert found.cost_model.time.of(largest.counts) == pytest.approx(largest.seconds, rel=0.9)
    found.cost_model.save(tmp_path / "cost.json")
    loaded = CostModel.load(tmp_path / "cost.json", model=model_identity(model.config))
    plan = harts.make_plan(harts.PrefixTree.build(AWKWARD["star"]), token_budget=600, cost_model=loaded)
    assert plan.cost_model.unit == "seconds"
    other = tiny_model("tiny-llama").config
    with pytest.raises(ValueError, match="calibrate this model"):
        CostModel.load(tmp_path / "cost.json", model=model_identity(other))


def test_too_small_runs_are_refused() -> None:
    with pytest.raises(ValueError, match="max_rows: expected at least 512, came 100"):
        calibrate(harts.attach(tiny_model("tiny-llama")), max_rows=100)
