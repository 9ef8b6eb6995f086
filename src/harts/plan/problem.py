"""The planner's problem in numbers: what a leaf costs alone, and what two sets of leaves save by meeting.

Three sizes of a microbatch matter: its predicted cost, its rows (those fed to linear attention, so that replayed ones
count) and its gathered keys. Each is a sum over its leaves, in row order, of the leaf's own size less the size of the
path shared with the leaf before; so two sets of leaves that branch apart at depth d together have the sum of their
sizes less `shared_cost(d)`, `whole_blocks(d)` and 0.

Shape suffixes: L leaves, V branch points, X whatever was asked for; a suffix 1 is one more entry.
"""

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from harts.blocks import whole_blocks
from harts.cost import Coefficients, count_shared
from harts.plan.leaves import Leaves

__all__ = ["Problem"]

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Problem:
    """Leaves with prices and limits.

    Attributes:
        leaves: of the tree.
        time: coefficients of the cost to balance.
        alone_L: float64 [L]: cost of each leaf's path as a microbatch of its own.
        token_budget: most rows of a microbatch, recomputed and replayed ones included.
        key_cap: most gathered keys of a microbatch.
        num_replicas: microbatches of a slot.
    """

    leaves: Leaves
    time: Coefficients
    alone_L: Floats
    token_budget: int
    key_cap: int
    num_replicas: int

    def shared_cost(self, depth_X: Ints) -> Floats:
        """float64 [X]: cost saved when two sets of leaves that branch apart at a depth run in one microbatch."""
        return self.time.of_each(count_shared(depth_X, window=self.time.window))

    # The same as lists, which loops over leaves read faster.

    @cached_property
    def alone(self) -> list[float]:
        """`alone_L`."""
        return list(self.alone_L.tolist())

    @cached_property
    def again(self) -> list[float]:
        """Shared cost at what each leaf has in common with the one before."""
        return list(self.shared_cost(self.leaves.common_L).tolist())

    @cached_property
    def shared_V(self) -> list[float]:
        """Shared cost at each branch point."""
        return list(self.shared_cost(np.array([branch.depth for branch in self.leaves.branches])).tolist())

    @cached_property
    def above_V(self) -> list[float]:
        """Shared cost at the branch point above each branch point."""
        return list(self.shared_cost(np.array([branch.above for branch in self.leaves.branches])).tolist())

    @cached_property
    def running(self) -> tuple[list[float], list[int], list[int]]:
        """Cost, rows and keys of the first 0, 1, ... L leaves in one microbatch, without the constant."""
        leaves = self.leaves
        rows_L = leaves.length_L - whole_blocks(leaves.common_L)
        sizes = (self.alone_L - self.shared_cost(leaves.common_L), rows_L, leaves.length_L)
        cost, rows, keys = (np.append(0, np.cumsum(size)).tolist() for size in sizes)
        return cost, rows, keys

    def subset(self, leaf_X: Ints) -> "Problem":
        """The same problem with some of the leaves only, int64 [X], ascending."""
        return replace(self, leaves=self.leaves.subset(leaf_X), alone_L=self.alone_L[leaf_X])

    def reordered(self, leaf_L: Ints) -> "Problem":
        """The same problem with the leaves in another depth-first order, int64 [L]: new place -> leaf."""
        return replace(self, leaves=self.leaves.reordered(leaf_L), alone_L=self.alone_L[leaf_L])

    def cost_of_parts(self, part_L: Ints) -> Floats:
        """float64 [parts]: cost of each part, in the order of their names in `part_L`."""
        leaf_L, shared_L = self.leaves.common_within(part_L)
        cost_L = self.alone_L[leaf_L] - self.shared_cost(shared_L)
        first = np.append(0, np.flatnonzero(np.diff(part_L[leaf_L])) + 1)
        cost_L[first] = self.alone_L[leaf_L[first]]
        return np.asarray(np.add.reduceat(cost_L, first))
