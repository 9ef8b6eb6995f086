"""Runs that are left or fail in the middle: no process stays behind, and the same trainer goes on as if nothing was."""

import copy
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harts.formats import write
from harts.plan.ahead import PlanAhead
from harts.testing.workloads import workload
from harts.train import TrainConfig, Trainer
from harts.train.step import accumulate


class Ahead(str):
    """A CPU that plans ahead as if it were a GPU."""

    def startswith(self, *arguments: Any) -> bool:
        return True


@pytest.fixture
def make(tmp_path: Path) -> Callable[[str], Trainer]:
    found = []
    for seed in range(3):
        for each in workload("star3", scale=0.003, seed=seed):
            found.append(dataclasses.replace(each, group=str(seed), id=f"{seed}/{each.id}"))
    write(tmp_path / "data.jsonl", found)

    def made(name: str) -> Trainer:
        config = TrainConfig(
            data=str(tmp_path / "data.jsonl"), groups_per_step=2, steps=3, recompute=False, dtype="float64"
        )
        trainer = Trainer(config, tmp_path / name, log=lambda line: None)
        trainer.planner.config = copy.copy(config)
        object.__setattr__(trainer.planner.config, "device", Ahead("cpu"))
        return trainer

    return made


def process_of(trainer: Trainer) -> Any:
    assert isinstance(trainer.planner._ahead, PlanAhead)
    assert trainer.planner._ahead._process is not None
    return trainer.planner._ahead._process


def norms(trainer: Trainer) -> list[float]:
    return [metrics.grad_norm for metrics in trainer.run()]


def test_a_run_left_early_ends_its_process_and_goes_on(make: Callable[[str], Trainer]) -> None:
    whole = norms(make("whole"))
    trainer = make("left")
    for metrics in trainer.run():
        process = process_of(trainer)
        assert process.poll() is None
        assert metrics.grad_norm == whole[0]
        break
    assert process.poll() is not None
    assert norms(trainer) == whole[1:]


@pytest.mark.parametrize("kind", [RuntimeError, KeyboardInterrupt])
def test_a_failed_step_leaves_no_process_and_no_gradients(
    make: Callable[[str], Trainer], monkeypatch: pytest.MonkeyPatch, kind: type[BaseException]
) -> None:
    whole = norms(make("whole"))
    trainer = make("failed")
    processes = []

    def failing(*arguments: Any, **settings: Any) -> Any:
        accumulate(*arguments, **settings)
        processes.append(process_of(trainer))
        raise kind("behind the backward")

    monkeypatch.setattr("harts.train.trainer.accumulate", failing)
    with pytest.raises(kind, match="behind the backward"):
        norms(trainer)
    assert processes[0].poll() is not None
    monkeypatch.setattr("harts.train.trainer.accumulate", accumulate)
    assert norms(trainer) == whole
