"""The lower bound and the plan against all partitions of small forests; gaps where the issue promises them."""

from collections.abc import Iterator

import numpy as np
import pytest

from harts.cost import Coefficients, CostModel, count
from harts.plan import lower_bound, make_plan
from harts.plan.search import sum_of_slowest
from harts.testing.trees import AWKWARD, random_trajectories, to_trajectories
from harts.trajectory import Trajectory
from harts.tree import PrefixTree

MIXED = CostModel(time=Coefficients(rows=2.0, pairs=0.02, linear_rows=0.7, chains=3.0, microbatches=70.0), unit="flops")


def partitions(items: list[int]) -> Iterator[list[list[int]]]:
    if not items:
        yield []
        return
    for rest in partitions(items[1:]):
        for at in range(len(rest)):
            yield [*rest[:at], [items[0], *rest[at]], *rest[at + 1 :]]
        yield [[items[0]], *rest]


def best_makespan(trajectories: list[Trajectory], budget: int, replicas: int, cost_model: CostModel) -> float:
    """Tries every partition; each microbatch is really built and counted."""
    known: dict[tuple[int, ...], float] = {}

    def cost(part: list[int]) -> float:
        key = tuple(sorted(part))
        if key not in known:
            counts = count(PrefixTree.build([trajectories[index] for index in key]))
            known[key] = cost_model.time.of(counts) if counts.linear_rows <= budget else float("inf")
        return known[key]

    every = (
        sum_of_slowest([cost(part) for part in one], replicas) for one in partitions(list(range(len(trajectories))))
    )
    return min(every)


@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize("cost_model", [CostModel.of_rows(), MIXED])
def test_bound_is_below_and_plan_close_to_the_best_of_all_partitions(replicas: int, cost_model: CostModel) -> None:
    rng = np.random.default_rng(replicas)
    ratios = []
    for _ in range(12):
        trajectories = random_trajectories(rng, num_trajectories=6, max_length=200, fresh_share=0.2)
        tree = PrefixTree.build(trajectories)
        budget = int(max(map(len, trajectories)) * rng.choice([1.0, 1.4, 2.5]))
        arguments = {"token_budget": budget, "num_replicas": replicas, "cost_model": cost_model}
        best = best_makespan(trajectories, budget, replicas, cost_model)
        bound = lower_bound(tree, **arguments)  # type: ignore[arg-type]
        plan = make_plan(tree, **arguments)  # type: ignore[arg-type]
        assert bound <= best * (1 + 1e-9)
        assert plan.lower_bound <= best * (1 + 1e-9)
        assert best <= plan.makespan * (1 + 1e-9)
        ratios.append(plan.makespan / best)
    assert np.median(ratios) == pytest.approx(1.0)
    assert max(ratios) <= 1.05


def test_bound_of_a_star_is_the_issues_formula() -> None:
    rng = np.random.default_rng(0)
    stem = rng.integers(0, 9, 128)
    tree = PrefixTree.build(to_trajectories(rng, [[*stem, 10 + leaf, *rng.integers(0, 9, 63)] for leaf in range(12)]))
    # 12 leaves of 64 rows below 128: at a budget of 400, each microbatch has 272 rows for them.
    assert lower_bound(tree, token_budget=400) == 12 * 64 + 128 * 3
    assert lower_bound(tree, token_budget=400, num_replicas=3) == (12 * 64 + 128 * 3) / 3
    assert lower_bound(tree, token_budget=10**4, num_replicas=100) == 192  # the largest indivisible piece
    # Twelve leaves on six replicas: 2 leaves and the stem each, whatever the budget.
    assert lower_bound(tree, token_budget=10**4, num_replicas=6) == pytest.approx(256, rel=2e-3)
    assert make_plan(tree, token_budget=10**4, num_replicas=6).makespan == 256


def test_three_equal_paths_on_two_replicas_take_the_time_of_two() -> None:
    rng = np.random.default_rng(0)
    tree = PrefixTree.build(to_trajectories(rng, [[leaf, *rng.integers(0, 9, 99)] for leaf in range(3)]))
    assert lower_bound(tree, token_budget=1000, num_replicas=2) == 200
    assert make_plan(tree, token_budget=1000, num_replicas=2).gap == 0


def test_bound_knows_the_cap_on_gathered_keys() -> None:
    rng = np.random.default_rng(0)
    stem = rng.integers(0, 9, 128)
    tree = PrefixTree.build(to_trajectories(rng, [[*stem, 10 + leaf] for leaf in range(12)]))
    assert lower_bound(tree, token_budget=10**4) == 140
    assert lower_bound(tree, token_budget=10**4, key_cap=3 * 129) == 12 + 4 * 128
    plan = make_plan(tree, token_budget=10**4, key_cap=3 * 129)
    assert plan.makespan == 12 + 4 * 128
    assert max(one.gathered_keys for slot in plan.microbatches for one in slot) <= 3 * 129


@pytest.mark.parametrize("replicas", [1, 4, 8])
def test_gap_of_groups_with_a_common_prompt(replicas: int) -> None:
    rng = np.random.default_rng(0)
    rows = []
    for _ in range(40):
        prompt = rng.integers(0, 50_000, 300)
        rows += [np.concatenate([prompt, rng.integers(0, 50_000, rng.integers(50, 400))]) for _ in range(8)]
    tree = PrefixTree.build(to_trajectories(rng, rows))
    plan = make_plan(tree, token_budget=2 * max(map(len, rows)), num_replicas=replicas)
    assert plan.slots >= 8
    assert plan.gap <= 0.05


def test_uncut_budget_is_the_smallest_that_cuts_nothing() -> None:
    tree = PrefixTree.build(AWKWARD["comb"])
    tight = make_plan(tree, token_budget=900)
    assert tight.recomputed_rows > 0
    assert f"{tight.uncut_budget:,}" in tight.hints[0]
    assert make_plan(tree, token_budget=tight.uncut_budget).recomputed_rows == 0
    assert make_plan(tree, token_budget=tight.uncut_budget - 1).recomputed_rows > 0


def test_a_hint_promises_no_more_than_planning_again_gives() -> None:
    tree = PrefixTree.build(AWKWARD["comb"])
    for replicas, key_cap in ((1, None), (3, None), (1, 3000)):
        tight = make_plan(tree, token_budget=900, num_replicas=replicas, key_cap=key_cap)
        again = make_plan(tree, token_budget=tight.uncut_budget, num_replicas=replicas, key_cap=key_cap)
        promised = "needs no cut" in tight.hints[0]
        assert promised == (again.recomputed_rows == 0)
        assert promised or f"{tight.uncut_budget:,} fits every tree into one microbatch" in tight.hints[0]


@pytest.mark.parametrize("cost_model", [CostModel.of_rows(), MIXED])
def test_many_short_rows_fill_few_microbatches(cost_model: CostModel) -> None:
    rng = np.random.default_rng(0)
    rows = [[row, *rng.integers(0, 9, int(rng.integers(300, 1_000)))] for row in range(400)]
    plan = make_plan(PrefixTree.build(to_trajectories(rng, rows)), token_budget=7_000, cost_model=cost_model)
    assert plan.slots <= 1.05 * sum(map(len, rows)) / 7_000 + 1
