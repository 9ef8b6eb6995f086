"""What the command line says of mixture-of-experts models and of recorded routes."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from harts.cli import app
from harts.formats import write
from harts.testing.trees import AWKWARD

SMALL = ("--no-trees", "--workloads", "think:rollouts=2:turns=2", "--scale", "0.02", "--json")


def run(*arguments: str) -> Any:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == 0, (result.output, result.exception)
    return json.loads(result.stdout)


@pytest.mark.parametrize("model", ["tiny-qwen3.5-moe", "tiny-qwen3-next"])
def test_check_holds_in_fp64(model: str) -> None:
    document = run("check", *SMALL, "--model", model)
    assert document["ok"] is True
    assert document["logprob_max_abs"] < 1e-10
    assert document["grad_max_rel"] < 1e-8


def test_check_measures_routes_below_fp64() -> None:
    document = run("check", *SMALL, "--model", "tiny-qwen3-moe", "--dtype", "float32")
    assert document["ok"] is True
    assert 0 <= document["routes_differ_on_tree"] < 0.001
    assert document["routes_differ_on_repeat"] == 0
    assert "routes_differ_on_tree" not in run("check", *SMALL, "--model", "tiny-qwen3", "--dtype", "float32")


def test_inspect_tells_what_recorded_routes_cost(tmp_path: Path) -> None:
    trajectories = AWKWARD["star"]
    write(tmp_path / "free.jsonl", trajectories)
    own = [np.full((len(each), 1, 1), index) for index, each in enumerate(trajectories)]
    recorded = [dataclasses.replace(each, routes=routes) for each, routes in zip(trajectories, own, strict=True)]
    write(tmp_path / "recorded.jsonl", recorded)
    free = run("inspect", str(tmp_path / "free.jsonl"), "--json")
    document = run("inspect", str(tmp_path / "recorded.jsonl"), "--json")
    assert "sharing_without_routes" not in free
    assert document["sharing"] == 1
    assert document["sharing_without_routes"] == free["sharing"] > 1
