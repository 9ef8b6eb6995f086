"""Advantages over the group."""

import math
import statistics

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harts import Trajectory
from harts.losses import fill_advantages, group_advantages

REWARDS = [1.0, 5.0, 0.0, 3.0, 2.0]
GROUPS = ["a", "b", "a", "b", "a"]


@settings(deadline=None, max_examples=60)
@given(
    samples=st.lists(st.tuples(st.floats(-100, 100).map(lambda x: round(x, 3)), st.integers(0, 3)), min_size=1),
    scale=st.sampled_from(["std", "none"]),
    leave_one_out=st.booleans(),
)
def test_matches_loops(samples: list[tuple[float, int]], scale: str, leave_one_out: bool) -> None:
    rewards, groups = [r for r, _ in samples], [g for _, g in samples]
    result = group_advantages(rewards, groups, scale=scale, leave_one_out=leave_one_out, singletons="zero")
    for i, (reward, group) in enumerate(samples):
        members = [r for r, g in samples if g == group]
        others = [r for j, (r, g) in enumerate(samples) if g == group and j != i]
        if len(set(members)) == 1:
            assert result[i] == 0.0
            continue
        value = reward - (statistics.fmean(others) if leave_one_out else statistics.fmean(members))
        if scale == "std":
            value /= statistics.stdev(members) + 1e-6
        assert result[i] == pytest.approx(value, rel=1e-9, abs=1e-9)


def test_by_hand() -> None:
    assert group_advantages(REWARDS, GROUPS, scale="none").tolist() == [0, 1, -1, -1, 1]
    assert group_advantages(REWARDS, GROUPS, scale="none", leave_one_out=True).tolist() == [0, 2, -1.5, -2, 1.5]
    expected = [0, 1 / math.sqrt(2), -1, -1 / math.sqrt(2), 1]
    assert group_advantages(REWARDS, GROUPS, eps=0.0) == pytest.approx(expected)


@pytest.mark.parametrize("leave_one_out", [False, True])
@pytest.mark.parametrize("reward", [0.1, 1 / 3, -7.7])
def test_no_variance_gives_exactly_zero(reward: float, leave_one_out: bool) -> None:
    for size in (2, 3, 7, 10):
        result = group_advantages([reward] * size, [0] * size, leave_one_out=leave_one_out, eps=0.0)
        assert result.tolist() == [0.0] * size


def test_group_of_one() -> None:
    with pytest.raises(ValueError, match=r"group 'b': expected two members or more, got one \(sample 1\)"):
        group_advantages([1, 2, 3], ["a", "b", "a"])
    assert group_advantages([1, 2, 3], ["a", "b", "a"], scale="none", singletons="zero").tolist() == [-1, 0, 1]


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="scale: expected one of std, none, got 'batch'"):
        group_advantages([1, 2], [0, 0], scale="batch")
    with pytest.raises(ValueError, match="singletons: expected one of error, zero"):
        group_advantages([1, 2], [0, 0], singletons="drop")
    with pytest.raises(ValueError, match="finite numbers, got nan at 1"):
        group_advantages([1, math.nan], [0, 0])
    with pytest.raises(ValueError, match=r"one number per entry of groups \(1\), got shape \[2\]"):
        group_advantages([1, 2], [0])
    with pytest.raises(ValueError, match="eps"):
        group_advantages([1, 2], [0, 0], eps=-1)


def trajectory(name: str, **fields: object) -> Trajectory:
    return Trajectory(**({"token_ids": [1, 2, 3], "loss_mask": [0, 1, 1], "group": "g", "id": name} | fields))


def test_fill_from_rewards() -> None:
    step = [trajectory("a", reward=1.0), trajectory("b", reward=3), trajectory("c", reward=5, meta={"k": 1})]
    filled = fill_advantages(step, scale="none")
    assert [t.advantages.tolist() for t in filled] == [[-2.0] * 3, [0.0] * 3, [2.0] * 3]
    assert [t.id for t in filled] == ["a", "b", "c"]
    assert filled[2].meta == {"k": 1}
    assert step[0].advantages is None


def test_given_advantages_stay() -> None:
    step = [trajectory("a", advantages=2.0, reward=1), trajectory("b", advantages=[0, 1, 2])]
    filled = fill_advantages(step)
    assert filled == step
    assert np.array_equal(filled[1].advantages, [0, 1, 2])


def test_missing_fields_are_named() -> None:
    with pytest.raises(ValueError, match=r"trajectory 'b', field reward: expected a number.*got none"):
        fill_advantages([trajectory("a", reward=1), trajectory("b")])
    with pytest.raises(ValueError, match=r"trajectory 'b', field advantages: .*others of the step have"):
        fill_advantages([trajectory("a", advantages=1), trajectory("b", reward=1)])
    with pytest.raises(ValueError, match="trajectory 'b', field group"):
        fill_advantages([trajectory("a", reward=1), trajectory("b", reward=1, group="")])
