"""The laws of every plan: coverage, lock step, budget, purity, and claims that building a microbatch confirms."""

import dataclasses
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harts.cost import Coefficients, CostModel, count
from harts.plan import Microbatch, Plan, check_microbatch, check_plan, make_plan
from harts.testing.trees import AWKWARD, random_trajectories, to_trajectories, tree_strategy
from harts.tree import PrefixTree

FULL = CostModel(
    time=Coefficients(
        rows=3.0,
        pairs=0.01,
        window_pairs=0.07,
        linear_rows=0.5,
        trained_rows=2.0,
        chains=5.0,
        gathered_keys=0.1,
        microbatches=130.0,
        window=20,
    ),
    unit="flops",
)
SINGLE = {
    field.name: CostModel(time=Coefficients(**{field.name: 1.0}, window=20), unit="flops")
    for field in dataclasses.fields(Coefficients)
    if field.name != "window"
}


def longest(tree: PrefixTree) -> int:
    return max(map(len, tree.trajectories))


@settings(deadline=None, max_examples=60)
@given(
    tree_strategy(max_trajectories=10, max_length=150, vocab_size=2),
    st.sampled_from([1.0, 1.3, 2.0, 5.0]),
    st.integers(1, 4),
    st.sampled_from([None, FULL, *SINGLE.values()]),
    st.sampled_from([None, 1.0, 2.5]),
)
def test_laws_of_random_plans(
    tree: PrefixTree, budget: float, replicas: int, cost_model: CostModel | None, cap: float | None
) -> None:
    key_cap = None if cap is None else int(cap * longest(tree))
    plan = make_plan(
        tree,
        token_budget=int(budget * longest(tree)),
        num_replicas=replicas,
        cost_model=cost_model,
        key_cap=key_cap,
    )
    check_plan(tree, plan)
    assert plan.unique_rows == tree.num_rows
    assert all(len(slot) == replicas for slot in plan.microbatches)


@pytest.mark.parametrize("name", AWKWARD)
def test_laws_of_awkward_plans(name: str) -> None:
    tree = PrefixTree.build(AWKWARD[name])
    for budget, replicas in ((longest(tree), 1), (2 * longest(tree), 3), (10**6, 2)):
        check_plan(tree, make_plan(tree, token_budget=budget, num_replicas=replicas))


@pytest.mark.parametrize("coefficient", SINGLE)
@pytest.mark.parametrize("name", AWKWARD)
def test_laws_where_one_thing_alone_costs(name: str, coefficient: str) -> None:
    tree = PrefixTree.build(AWKWARD[name])
    for budget, replicas in ((longest(tree), 2), (2 * longest(tree), 5)):
        plan = make_plan(tree, token_budget=budget, num_replicas=replicas, cost_model=SINGLE[coefficient])
        check_plan(tree, plan)
        assert plan.gap >= 0
        assert 0 <= plan.idle_fraction < 1
        assert plan.speedup >= 0


def test_baseline_trees_are_planned_too() -> None:
    rng = np.random.default_rng(0)
    tree = PrefixTree.build(random_trajectories(rng, num_trajectories=9), share="none")
    plan = make_plan(tree, token_budget=300, num_replicas=2)
    check_plan(tree, plan)  # the tree remembers what it merged
    assert plan.recomputed_rows == plan.replayed_rows == 0


def test_claims_hold_where_a_cut_parts_a_prefix_from_what_continues_it() -> None:
    """Under "prefix", [1] and [1, 3] are merged only by way of [1, 2]; rebuilt alone they would share a row."""
    rows = [[1], [1, 2], [1, 3], [1, 3, 4], [1, 3, 5]]
    tree = PrefixTree.build(to_trajectories(np.random.default_rng(0), rows), share="prefix")
    for budget in (3, 4, 5, 6):
        check_plan(tree, make_plan(tree, token_budget=budget))


@settings(deadline=None, max_examples=40)
@given(
    tree_strategy(max_trajectories=9, max_length=150, vocab_size=2),
    st.sampled_from([None, FULL]),
    st.randoms(use_true_random=False),
)
def test_permuted_trajectories_cost_the_same(
    tree: PrefixTree, cost_model: CostModel | None, chance: random.Random
) -> None:
    order = list(range(tree.num_trajectories))
    chance.shuffle(order)
    other = PrefixTree.build([tree.trajectories[index] for index in order])
    arguments = {"token_budget": int(1.5 * longest(tree)), "num_replicas": 2, "cost_model": cost_model}
    one, two = make_plan(tree, **arguments), make_plan(other, **arguments)  # type: ignore[arg-type]
    assert (one.makespan, one.lower_bound, one.slots) == (two.makespan, two.lower_bound, two.slots)
    for first, second in zip(one.microbatches, two.microbatches, strict=True):
        for a, b in zip(first, second, strict=True):
            assert dataclasses.replace(a, trajectories=()) == dataclasses.replace(b, trajectories=())


