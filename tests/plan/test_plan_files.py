"""Saved plans, bad input, and what a plan says about itself."""

import json
from pathlib import Path

import numpy as np
import pytest

from harts.cost import Coefficients, CostModel
from harts.plan import Plan, make_plan
from harts.testing.trees import AWKWARD, random_trajectories
from harts.trajectory import Trajectory
from harts.tree import PrefixTree

TREE = PrefixTree.build(AWKWARD["comb"])


def test_a_saved_plan_is_the_plan(tmp_path: Path) -> None:
    plan = make_plan(TREE, token_budget=900, num_replicas=3, key_cap=3000)
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json", tree=TREE) == plan
    assert [file.name for file in tmp_path.iterdir()] == ["plan.json"]


def test_json_has_the_keys_people_script_with() -> None:
    data = json.loads(json.dumps(make_plan(TREE, token_budget=900, num_replicas=2).to_json()))
    keys = "slots replicas unique_rows recomputed_rows replayed_rows idle_fraction lower_bound makespan gap plan_s"
    assert set(keys.split()) <= set(data)
    assert data["slots"] == len(data["microbatches"])
    assert data["unique_rows"] == TREE.num_rows
    assert data["makespan"] == pytest.approx(data["lower_bound"] * (1 + data["gap"]))


def test_a_plan_of_other_data_or_arguments_is_refused() -> None:
    data = make_plan(TREE, token_budget=900).to_json()
    for other in (AWKWARD["star"], AWKWARD["comb"][::-1]):
        with pytest.raises(ValueError, match="got other trajectories"):
            Plan.from_json(data, tree=PrefixTree.build(other))
    for name, value in {"token_budget": 901, "replicas": 2, "key_cap": 10**6}.items():
        with pytest.raises(ValueError, match="other arguments"):
            Plan.from_json({**data, name: value}, tree=TREE)
    untrained = [
        Trajectory(token_ids=one.token_ids, loss_mask=np.zeros(len(one), np.bool_), id=one.id)
        for one in AWKWARD["comb"]
    ]
    with pytest.raises(ValueError, match="hash"):
        Plan.from_json(data, tree=PrefixTree.build(untrained))


def test_files_that_are_no_plans_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("not json")
    (tmp_path / "b.json").write_text("[1]")
    for name in ("a.json", "b.json"):
        with pytest.raises(ValueError, match="harts plan -o"):
            Plan.load(tmp_path / name)
    data = make_plan(TREE, token_budget=900).to_json()
    del data["lower_bound"]
    with pytest.raises(ValueError, match="lower_bound"):
        Plan.from_json(data)


@pytest.mark.parametrize("name", ["token_budget", "num_replicas", "key_cap"])
@pytest.mark.parametrize("value", [0, -3, 2.5, "4", True, None])
def test_numbers_must_be_positive_integers(name: str, value: object) -> None:
    if name == "key_cap" and value is None:
        return
    with pytest.raises(ValueError, match=f"{name}: expected an integer >= 1, got"):
        make_plan(TREE, **{"token_budget": 900, name: value})  # type: ignore[arg-type]


def test_numpy_integers_are_integers() -> None:
    assert make_plan(TREE, token_budget=np.int64(900)) == make_plan(TREE, token_budget=900)  # type: ignore[arg-type]


def test_a_budget_below_the_longest_trajectory_names_it() -> None:
    length = max(map(len, TREE.trajectories))
    with pytest.raises(ValueError, match=f"token_budget: expected at least {length}, the length of trajectory '11'"):
        make_plan(TREE, token_budget=length - 1)
    with pytest.raises(ValueError, match=f"{length} is the smallest key_cap that works"):
        make_plan(TREE, token_budget=length, key_cap=length - 1)
    make_plan(TREE, token_budget=length, key_cap=length)


def test_cost_model_must_be_one() -> None:
    with pytest.raises(ValueError, match="expected a CostModel"):
        make_plan(TREE, token_budget=900, cost_model={"rows": 1})  # type: ignore[arg-type]


def test_speedup_is_that_of_separate_rows_spread_evenly() -> None:
    rng = np.random.default_rng(0)
    tree = PrefixTree.build(random_trajectories(rng, num_trajectories=20))
    plan = make_plan(tree, token_budget=10**6)
    assert plan.speedup == pytest.approx(tree.sharing)
    pairs = CostModel(time=Coefficients(pairs=1.0), unit="flops")
    separate = sum(len(one) * (len(one) + 1) // 2 for one in tree.trajectories)
    expected = separate / int((tree.depth_T + 1).sum())
    assert make_plan(tree, token_budget=10**6, cost_model=pairs).speedup == pytest.approx(expected)


def test_fill_is_the_share_of_the_budget() -> None:
    plan = make_plan(TREE, token_budget=900, num_replicas=2)
    assert plan.fill().shape == (plan.slots, 2)
    assert 0.5 < plan.fill().max() <= 1
