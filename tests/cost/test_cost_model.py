"""CostModel: fits to timed runs, files, and the refusal of another model's."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from harts.cost import Coefficients, CostModel, Counts, TimedRun, count
from harts.cost.least_squares import non_negative_least_squares
from harts.flops import forward_flops, model_identity
from harts.testing.trees import random_trajectories
from harts.tree import PrefixTree

CONFIG = {
    "model_type": "llama", "vocab_size": 500, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4,
}  # fmt: skip
TRUE = Coefficients(rows=2e-6, pairs=3e-10, linear_rows=1e-6, trained_rows=5e-6, chains=2e-4, microbatches=8e-3)


def timed_runs(number: int, noise: float = 0.0) -> list[TimedRun]:
    rng = np.random.default_rng(0)
    runs = []
    for _ in range(number):
        batch = random_trajectories(
            rng,
            num_trajectories=int(rng.integers(1, 25)),
            max_length=int(rng.integers(100, 3000)),
            trained_share=float(rng.random()),
        )
        counts = count(PrefixTree.build(batch))
        factor = 1 + noise * rng.normal()
        runs.append(TimedRun(counts=counts, seconds=TRUE.of(counts) * factor, bytes=1e9 + 4096.0 * counts.rows))
    return runs


def test_fit_predicts_new_runs() -> None:
    runs = timed_runs(40)
    fitted = CostModel.fit(runs[:25], model="a model")
    for run in runs[25:]:
        assert fitted.time.of(run.counts) == pytest.approx(run.seconds, rel=1e-6)
        assert fitted.memory.of(run.counts) == pytest.approx(run.bytes, rel=1e-6)
    assert fitted.unit == "seconds"
    assert fitted.time.pairs == pytest.approx(TRUE.pairs, rel=1e-4)


def test_fit_of_noisy_runs_is_close_and_never_negative() -> None:
    runs = timed_runs(60, noise=0.03)
    fitted = CostModel.fit(runs)
    errors = [abs(fitted.time.of(run.counts) / TRUE.of(run.counts) - 1) for run in runs]
    assert np.median(errors) < 0.03
    assert min(fitted.time.values) >= 0


def test_least_squares_meet_the_conditions_of_an_optimum() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        matrix, target = rng.normal(size=(12, 6)), rng.normal(size=12)
        solution = non_negative_least_squares(matrix, target)
        gradient = matrix.T @ (matrix @ solution - target)
        assert solution.min() >= 0
        assert gradient.min() >= -1e-8  # no coefficient would gain by growing
        assert np.abs(gradient[solution > 0]).max(initial=0) < 1e-8  # nor one above 0 by moving


def test_too_few_or_impossible_runs_are_refused() -> None:
    run = TimedRun(counts=Counts(rows=10, microbatches=1), seconds=0.1)
    with pytest.raises(ValueError, match="at least 2 timed runs, got 1"):
        CostModel.fit([run])
    for seconds in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="seconds: expected finite numbers above 0"):
            CostModel.fit([run, dataclasses.replace(run, seconds=seconds)])


def test_default_is_the_models_flops() -> None:
    default = CostModel.from_config(CONFIG)
    assert default.time == forward_flops(CONFIG).scaled(3.0)
    assert (default.unit, default.model) == ("flops", model_identity(CONFIG))
    assert CostModel.from_config(CONFIG, recompute=True).time == forward_flops(CONFIG).scaled(4.0)


def test_file_returns_the_model_and_refuses_another(tmp_path: Path) -> None:
    fitted = CostModel.fit(timed_runs(10), model=model_identity(CONFIG))
    path = tmp_path / "cost.json"
    fitted.save(path)
    assert CostModel.load(path, model=model_identity(CONFIG)) == fitted
    with pytest.raises(ValueError, match="cost model: expected one of other 1x1, got one of llama 2x32"):
        CostModel.load(path, model="other 1x1")
    CostModel.of_rows().check_model("any")  # fits every model
    assert [file.name for file in tmp_path.iterdir()] == ["cost.json"]


def test_files_that_are_no_cost_model_are_refused(tmp_path: Path) -> None:
    good = CostModel.of_rows().to_json()
    texts = ["not json", "[]", json.dumps({**good, "format": "x"}), json.dumps({**good, "color": 1})]
    texts.append(json.dumps({key: value for key, value in good.items() if key != "time"}))
    texts.append(json.dumps({**good, "time": {"rows": -1.0}}))
    texts.append(json.dumps({**good, "unit": "hours"}))
    for text in texts:
        (tmp_path / "bad.json").write_text(text)
        with pytest.raises(ValueError, match=r"cost model|coefficient|unit"):
            CostModel.load(tmp_path / "bad.json")


def test_a_model_needs_something_to_balance() -> None:
    with pytest.raises(ValueError, match="only zeros"):
        CostModel(time=Coefficients(), unit="rows")
