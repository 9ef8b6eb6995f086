"""Searches for the partition of the leaves whose slots take the least time.

All replicas meet at the end of every slot. For given microbatches the least sum over slots of the slowest replica
comes from sorting them by cost and cutting them into slots of `num_replicas`: the k-th slot's slowest then costs as
little as any k-th slowest can. What is left to choose is the partition. A lower limit on the cost makes microbatches
more even but cuts more prefixes; the search walks this trade-off for several numbers of slots.
"""

import random
from collections.abc import Callable
from math import ceil, inf

import numpy as np
from numpy.typing import NDArray

from harts.plan.anneal import anneal_order
from harts.plan.bound import bound_makespan
from harts.plan.pack import Bin, cut_in_order, pack_by_branch
from harts.plan.problem import Problem

__all__ = ["search_partition", "sum_of_slowest"]

Ints = NDArray[np.int64]

_MORE_SLOTS = 4
"""Numbers of slots tried, from the fewest that the budget allows."""
_HALVINGS = 6
_GOOD_GAP = 0.02
"""Slower improvements are tried only while the gap is above this."""
_RANDOM_RESTARTS = 200
_RANDOM_LEAVES = 50_000
"""Leaves placed by a round of random restarts, all of them together."""
_FEW_LEAVES = 500
"""With no more leaves than these, random restarts are tried at any gap, and annealing at all."""
_ANNEALING_STEPS = 1000
_MANY_LEAVES = 20_000
"""With more leaves than these, few partitions are tried, each of which takes a good part of a second."""
_SLACK = 1e-6


def sum_of_slowest(costs: list[float], num_replicas: int) -> float:
    """Makespan of microbatches of the given costs: the best cutting into slots takes them in falling order."""
    return sum(sorted(costs, reverse=True)[::num_replicas])


def search_partition(problem: Problem) -> tuple[Ints, float]:
    """The best partition found, int64 [L] (equal names are one microbatch), and a lower bound of every makespan.

    The same problem gives the same partition: nothing here looks at a clock, and random restarts have a fixed seed.
    """
    search = _Search(problem)
    if problem.leaves.num_leaves > _MANY_LEAVES:
        bound = search.quickly()
        return search.part_L, bound
    search.by_branch()
    search.in_order()
    bound = bound_makespan(problem, search.best[0])
    few = problem.leaves.num_leaves <= _FEW_LEAVES
    if problem.num_replicas > 1 and search.best[0] > bound * (1 + _GOOD_GAP):
        search.evenly(bound)
    if search.best[0] > bound * (1 + (_SLACK if few else _GOOD_GAP)):
        search.at_random(bound, _RANDOM_LEAVES)
    if few and search.best[0] > bound * (1 + _GOOD_GAP):
        search.by_annealing(bound)
    if problem.num_replicas > 1 and search.best[0] > bound * (1 + _GOOD_GAP):
        search.by_slots()
    return search.part_L, bound


