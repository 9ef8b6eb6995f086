"""Leaves of a prefix tree in row order: all that a planner needs to know of the rows.

A leaf is a row without children. In depth-first order, the paths of leaves i - 1 and i share `common_L[i]` rows, so a
set of leaves l0 < l1 < ... runs sum(length) - sum(common) rows, where the common length of two leaves is the least
`common_L` in between. No row is ever looked at: every count of a microbatch follows from these two arrays.

Shape suffixes: L leaves, V branch points, B trajectories, S segments; a suffix 1 is one more entry.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from harts.cost import leaf_paths
from harts.tree import PrefixTree

__all__ = ["Branch", "Leaves"]

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Branch:
    """A branch point: `depth` rows above it, and below it leaves and branch points.

    Attributes:
        depth: rows of the path down to and including the row that branches; 0 at the virtual root.
        above: depth of the next branch point above, 0 at the virtual root.
        leaves: numbers of the leaves directly below.
        branches: numbers of the branch points directly below; smaller than this one's.
    """

    depth: int
    above: int
    leaves: tuple[int, ...]
    branches: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Leaves:
    """The leaves of a tree in depth-first order.

    Attributes:
        length_L: int64 [L]: rows of each leaf's path.
        common_L: int64 [L]: rows that leaf i shares with leaf i - 1; 0 for the first.
        leaf_of_B: int64 [B]: the first leaf at or below the last row of each trajectory. A trajectory that ends
            there adds no row to a microbatch that has the leaf.
    """

    length_L: Ints
    common_L: Ints
    leaf_of_B: Ints

    @staticmethod
    def of(tree: PrefixTree) -> "Leaves":
        """Reads the leaves off a tree's segments, in O(S + B log S)."""
        segment_L, length_L, common_L = leaf_paths(tree)
        return Leaves(length_L, common_L, np.searchsorted(segment_L, tree.end_segment_B))

    def subset(self, leaf_X: Ints) -> "Leaves":
        """Some of the leaves only, int64 [X], ascending; of no trajectory."""
        common_X = np.zeros(len(leaf_X), np.int64)
        common_X[1:] = self.common_between(leaf_X[:-1], leaf_X[1:])
        return Leaves(self.length_L[leaf_X], common_X, np.zeros(0, np.int64))

    def reordered(self, leaf_L: Ints) -> "Leaves":
        """The same leaves in another depth-first order, int64 [L]: new place -> leaf; of no trajectory."""
        common_L = np.zeros(len(leaf_L), np.int64)
        first, second = leaf_L[:-1], leaf_L[1:]
        common_L[1:] = self.common_between(np.minimum(first, second), np.maximum(first, second))
        return Leaves(self.length_L[leaf_L], common_L, np.zeros(0, np.int64))

    @property
    def num_leaves(self) -> int:
        """L: number of leaves."""
        return len(self.length_L)

    @cached_property
    def branches(self) -> list[Branch]:
        """Branch points, each after those below it; the last is a virtual root above the forest."""
        done: list[Branch] = []
        depths = [0]
        below: list[tuple[list[int], list[int]]] = [([], [])]  # leaves and branches of the points on the current path
        commons = [*self.common_L.tolist()[1:], 0]
        for leaf, common in enumerate(commons):
            if common > depths[-1]:  # the leaf is the first child of a new branch point
                depths.append(common)
                below.append(([leaf], []))
                continue
            below[-1][0].append(leaf)
            while common < depths[-1]:
                depth, (leaves, branches) = depths.pop(), below.pop()
                if common > depths[-1]:
                    depths.append(common)
                    below.append(([], []))
                below[-1][1].append(len(done))
                done.append(Branch(depth, depths[-1], tuple(leaves), tuple(branches)))
        done.append(Branch(0, 0, tuple(below[0][0]), tuple(below[0][1])))
        return done

    @cached_property
    def _least_common(self) -> list[Ints]:
        """Sparse table: entry k holds the least `common_L` of [i, i + 2**k)."""
        table = [self.common_L]
        while 2 ** len(table) <= self.num_leaves:
            half = 2 ** (len(table) - 1)
            table.append(np.minimum(table[-1][:-half], table[-1][half:]))
        return table

    def common_between(self, first_X: Ints, second_X: Ints) -> Ints:
        """int64 [X]: rows shared by the paths of two leaves each, `first_X < second_X`."""
        level_X = np.frexp((second_X - first_X).astype(np.float64))[1] - 1
        shared_X = np.empty(len(first_X), np.int64)
        for level, table in enumerate(self._least_common):
            at = np.flatnonzero(level_X == level)
            shared_X[at] = np.minimum(table[first_X[at] + 1], table[second_X[at] - 2**level + 1])
        return shared_X

    def common_within(self, part_L: Ints) -> tuple[Ints, Ints]:
        """Leaves sorted by part and row order, and what each shares with the one before it in its part.

        Args:
            part_L: int64 [L]: the part that each leaf is in.

        Returns:
            `leaf_L` (int64 [L]) and `shared_L` (int64 [L]; 0 for the first leaf of a part).
        """
        leaf_L = np.argsort(part_L, kind="stable")
        shared_L = np.zeros(len(leaf_L), np.int64)
        follows = np.flatnonzero(part_L[leaf_L[1:]] == part_L[leaf_L[:-1]]) + 1
        shared_L[follows] = self.common_between(leaf_L[follows - 1], leaf_L[follows])
        return leaf_L, shared_L
