"""harts.microbatches: each trajectory in exactly one of them, on all replicas as many, and the layouts of subtrees."""

from typing import Any

import numpy as np
import pytest
import torch

import harts
from harts.testing.trees import random_trajectories, to_trajectories
from harts.trajectory import Trajectory


def rollouts() -> list[Trajectory]:
    return random_trajectories(np.random.default_rng(0), num_trajectories=24, max_length=60)


@pytest.mark.parametrize("share", ["tree", "prefix", "none"])
@pytest.mark.parametrize("replicas", [1, 3])
def test_each_trajectory_is_in_one_microbatch(share: Any, replicas: int) -> None:
    trajectories = rollouts()
    all_of_them = [
        harts.microbatches(trajectories, token_budget=120, replicas=replicas, rank=rank, share=share)
        for rank in range(replicas)
    ]
    assert len({len(one) for one in all_of_them}) == 1  # as many on each
    assert len(all_of_them[0]) > 1
    seen = [index for one in all_of_them for microbatch in one for index in microbatch.indices]
    assert sorted(seen) == list(range(24))
    for microbatch in (each for one in all_of_them for each in one if each.indices):
        chosen = [trajectories[index] for index in microbatch.indices]
        assert list(microbatch.trajectories) == chosen
        built = harts.pack(harts.PrefixTree.build(chosen, share=share))
        assert microbatch.packed.tree.share == share
        if share == "tree":
            for name in ("token_ids_T", "position_T", "head_row_U", "target_of_N"):
                assert torch.equal(getattr(microbatch.packed, name), getattr(built, name))
        assert microbatch.packed.num_tokens == built.num_tokens


def test_a_replica_without_work_gets_padding() -> None:
    trajectories = to_trajectories(np.random.default_rng(0), [[1, 2, 3]], trained_share=1)
    (working,) = harts.microbatches(trajectories, token_budget=3, replicas=2, rank=0)
    (idle,) = harts.microbatches(trajectories, token_budget=3, replicas=2, rank=1)
    assert (working.indices, idle.indices) == ((0,), ())
    assert idle.packed.num_rows == 1
    assert idle.trajectories[0].num_trained == 0
    values = {0: torch.arange(3.0)}
    assert torch.equal(working.pick(values), values[0])
    assert torch.equal(idle.pick(values), torch.zeros(1))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"token_budget": 120, "replicas": 2}, "rank: expected which of the 2"),
        ({"token_budget": 120, "replicas": 2, "rank": 2}, r"in \[0, 2\), got 2"),
        ({"token_budget": 120, "rank": True}, "got True"),
        ({"token_budget": 3}, "token_budget: expected at least"),
        ({"token_budget": 120, "share": "some"}, "'tree', 'prefix' or 'none'"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        harts.microbatches(rollouts(), **arguments)