def test_more_replicas_than_microbatches_gives_explicit_empty_ones() -> None:
    tree = PrefixTree.build(AWKWARD["duplicates"])
    plan = make_plan(tree, token_budget=10**4, num_replicas=5)
    assert plan.slots == 1
    assert [one.is_empty for one in plan.microbatches[0]] == [False, True, True, True, True]
    assert plan.idle_fraction == pytest.approx(0.8)
    assert "empty" in " ".join(plan.hints)
    check_plan(tree, plan)


def test_prediction_is_the_cost_of_the_counts() -> None:
    rng = np.random.default_rng(1)
    without_head = dataclasses.replace(FULL, time=dataclasses.replace(FULL.time, trained_rows=0.0))
    tree = PrefixTree.build(random_trajectories(rng, num_trajectories=30, max_length=300))
    plan = make_plan(tree, token_budget=700, num_replicas=2, cost_model=without_head)
    for slot in plan.microbatches:
        for one in slot:
            if not one.is_empty:
                built = PrefixTree.build([tree.trajectories[index] for index in one.trajectories])
                assert one.cost == pytest.approx(without_head.time.of(count(built, FULL.time.window)))
    whole = make_plan(tree, token_budget=10**6, cost_model=FULL)  # uncut: the head's rows are exact as well
    assert whole.makespan == pytest.approx(FULL.time.of(count(tree, FULL.time.window)))
    assert whole.gap == pytest.approx(0.0, abs=0.05)


def broken_plans(plan: Plan) -> dict[str, Plan]:
    first, *rest = plan.microbatches[0]
    lacking = dataclasses.replace(first, trajectories=first.trajectories[1:])
    twice = dataclasses.replace(first, trajectories=(*first.trajectories, first.trajectories[0]))
    boasting = dataclasses.replace(first, unique_rows=first.unique_rows - 1, recomputed_rows=first.recomputed_rows + 1)
    replayed = dataclasses.replace(first, replayed_rows=first.replayed_rows - 1)
    huge = dataclasses.replace(first, recomputed_rows=plan.token_budget)

    def with_slot(*slot: Microbatch) -> Plan:
        return dataclasses.replace(plan, microbatches=(slot, *plan.microbatches[1:]))

    return {
        "coverage": with_slot(lacking, *rest),
        "coverage ": with_slot(twice, *rest),
        "lock step": with_slot(first, *rest, Microbatch()),
        "budget": with_slot(huge, *rest),
        "claims": with_slot(boasting, *rest),
        "claims ": with_slot(replayed, *rest),
        "bound": dataclasses.replace(plan, lower_bound=2 * plan.makespan),
        "purity": dataclasses.replace(plan, microbatches=tuple(slot[::-1] for slot in plan.microbatches)),
    }


def test_every_broken_law_is_caught() -> None:
    tree = PrefixTree.build(AWKWARD["comb"])
    plan = make_plan(tree, token_budget=900, num_replicas=2)
    assert plan.recomputed_rows > 0
    check_plan(tree, plan)
    for law, broken in broken_plans(plan).items():
        with pytest.raises(ValueError, match=f"law of {law.strip()}"):
            check_plan(tree, broken)


def test_a_microbatch_is_checked_when_it_is_built() -> None:
    tree = PrefixTree.build(AWKWARD["star"])
    one = make_plan(tree, token_budget=2000).microbatches[0][0]
    check_microbatch(one, tree)
    with pytest.raises(ValueError, match="law of claims"):
        check_microbatch(one, PrefixTree.build(tree.trajectories[:-1]))


def test_group_may_be_split_over_replicas() -> None:
    tree = PrefixTree.build(AWKWARD["star"])
    plan = make_plan(tree, token_budget=2000, num_replicas=2)
    assert plan.slots == 1
    assert all(not one.is_empty for one in plan.microbatches[0])
    assert plan.recomputed_rows == 100  # the stem, once more
