"""Steps planned ahead by another process are those planned here."""

import dataclasses
import os
import signal
from typing import Any

import pytest

from harts.cost import CostModel
from harts.layout import PackedTree, pack
from harts.plan import Plan, make_plan
from harts.testing.workloads import workload
from harts.train.batches import Batches
from harts.train.config import TrainConfig
from harts.train.parallel import Replicas
from harts.train.planning import StepPlanner
from harts.trajectory import Trajectory
from harts.tree import PrefixTree


@pytest.fixture(scope="module")
def trajectories() -> list[Trajectory]:
    """Three groups, so that steps differ."""
    found = []
    for seed in range(3):
        for each in workload("star3", scale=0.01, seed=seed):
            found.append(dataclasses.replace(each, group=str(seed), id=f"{seed}/{each.id}"))
    return found


def planner(trajectories: list[Trajectory], device: str, told: list[str]) -> StepPlanner:
    config = TrainConfig(data="", steps=6, groups_per_step=1, token_budget=400)
    object.__setattr__(config, "device", device)
    batches = Batches(trajectories, groups_per_step=1, seed=0)
    return StepPlanner(
        config, batches, replicas=Replicas(0, 2), cost_model=CostModel.of_rows(), saved=None, log=told.append
    )


def run(made: StepPlanner, monkeypatch: pytest.MonkeyPatch, *, kill_at: int = -1) -> list[object]:
    monkeypatch.setattr(PackedTree, "to", lambda self, device: self)  # there is no GPU here
    plans = []
    with made.ahead():
        for step in range(6):
            plans.append(made.plan(step).plan)
            made.start(step + 1)
            made.prepare(step + 1)
            if step == kill_at and made._ahead is not None and made._ahead._process is not None:
                os.kill(made._ahead._process.pid, signal.SIGKILL)
                made._ahead._process.wait()
    return plans


def test_the_plans_are_the_same(trajectories: list[Trajectory], monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    here = run(planner(trajectories, "cpu", told), monkeypatch)
    taken: list[int] = []
    made = planner(trajectories, "cuda", told)

    def counted(*arguments: Any, **settings: Any) -> Plan:
        taken.append(1)
        return make_plan(*arguments, **settings)

    monkeypatch.setattr("harts.train.step.make_plan", counted)
    assert run(made, monkeypatch) == here
    assert len(taken) == 1  # the first step only
    assert told == []


def test_the_next_step_is_laid_out_before_it_is_asked_for(
    trajectories: list[Trajectory], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PackedTree, "to", lambda self, device: self)
    laid_out: list[int] = []

    def counted(tree: PrefixTree, **options: Any) -> PackedTree:
        laid_out.append(tree.num_rows)
        return pack(tree, **options)

    monkeypatch.setattr("harts.slots.pack", counted)
    for device, before in (("cuda", True), ("cpu", False)):
        made = planner(trajectories, device, [])
        with made.ahead():
            made.plan(0)
            made.prepare(1)
            laid_out.clear()
            step = made.plan(1)
            assert (laid_out == []) == before
        assert step.plan == planner(trajectories, "cpu", []).plan(1).plan


def test_an_error_of_the_next_step_waits_for_it(
    trajectories: list[Trajectory], monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*arguments: Any, **settings: Any) -> None:
        raise ValueError("no plan")

    made = planner(trajectories, "cuda", [])
    monkeypatch.setattr("harts.train.planning.plan_step", failing)
    with made.ahead():
        made.prepare(1)
        with pytest.raises(ValueError, match="no plan"):
            made.plan(1)


def test_a_dead_process_costs_nothing_but_time(trajectories: list[Trajectory], monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    here = run(planner(trajectories, "cpu", told), monkeypatch)
    assert run(planner(trajectories, "cuda", told), monkeypatch, kill_at=1) == here
    (line,) = told
    assert "plans its steps itself" in line


def test_a_plan_of_other_data_is_refused(trajectories: list[Trajectory], monkeypatch: pytest.MonkeyPatch) -> None:
    made = planner(trajectories, "cuda", [])
    with made.ahead():
        made.start(1)
        made._ahead_of = 2
        with pytest.raises(ValueError, match="got other trajectories"):
            made.plan(2)
