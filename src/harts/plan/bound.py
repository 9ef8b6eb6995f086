"""A lower bound on the makespan of any plan, from the tree, the budget and the number of replicas.

See docs/planning.md for the proof.
"""

from math import ceil

import numpy as np

from harts.blocks import whole_blocks
from harts.plan.problem import Problem

__all__ = ["bound_crowding", "bound_makespan", "bound_work"]

_SLACK = 1e-9


def bound_makespan(problem: Problem, known: float = np.inf, tolerance: float = 1e-3) -> float:
    """The least that the sum over slots of the slowest replica can be.

    No microbatch costs more than the makespan C, so the work W(C) of microbatches of at most that cost, spread over
    the replicas, must not exceed C: the bound is the least C with W(C) <= C x replicas, found by bisection.

    Args:
        problem: leaves, prices and limits.
        known: makespan of a plan, which ends the search early where the bound comes close.
        tolerance: relative width at which the bisection stops; its lower end is returned.
    """
    replicas = problem.num_replicas
    largest = float(problem.alone_L.max())
    low = max(bound_work(problem, np.inf) / replicas, largest, bound_crowding(problem))
    if bound_work(problem, low) <= low * replicas:
        return low
    high = known if np.isfinite(known) else bound_work(problem, largest) / replicas
    while high > low * (1 + tolerance):
        middle = (low + high) / 2
        if bound_work(problem, middle) > middle * replicas * (1 + _SLACK):
            low = middle
        else:
            high = middle
    return low


def bound_crowding(problem: Problem) -> float:
    """The least that some replica runs, which has k + 1 of the k R + 1 leaves with the most rows of their own.

    Leaves count with the rows that are theirs alone, and the shortest path above any of them once.
    """
    leaves, replicas = problem.leaves, problem.num_replicas
    above_L = problem.shared_cost(np.maximum(leaves.common_L, np.append(leaves.common_L[1:], 0)))
    own_L = problem.alone_L - above_L
    order = np.argsort(-own_L, kind="stable")
    total_L1 = np.append(0.0, np.cumsum(own_L[order]))
    crowd_K = np.arange(1, (leaves.num_leaves - 1) // replicas + 1)  # k
    last_K = crowd_K * replicas + 1
    least_above_L = np.minimum.accumulate(above_L[order])
    bound_K = total_L1[last_K] - total_L1[last_K - crowd_K - 1] + least_above_L[last_K - 1]
    return float(bound_K.max(initial=0.0))


def bound_work(problem: Problem, limit: float) -> float:
    """The least total cost of microbatches of at most `limit` cost each.

    Bottom-up: rows below a branch point at depth d run in microbatches that also hold the d rows above, so that each
    has at most budget - d rows left for them; the path above is run at least that many times.
    """
    length = problem.leaves.length_L.tolist()
    alone, shared_V, above_V = problem.alone, problem.shared_V, problem.above_V
    # Of each branch point with the path up to the one above: cost, rows, rows with replay, keys; and its copies.
    done: list[tuple[float, int, int, int, int]] = []
    for branch, shared, above in zip(problem.leaves.branches, shared_V, above_V, strict=True):
        whole = whole_blocks(branch.depth)
        number = len(branch.leaves)
        own = sum([length[leaf] for leaf in branch.leaves])
        cost = sum([alone[leaf] for leaf in branch.leaves]) - number * shared
        rows, block_rows, keys = own - number * branch.depth, own - number * whole, own
        copies = 1
        for below in branch.branches:
            child = done[below]
            cost, rows, block_rows, keys = cost + child[0], rows + child[1], block_rows + child[2], keys + child[3]
            copies = max(copies, child[4])
        copies = max(
            copies,
            -(-rows // (problem.token_budget - branch.depth)),
            -(-block_rows // (problem.token_budget - whole)),
            -(-keys // problem.key_cap),
        )
        if shared < limit < np.inf:  # where nothing is left below the path, or the path is free, this says nothing
            copies = max(copies, ceil(cost / (limit - shared) - _SLACK))
        rows += copies * (branch.depth - branch.above)
        block_rows += copies * (whole - whole_blocks(branch.above))
        done.append((cost + copies * (shared - above), rows, block_rows, keys, copies))
    cost, *_, copies = done[-1]
    return cost + copies * problem.time.microbatches
