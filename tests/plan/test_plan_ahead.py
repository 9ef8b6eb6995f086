"""Plans of another process: the same, errors and all; and what happens when it dies."""

import os
import signal
import subprocess
import sys
from pathlib import Path

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
        with pytest.raises(ValueError, match="token_budget") as here:
            make_plan(tree_of(0), token_budget=1)
        with pytest.raises(ValueError, match="token_budget") as there:
            ahead.take()
        assert str(there.value) == str(here.value)
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


def test_trees_larger_than_a_pipe() -> None:
    trajectories = random_trajectories(np.random.default_rng(0), num_trajectories=20, max_length=20_000)
    tree = PrefixTree.build(trajectories)
    assert tree.token_ids_T.nbytes > 2**18
    with PlanAhead() as ahead:
        for _ in range(2):
            ahead.submit(tree, token_budget=60_000, num_replicas=2)
            assert ahead.take() == make_plan(tree, token_budget=60_000, num_replicas=2)


def test_modules_are_those_of_this_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("numpy", "pickle"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('another module of this name')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", "")
    with PlanAhead() as ahead:
        ahead.submit(tree_of(0), token_budget=200)
        assert ahead.take() == make_plan(tree_of(0), token_budget=200)


def test_output_that_is_no_plan_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho welcome\nexit 3\n")
    python.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(python))
    with PlanAhead() as ahead:
        ahead.submit(tree_of(0), token_budget=200)
        assert ahead.take() is None
        assert "ended (exit code 3, " in ahead.failure


def test_the_process_ends_in_silence_when_this_one_is_killed(tmp_path: Path) -> None:
    lines = [
        "import os, time",
        "import numpy as np",
        "from harts.plan.ahead import PlanAhead",
        "from harts.testing.trees import random_trajectories",
        "from harts.tree import PrefixTree",
        "rng = np.random.default_rng(0)",
        "tree = PrefixTree.build(random_trajectories(rng, num_trajectories=12, max_length=90))",
        "ahead = PlanAhead()",
        "ahead.submit(tree, token_budget=200)",
        "os.kill(os.getpid(), 9)",
    ]
    read, write = os.pipe()  # held open by both: at its end neither is left
    subprocess.Popen([sys.executable, "-c", "\n".join(lines)], stderr=write).wait()
    os.close(write)
    with open(read, encoding="utf-8") as told:
        assert told.read() == ""


def test_leaving_ends_the_process() -> None:
    with PlanAhead() as ahead:
        ahead.submit(tree_of(0), token_budget=200)
        assert ahead._process is not None
        process = ahead._process
    assert process.poll() is not None
