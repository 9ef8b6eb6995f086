"""Plans of another process: the same, errors and all; and what happens when it dies."""

import os
import signal

import numpy as np
import pytest

from harts.cost import CostModel
from harts.plan import make_plan
from harts.plan.ahead import PlanAhead
from harts.testing.trees import random_trajectories
from harts.tree import PrefixTree


def tree_of(seed: int) -> PrefixTree:
    return PrefixTree.build(random_trajectories(np.random.default_rng(seed), num_trajectories=12, max_length=90))


def test_plans_are_those_of_this_process() -> None:
    with PlanAhead() as ahead:
        assert ahead.take() is None
        for seed in range(3):
            arguments = {"token_budget": 200, "num_replicas": 2, "cost_model": CostModel.of_rows()}
            ahead.submit(tree_of(seed), **arguments)
            assert ahead.take() == make_plan(tree_of(seed), **arguments)  # type: ignore[arg-type]
        assert ahead.take() is None
    assert ahead.failure == ""


def test_errors_come_with_the_plan_and_the_process_goes_on() -> None:
    with PlanAhead() as ahead:
        ahead.submit(tree_of(0), token_budget=1)
        with pytest.raises(ValueError, match="token_budget"):
            ahead.take()
        ahead.submit(tree_of(0), token_budget=200)
        assert ahead.take() == make_plan(tree_of(0), token_budget=200)


def test_a_dead_process_is_told_of_and_not_started_again() -> None:
    with PlanAhead() as ahead:
        ahead.submit(tree_of(0), token_budget=200)
        assert ahead._process is not None
        process = ahead._process
        os.kill(process.pid, signal.SIGSTOP)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        ahead.take()  # the plan may have been written before
        ahead.submit(tree_of(0), token_budget=200)
        assert ahead.take() is None
        assert "ended" in ahead.failure
        ahead.submit(tree_of(0), token_budget=200)
        assert ahead.take() is None


def test_leaving_ends_the_process() -> None:
    with PlanAhead() as ahead:
        ahead.submit(tree_of(0), token_budget=200)
        assert ahead._process is not None
        process = ahead._process
    assert process.poll() is not None
