"""Very many short trajectories: the planner neither loops at length over each nor cuts where nothing asks for it."""

import hashlib
import json
from collections import Counter
from typing import Any

import numpy as np
import pytest

from harts.cost import CostModel
from harts.plan import check_plan, make_plan, search
from harts.plan.fingerprint import fingerprint
from harts.plan.pack import cut_in_order, pack_by_branch
from harts.testing.trees import to_trajectories
from harts.tree import PrefixTree


def short_rows(count: int, *, vocabulary: int = 50_000, most: int = 3, seed: int = 0) -> PrefixTree:
    rng = np.random.default_rng(seed)
    rows = [rng.integers(0, vocabulary, rng.integers(2, most + 1)) for _ in range(count)]
    return PrefixTree.build(to_trajectories(rng, rows))


@pytest.mark.parametrize("replicas", [1, 8])
def test_many_short_trajectories_are_planned_with_few_passes(replicas: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes over all leaves are counted, not seconds: 100,000 trajectories take 0.1 to 0.3 s a pass."""
    passes: Counter[str] = Counter()

    def counted(function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            passes[function.__name__] += 1
            return function(*args, **kwargs)

        return call

    monkeypatch.setattr(search, "cut_in_order", counted(cut_in_order))
    monkeypatch.setattr(search, "pack_by_branch", counted(pack_by_branch))
    tree = short_rows(25_000)
    plan = make_plan(tree, token_budget=48, num_replicas=replicas)
    check_plan(tree, plan, thorough=False)
    assert passes == {"cut_in_order": 1}
    assert plan.gap < 0.02
    # microbatches are filled: nearly the fewest that the budget allows, which counts replayed rows, here all shared
    assert plan.slots * replicas < 1.1 * tree.num_tokens / 48


def test_many_leaves_are_packed_where_cuts_leave_a_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tight budgets, for which the row order is a poor order; the threshold is lowered to keep the test small."""
    monkeypatch.setattr(search, "_MANY_LEAVES", 100)
    tree = short_rows(2_000, vocabulary=20, most=5)
    plan = make_plan(tree, token_budget=7, num_replicas=2)
    check_plan(tree, plan)
    monkeypatch.setattr(search, "_MANY_LEAVES", 10**9)
    thorough = make_plan(tree, token_budget=7, num_replicas=2)
    assert plan.makespan <= 1.1 * thorough.makespan
    assert plan.slots <= 1.1 * thorough.slots


def test_the_fingerprint_is_of_every_flag_and_as_it_was() -> None:
    """Saved plans stay valid: the digest equals one of flags packed trajectory by trajectory."""
    tree, model = short_rows(50, most=20), CostModel.of_rows()
    digest = hashlib.blake2b(digest_size=12)
    digest.update(json.dumps([9, 2, None, model.to_json()], sort_keys=True).encode())
    for array in (tree.token_ids_T, tree.start_S, tree.parent_S, tree.end_segment_B):
        digest.update(np.int64(len(array)).tobytes())
        digest.update(np.ascontiguousarray(array).data)
    for trajectory in tree.trajectories:
        digest.update(np.packbits(trajectory.loss_mask).data)
    digest.update(np.array([trajectory.temperature for trajectory in tree.trajectories]).data)
    assert fingerprint(tree, 9, 2, None, model) == digest.hexdigest()
