"""Anneals the order of children: where the cheapest cuts of the row order fall depends on it.

For any order of the children of each branch point, `cut_in_order` finds the best cuts, and some order has the best
partition of all as its cuts if no microbatch mixes parts of several branches. Simulated annealing (Kirkpatrick, Gelatt
and Vecchi 1983) over orders finds good ones where few leaves leave bottom-up packing little choice.
"""

import random
from collections.abc import Iterator
from math import exp, inf

import numpy as np
from numpy.typing import NDArray

from harts.plan.pack import cut_in_order
from harts.plan.problem import Problem

__all__ = ["anneal_order"]

Ints = NDArray[np.int64]

_HOT = 6e-4
"""Share of the bound that a step may lose at first, with probability 1/e."""


def anneal_order(problem: Problem, bound: float, slots: int, steps: int) -> Iterator[tuple[Ints, list[float]]]:
    """Yields partitions, int64 [L], and their costs; the same ones for the same arguments.

    Args:
        problem: leaves, prices and limits.
        bound: lower bound of the makespan, which sets the scale of limits and temperature.
        slots: about how many there will be.
        steps: orders to try.
    """
    chance = random.Random(0)
    replicas = problem.num_replicas
    # Children of each branch point: other branch points, or ~leaf.
    children = [[*branch.branches, *(~leaf for leaf in branch.leaves)] for branch in problem.leaves.branches]
    movable = [at for at, below in enumerate(children) if len(below) > 1]
    if not movable:
        return
    limit, current = inf, inf
    for step in range(steps):
        below = children[chance.choice(movable)]
        old_below, old_limit = below.copy(), limit
        _change(below, chance)
        if replicas > 1 and chance.random() < 0.3:
            even = bound / max(slots + chance.choice((-1, 0, 0, 1)), 1)
            limit = inf if chance.random() < 0.2 else even * (1 + 0.15 * chance.random())
        leaf_L = _leaves_in_order(children)
        inner = problem.reordered(leaf_L)
        part_L = cut_in_order(inner, limit)
        costs = list(inner.cost_of_parts(part_L).tolist())
        original_L = np.empty_like(part_L)
        original_L[leaf_L] = leaf_L[part_L]
        yield original_L, costs
        # Half the value is the makespan, half the mean over replicas: the first alone is flat almost everywhere.
        value = (sum(sorted(costs, reverse=True)[::replicas]) + sum(costs) / replicas) / 2
        heat = max(bound * _HOT * (1 - step / steps), 1e-9 * bound)
        if value <= current or chance.random() < exp(-(value - current) / heat):
            current = value
        else:
            below[:], limit = old_below, old_limit


def _change(below: list[int], chance: random.Random) -> None:
    """Moves one child, or shuffles all."""
    if chance.random() < 0.5:
        chance.shuffle(below)
    else:
        child = below.pop(chance.randrange(len(below)))
        below.insert(chance.randrange(len(below) + 1), child)


def _leaves_in_order(children: list[list[int]]) -> Ints:
    """int64 [L]: leaves in depth-first order."""
    order: list[int] = []
    stack = [len(children) - 1]
    while stack:
        at = stack.pop()
        if at < 0:
            order.append(~at)
        else:
            stack.extend(reversed(children[at]))
    return np.array(order, np.int64)
