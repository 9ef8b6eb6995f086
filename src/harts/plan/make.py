"""make_plan: a tree, a budget and a number of replicas become a schedule. A pure function."""

import time
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from harts.blocks import whole_blocks
from harts.cost import CostModel, Counts, count_paths, count_shared, trained_rows_by
from harts.plan.bound import bound_makespan
from harts.plan.fingerprint import fingerprint
from harts.plan.leaves import Leaves
from harts.plan.problem import Problem
from harts.plan.schedule import Microbatch, Plan
from harts.plan.search import search_partition
from harts.tree import PrefixTree

__all__ = ["lower_bound", "make_plan"]

Ints = NDArray[np.int64]

_NO_CAP = 2**62


def make_plan(
    tree: PrefixTree,
    *,
    token_budget: int,
    num_replicas: int = 1,
    cost_model: CostModel | None = None,
    key_cap: int | None = None,
) -> Plan:
    """Cuts a tree into microbatches and places them on slots and replicas.

    Minimises the sum over slots of the slowest replica, then the total cost. Trajectories stay whole; those of one
    group may go to several replicas. The same input gives the same plan, and a permutation of the trajectories a plan
    of equal cost. See docs/planning.md.

    Args:
        tree: all trajectories of one step.
        token_budget: most unique + recomputed + replayed rows of a microbatch, at least the longest trajectory.
        num_replicas: data-parallel replicas, which meet at the end of every slot.
        cost_model: what to balance; None balances rows.
        key_cap: most gathered keys of a microbatch (the sum of its chains' path lengths); None for no cap.

    Raises:
        ValueError: an argument is no positive integer, or a trajectory alone exceeds the budget or the cap.
    """
    start = time.perf_counter()
    problem, cost_model = _pose(tree, token_budget, num_replicas, cost_model, key_cap)
    part_L, bound = search_partition(problem)
    microbatches = _schedule(problem, part_L)
    cap = None if key_cap is None else problem.key_cap
    return Plan(
        microbatches=microbatches,
        token_budget=problem.token_budget,
        num_replicas=problem.num_replicas,
        key_cap=cap,
        cost_model=cost_model,
        lower_bound=bound,
        separate_cost=_separate_cost(tree, cost_model),
        fingerprint=fingerprint(tree, problem.token_budget, problem.num_replicas, cap, cost_model),
        uncut_budget=_uncut_budget(problem.leaves),
        plan_s=time.perf_counter() - start,
    )


def lower_bound(
    tree: PrefixTree,
    *,
    token_budget: int,
    num_replicas: int = 1,
    cost_model: CostModel | None = None,
    key_cap: int | None = None,
) -> float:
    """The makespan that no plan can go below; arguments and errors as of `make_plan`."""
    return bound_makespan(_pose(tree, token_budget, num_replicas, cost_model, key_cap)[0])


def _pose(
    tree: PrefixTree, token_budget: int, num_replicas: int, cost_model: CostModel | None, key_cap: int | None
) -> tuple[Problem, CostModel]:
    budget = _positive("token_budget", token_budget)
    replicas = _positive("num_replicas", num_replicas)
    cap = _NO_CAP if key_cap is None else _positive("key_cap", key_cap)
    if cost_model is not None and not isinstance(cost_model, CostModel):
        raise ValueError(f"cost_model: expected a CostModel or None, got {type(cost_model).__name__}")
    lengths = np.diff(tree.offset_B1)
    longest = int(np.argmax(lengths))
    for name, limit in (("token_budget", budget), ("key_cap", cap)):
        if lengths[longest] > limit:
            raise ValueError(
                f"{name}: expected at least {lengths[longest]}, the length of trajectory "
                f"{tree.trajectories[longest].name} (index {longest}), got {limit}; a trajectory is never split, so "
                f"{lengths[longest]} is the smallest {name} that works"
            )
    cost_model = cost_model or CostModel.of_rows()
    leaves = Leaves.of(tree)
    trained_L = None
    if cost_model.time.trained_rows:
        trained_L = trained_rows_by(tree, leaves.leaf_of_B, leaves.num_leaves)
    alone_L = cost_model.time.of_each(count_paths(leaves.length_L, trained_L, window=cost_model.time.window))
    return Problem(leaves, cost_model.time, alone_L, budget, cap, replicas), cost_model