class _Search:
    """Keeps the best partition seen: least makespan, then least total cost, then fewest microbatches."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.best = (inf, inf, 0)
        self.part_L = np.zeros(0, np.int64)
        self.count = 0

    @property
    def mean(self) -> float:
        """Mean cost of the best partition's microbatches, empty ones of the last slot included."""
        replicas = self.problem.num_replicas
        return self.best[1] / (ceil(self.count / replicas) * replicas)

    def _offer(self, part_L: Ints, costs: list[float]) -> None:
        value = (sum_of_slowest(costs, self.problem.num_replicas), sum(costs), len(costs))
        if value < self.best:
            self.best, self.part_L, self.count = value, part_L, len(costs)

    def _pack(self, limit_V: list[float], chance: random.Random | None = None) -> list[float]:
        packed, part_L = pack_by_branch(self.problem, limit_V, chance=chance)
        costs = [one[0] for one in packed[len(limit_V) - 1]]
        self._offer(part_L, costs)
        return costs

    def quickly(self) -> float:
        """Tries little, for very many leaves, and returns the lower bound.

        Cuts of the row order come first, a tenth of the work of packing. Limits on the cost make microbatches more
        even; that gains at most the last slot, which matters only where slots are few.
        """
        self._cut(inf, few=True)
        bound = bound_makespan(self.problem, self.best[0])
        if self.best[0] > bound * (1 + _GOOD_GAP):
            self._pack([inf] * len(self.problem.leaves.branches))
        if self.best[0] > bound * (1 + _GOOD_GAP) and self.count * _GOOD_GAP < self.problem.num_replicas:
            self._narrow(self._cut, more_slots=1)
        return bound

    def _cut(self, limit: float, *, few: bool = False) -> list[float]:
        part_L = cut_in_order(self.problem, limit, few=few)
        costs = list(self.problem.cost_of_parts(part_L).tolist())
        self._offer(part_L, costs)
        return costs

    def by_branch(self, more_slots: int = _MORE_SLOTS) -> None:
        """Bottom-up packing."""
        branches = len(self.problem.leaves.branches)
        self._narrow(lambda limit: self._pack([limit] * branches), more_slots)

    def in_order(self) -> None:
        """Cuts of the row order."""
        self._narrow(self._cut, _MORE_SLOTS)

    def _narrow(self, attempt: Callable[[float], list[float]], more_slots: int) -> None:
        """Halves the way to the least limit at which the microbatches still fit some number of slots."""
        replicas = self.problem.num_replicas
        costs = attempt(inf)
        if replicas == 1:
            return
        fewest = ceil(len(costs) / replicas)
        for slots in range(fewest, fewest + more_slots):
            low, high = sum(costs) / (slots * replicas), max(costs)
            for _ in range(_HALVINGS):
                middle = (low + high) / 2
                tried = attempt(middle)
                if len(tried) <= slots * replicas:
                    high = min(middle, max(tried))
                else:
                    low = middle

    def evenly(self, bound: float) -> None:
        """Splits each tree into equal microbatches: as many as it needs at the mean cost of a microbatch."""
        replicas = self.problem.num_replicas
        top_V, tops = _trees(self.problem)
        if not tops:
            return
        slots = ceil(self.count / replicas)
        for more in range(-1, _MORE_SLOTS - 2):
            mean = bound / max(slots + more, 1)
            for spare in (1.05, 1.2):
                limits = self._even_limits(mean * spare, top_V, tops)
                self._pack([limits[top] if top >= 0 else mean * 1.25 for top in top_V])

    def by_annealing(self, bound: float) -> None:
        """Anneals the order of children; see `harts.plan.anneal`."""
        slots = ceil(self.count / self.problem.num_replicas)
        for part_L, costs in anneal_order(self.problem, bound, slots, _ANNEALING_STEPS):
            self._offer(part_L, costs)

    def by_slots(self) -> None:
        """Packs the leaves of each two neighbouring slots again, from the last two on: these are rarely full."""
        problem, replicas = self.problem, self.problem.num_replicas
        costs = problem.cost_of_parts(self.part_L).tolist()
        order_L = np.argsort(self.part_L, kind="stable")
        leaves = np.split(order_L, np.flatnonzero(np.diff(self.part_L[order_L])) + 1)
        bins = sorted(zip(costs, leaves, strict=True), key=_largest_first)
        for start in range(max(ceil(len(bins) / replicas) - 2, 0), -1, -1):
            window = bins[start * replicas : (start + 2) * replicas]
            leaf_X = np.sort(np.concatenate([one[1] for one in window]))
            inner = _Search(problem.subset(leaf_X))
            inner.by_branch(more_slots=1)
            if inner.best[0] < sum_of_slowest([one[0] for one in window], replicas):
                costs = inner.problem.cost_of_parts(inner.part_L).tolist()
                order_X = np.argsort(inner.part_L, kind="stable")
                parts = np.split(leaf_X[order_X], np.flatnonzero(np.diff(inner.part_L[order_X])) + 1)
                bins[start * replicas : (start + 2) * replicas] = zip(costs, parts, strict=True)
                bins.sort(key=_largest_first)
        part_L = np.empty_like(self.part_L)
        for _, leaf_X in bins:
            part_L[leaf_X] = leaf_X[0]
        self._offer(part_L, [one[0] for one in bins])

    def _even_limits(self, limit: float, top_V: list[int], tops: list[int]) -> list[float]:
        """For each tree, the least limit at which it needs no more microbatches than at `limit`."""

        def pack(limits: list[float]) -> list[list[Bin]]:
            limit_V = [limits[top] if top >= 0 else 0.0 for top in top_V]
            packed = pack_by_branch(self.problem, limit_V, keep=frozenset(tops))[0]
            return [packed[top] for top in tops]

        bins = pack([limit] * len(tops))
        count = [len(some) for some in bins]
        high = [some[-1][0] for some in bins]
        low = [sum(one[0] for one in some) / len(some) for some in bins]
        for _ in range(_HALVINGS):
            middle = [(a + b) / 2 for a, b in zip(low, high, strict=True)]
            for tree, some in enumerate(pack(middle)):
                if len(some) <= count[tree]:
                    high[tree] = min(middle[tree], some[-1][0])
                else:
                    low[tree] = middle[tree]
        return high

    def at_random(self, bound: float, leaves: int) -> None:
        """Packs bottom-up with some randomness, until about so many leaves were placed."""
        chance = random.Random(0)
        branches = len(self.problem.leaves.branches)
        for _ in range(min(_RANDOM_RESTARTS, leaves // self.problem.leaves.num_leaves)):
            limit = inf if self.problem.num_replicas == 1 else self.mean * (1 + 0.5 * chance.random())
            self._pack([limit] * branches, chance)
            if self.best[0] <= bound * (1 + _SLACK):
                return


def _largest_first(one: tuple[float, Ints]) -> tuple[float, int]:
    return -one[0], int(one[1][0])


def _trees(problem: Problem) -> tuple[list[int], list[int]]:
    """For each branch point the number of its tree, -1 above all trees, and the top branch point of each tree.

    Trees start below the first branch point that has several branch points below it.
    """
    branches = problem.leaves.branches
    top_V = [-1] * len(branches)
    crown = len(branches) - 1
    while len(branches[crown].branches) == 1:
        crown = branches[crown].branches[0]
    tops = list(branches[crown].branches)
    for tree, top in enumerate(tops):
        top_V[top] = tree
    for at in range(len(branches) - 1, -1, -1):
        if top_V[at] >= 0:
            for below in branches[at].branches:
                top_V[below] = top_V[at]
    return top_V, tops
