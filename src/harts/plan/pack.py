"""Packs leaves into microbatches: bottom-up best fit at every branch point, or the cheapest cuts of the row order.

A bin is a tuple (cost, rows, keys, leaf): sizes of a set of leaves with their whole paths up to the root, and one of
the leaves as its name. Two bins meet at the branch point where their paths part. What they save by meeting only
shrinks on the way up, so bins that did not fit together below never do above: at a branch point only bins of
different children need to be tried.
"""

import random
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from harts.blocks import whole_blocks
from harts.plan.problem import Problem

__all__ = ["Bin", "cut_in_order", "pack_by_branch"]

Ints = NDArray[np.int64]
Bin = tuple[float, int, int, int]

_TRIES = 16
"""Bins tried downwards from the best fit where rows or keys do not fit, and then of those that cost least."""


class _Packer:
    """Joins bins at one branch point after the other."""

    def __init__(self, problem: Problem, chance: random.Random | None) -> None:
        self.rows, self.keys, self.chance = problem.token_budget, problem.key_cap, chance
        self.whim = min(0.2, 3 / problem.leaves.num_leaves)  # a few whims a run, however many leaves
        self.joined_L = list(range(problem.leaves.num_leaves))  # a forest of joins; a bin's name is its root

    def meet(self, children: list[list[Bin]], limit: float, saved_cost: float, saved_rows: int) -> list[Bin]:
        """Bins of a branch point from those of its children, sorted by cost."""
        if len(children) == 1:
            return children[0]
        base = max(children, key=len)
        rest = [one for child in children if child is not base for one in child]
        if len(base) == 1:
            rest, base = rest + base, []
        rest.sort(key=lambda one: (-one[0], one[3]))
        if self.chance is not None:
            draw = self.chance.random
            rest.sort(key=lambda one: -one[0] * (0.9 + 0.2 * draw()))
        for one in rest:
            self._place(one, base, limit + saved_cost, saved_cost, saved_rows)
        return base

    def _place(self, one: Bin, bins: list[Bin], limit: float, saved_cost: float, saved_rows: int) -> None:
        """Joins the bin to the fullest one that takes it, or opens another."""
        cost, rows, keys, leaf = one
        most_rows, most_keys = self.rows + saved_rows - rows, self.keys - keys
        # Where rows are what fills a bin, the fullest that takes this one costs about as much per row as it does.
        fullest = bisect_left(bins, (limit - cost, np.inf, 0, 0)) - 1
        at = min(bisect_left(bins, (most_rows * (cost / rows), np.inf, 0, 0)) - 1 + _TRIES // 2, fullest)
        if self.chance is not None and at >= 0:  # now and then not the fullest, or none
            draw = self.chance.random()
            at = -1 if draw < self.whim else int(at * self.chance.random()) if draw < 2 * self.whim else at
        lowest = max(at - _TRIES, -1)
        for index in (*range(at, lowest, -1), *range(min(lowest, _TRIES - 1), -1, -1)):
            other = bins[index]
            if other[1] <= most_rows and other[2] <= most_keys:
                del bins[index]
                self.joined_L[leaf] = other[3]
                insort(bins, (cost + other[0] - saved_cost, rows + other[1] - saved_rows, keys + other[2], other[3]))
                return
        insort(bins, one)

    def part_L(self) -> Ints:
        """int64 [L]: the leaf that names each leaf's bin."""
        joined_L = np.array(self.joined_L)
        while True:
            further_L = joined_L[joined_L]
            if np.array_equal(further_L, joined_L):
                return joined_L
            joined_L = further_L


def pack_by_branch(
    problem: Problem, limit_V: Sequence[float], *, keep: Collection[int] = (), chance: random.Random | None = None
) -> tuple[dict[int, list[Bin]], Ints]:
    """Packs bottom-up: at every branch point joins bins of its children, the largest first, each where it fits best.

    The fewest bins at a branch point mean the fewest copies of the path above it. The bins of the child with the most
    are left in place and those of the others inserted, so that a bin moves O(log L) times: O(L log L) searches in all.

    Args:
        problem: leaves, prices and limits.
        limit_V: most cost of a bin that is joined at each branch point. A leaf that costs more stays alone.
        keep: branch points whose bins are returned too.
        chance: where given, order and joins are partly random.

    Returns:
        Bins by branch point, sorted by cost, of those to keep and of the last, which holds the whole forest; and
        int64 [L]: the name of each leaf's bin.
    """
    packer = _Packer(problem, chance)
    alone, length = problem.alone, problem.leaves.length_L.tolist()
    shared = problem.shared_V
    packed: dict[int, list[Bin]] = {}
    kept: dict[int, list[Bin]] = {}
    for at, branch in enumerate(problem.leaves.branches):
        children = [packed.pop(below) for below in branch.branches]
        children += [[(alone[leaf], length[leaf], length[leaf], leaf)] for leaf in branch.leaves]
        packed[at] = packer.meet(children, limit_V[at], shared[at], whole_blocks(branch.depth))
        if at in keep:
            kept[at] = packed[at].copy()
    return kept | packed, packer.part_L()


def cut_in_order(problem: Problem, limit: float, *, few: bool = False) -> Ints:
    """Cuts the row order into runs of leaves with the least total cost, in O(L).

    A run of leaves costs its rows and, once more, the path that its first leaf shares with the one before. The least
    cost of the first j leaves is therefore a minimum over a window of starts that only moves forward.

    Args:
        problem: leaves, prices and limits.
        limit: most cost of a run. A leaf that costs more stays alone.
        few: of equal cuts takes longer runs, so that there are few; else shorter ones, which spread more evenly.

    Returns:
        int64 [L]: the first leaf of each leaf's run.
    """
    cost_L1, rows_L1, keys_L1 = problem.running
    again, rows_again = problem.again, whole_blocks(problem.leaves.common_L).tolist()
    best = [0.0]  # least cost, beyond that of the uncut tree, of the first j leaves
    start_of: list[int] = []
    window: deque[tuple[float, int]] = deque()  # (cost, first leaf), costs never falling
    for last in range(problem.leaves.num_leaves):
        entry = best[last] + again[last]
        while window and (window[-1][0] > entry or (window[-1][0] == entry and not few)):
            window.pop()
        window.append((entry, last))
        while window[0][1] < last:
            first = window[0][1]
            if (
                cost_L1[last + 1] - cost_L1[first] + again[first] <= limit
                and rows_L1[last + 1] - rows_L1[first] + rows_again[first] <= problem.token_budget
                and keys_L1[last + 1] - keys_L1[first] <= problem.key_cap
            ):
                break
            window.popleft()
        best.append(window[0][0])
        start_of.append(window[0][1])
    part_L = np.empty(len(start_of), np.int64)
    stop = len(start_of)
    while stop:
        first = start_of[stop - 1]
        part_L[first:stop] = first
        stop = first
    return part_L