def _positive(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
        raise ValueError(f"{name}: expected an integer >= 1, got {value!r}; pass a positive whole number")
    return int(value)


def _separate_cost(tree: PrefixTree, cost_model: CostModel) -> float:
    """Cost of all trajectories as rows of their own, each one chain; constants left out."""
    time = replace(cost_model.time, microbatches=0.0)
    trained_B = np.array([trajectory.num_trained for trajectory in tree.trajectories]) if time.trained_rows else None
    return float(time.of_each(count_paths(np.diff(tree.offset_B1), trained_B, window=time.window)).sum())


def _uncut_budget(leaves: Leaves) -> int:
    """Rows, with replay, of the largest tree of the forest."""
    rows_L = leaves.length_L - whole_blocks(leaves.common_L)
    return int(np.add.reduceat(rows_L, np.flatnonzero(leaves.common_L == 0)).max())


def _schedule(problem: Problem, part_L: Ints) -> tuple[tuple[Microbatch, ...], ...]:
    """Sorts the microbatches by cost into slots, and says what each one holds."""
    leaves = problem.leaves
    leaf_L, shared_L = leaves.common_within(part_L)
    first = np.append(0, np.flatnonzero(np.diff(part_L[leaf_L])) + 1)
    stop = np.append(first[1:], len(leaf_L))
    cost = problem.cost_of_parts(part_L)
    follows_L = np.ones(len(leaf_L), np.int64)
    follows_L[first] = 0  # the first leaf of a microbatch shares nothing
    sizes = zip(count_paths(leaves.length_L[leaf_L]), count_shared(shared_L), strict=True)
    of_parts = [np.add.reduceat(alone_L - again_L * follows_L, first).tolist() for alone_L, again_L in sizes]
    counts = [Counts.of_values(column) for column in zip(*of_parts, strict=True)]
    order = np.lexsort((leaf_L[first], -cost))  # largest first, equal ones in row order
    rank_of_part = np.empty_like(order)
    rank_of_part[order] = np.arange(len(order))
    rank_L = np.empty_like(leaf_L)
    rank_L[leaf_L] = np.repeat(rank_of_part, stop - first)
    unique = _unique_rows(leaves, rank_L)
    rank_B = rank_L[leaves.leaf_of_B]
    by_rank = np.argsort(rank_B, kind="stable")
    members = np.split(by_rank, np.flatnonzero(np.diff(rank_B[by_rank])) + 1)
    made = [
        Microbatch(
            trajectories=tuple(members[rank].tolist()),
            unique_rows=int(unique[rank]),
            recomputed_rows=counts[part].rows - int(unique[rank]),
            replayed_rows=counts[part].replayed_rows,
            gathered_keys=counts[part].gathered_keys,
            chains=counts[part].chains,
            cost=float(cost[part]),
        )
        for rank, part in enumerate(order)
    ]
    replicas = problem.num_replicas
    made += [Microbatch()] * (-len(made) % replicas)
    return tuple(tuple(made[at : at + replicas]) for at in range(0, len(made), replicas))


def _unique_rows(leaves: Leaves, rank_L: Ints) -> Ints:
    """int64 [microbatches]: rows that no microbatch of a lower rank has."""
    unique = [0] * (int(rank_L.max()) + 1)
    rank, length = rank_L.tolist(), leaves.length_L.tolist()
    lowest: list[int] = []  # rank that first runs the path down to each branch point
    for branch in leaves.branches:
        for leaf in branch.leaves:
            unique[rank[leaf]] += length[leaf] - branch.depth
        below = [rank[leaf] for leaf in branch.leaves] + [lowest[at] for at in branch.branches]
        lowest.append(min(below))
        unique[lowest[-1]] += branch.depth - branch.above
    return np.array(unique, np.int64)
