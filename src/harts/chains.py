"""Chains: runs of rows each of which is the child of the row before it; and the row order that everything uses.

Rows are numbered depth first, and at each branch that child comes first which continues the chain. Which one continues
is decided among *blocks*, chunks of 64 consecutive depths of a path, so that a recurrence over chunks nests as little
as it can. A run of rows in this order is a *piece* of the tree. Whatever its rows have above them outside the piece
lies on one path, that of its first row; these rows are numbered by depth, in front of the piece's own.

Shape suffixes: T rows, D rows outside (above the piece), C chains, S segments, E blocks; a suffix 1 is one more entry.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from harts.tree import PrefixTree

__all__ = ["ORDER_CHUNK", "Chains", "find_blocks", "row_order", "terminal_rows"]

ORDER_CHUNK = 64
"""Depths per block of the row order. Ops may have chunks of another length: results are the same, nesting is not."""

Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Chains:
    """The chains of a tree or of a piece of it, in row order. Rows `0:D` lie outside, the own rows are `D:D + T`.

    Attributes:
        outside: D, rows outside: one path from the root, in the order of their depths.
        start_C1: int64 [C+1]: rows of chain c that no earlier chain has are `start_C1[c]:start_C1[c+1]`; starts with D.
        depth_C: int64 [C]: depth of the first of them.
        parent_row_C: int64 [C]: row above the first of them, -1 at a root; below D where it lies outside.
    """

    outside: int
    start_C1: Ints
    depth_C: Ints
    parent_row_C: Ints

    @staticmethod
    def of(parent_T: Ints, depth_T: Ints, outside: int = 0) -> "Chains":
        """Reads chains off a row order: one starts wherever a row's parent is not the row before it.

        Args:
            parent_T: int64 [T]: parents of the own rows, numbered as above; -1 at a root.
            depth_T: int64 [T]: their depths.
            outside: D.
        """
        is_first_T = parent_T != np.arange(outside - 1, outside + len(parent_T) - 1)
        is_first_T[0] = True  # even where its parent is the row before
        first_C = np.flatnonzero(is_first_T)
        return Chains(outside, np.append(first_C, len(parent_T)) + outside, depth_T[first_C], parent_T[first_C])

    @property
    def num_chains(self) -> int:
        """C."""
        return len(self.depth_C)

    @property
    def num_rows(self) -> int:
        """T: own rows."""
        return int(self.start_C1[-1]) - self.outside

    @cached_property
    def rows_C(self) -> Ints:
        """int64 [C]: own rows of each chain."""
        return np.diff(self.start_C1)

    @cached_property
    def length_C(self) -> Ints:
        """int64 [C]: length of each chain's whole path, from the root to its last row."""
        return self.depth_C + self.rows_C

    @cached_property
    def parent_C(self) -> Ints:
        """int64 [C]: chain of the row above each chain; -1 at a root and where that row lies outside."""
        return np.searchsorted(self.start_C1, self.parent_row_C, side="right") - 1

    @cached_property
    def parent_T(self) -> Ints:
        """int64 [T]: row above each own row, -1 at a root."""
        parent_T = np.arange(self.outside - 1, self.outside + self.num_rows - 1)
        parent_T[self.start_C1[:-1] - self.outside] = self.parent_row_C
        return parent_T

    def with_outside(self) -> "Chains":
        """The same, with the rows outside as a chain of its own in front, if there are any."""
        if not self.outside:
            return self
        return Chains(
            0, np.append(0, self.start_C1), np.append(0, self.depth_C), np.append(np.int64(-1), self.parent_row_C)
        )


def row_order(tree: PrefixTree, chunk: int = ORDER_CHUNK) -> Ints:
    """The order of segments in which a recurrence over chunks of `chunk` rows nests least; int64 [S].

    A leaf block has number 1; an inner block has the largest number m of its children, or m + 1 if two of them have m
    (Strahler's number). The child with the largest number continues the chain (of equals, the one with the longest path
    below). A chain that starts in the middle of another then has a smaller number than the block it starts from, so
    chains nest at most as deep as the root's number; no decomposition does with fewer.

    Returns:
        For `PrefixTree.reordered`: segments of `tree`, in their new order.
    """
    terminal_E, parent_E = find_blocks(tree, chunk)
    continues_E = _choose_continuing(tree.depth_T[terminal_E], parent_E)
    return _segment_order(tree, terminal_E[continues_E], chunk)


def terminal_rows(tree: PrefixTree, chunk: int) -> Ints:
    """Last row of every block, ascending: rows that fill a block, and leaves.

    A partial block whose last row has a child is contained in the block of that child and is no block of its own.
    """
    is_leaf_T = np.append(tree.parent_T[1:] != np.arange(tree.num_rows - 1), True)
    return np.flatnonzero(is_leaf_T | (tree.depth_T % chunk == chunk - 1))


def find_blocks(tree: PrefixTree, chunk: int) -> tuple[Ints, Ints]:
    """Terminal row and parent block (-1 at a root) of every block; a parent comes before its children."""
    terminal_E = terminal_rows(tree, chunk)
    above_E = tree.depth_T[terminal_E] // chunk * chunk - 1
    parent_E = np.full(len(terminal_E), -1, np.int64)
    inner = np.flatnonzero(above_E >= 0)
    parent_E[inner] = np.searchsorted(terminal_E, _ancestor(tree, terminal_E[inner], above_E[inner]))
    return terminal_E, parent_E


def _ancestor(tree: PrefixTree, row_X: Ints, depth_X: Ints) -> Ints:
    """Row at depth `depth_X` on the path to each `row_X`; hops once per segment in between."""
    row_X = row_X.copy()
    segment_X = tree.segment_of_T[row_X]
    todo = np.arange(len(row_X))
    while len(todo):
        first = tree.start_S[segment_X[todo]]
        inside = tree.depth_T[first] <= depth_X[todo]
        here = todo[inside]
        row_X[here] = first[inside] + depth_X[here] - tree.depth_T[first[inside]]
        todo = todo[~inside]
        segment_X[todo] = tree.parent_S[segment_X[todo]]
    return row_X


def _choose_continuing(depth_E: Ints, parent_E: Ints) -> Ints:
    """Blocks that continue the chain of their parent."""
    num_blocks = len(parent_E)
    strahler = [1] * num_blocks
    reach = depth_E.tolist()  # depth of the deepest row below
    best = [-1] * num_blocks  # child that continues, of those seen so far
    parent = parent_E.tolist()
    for block in range(num_blocks - 1, -1, -1):
        above = parent[block]
        if above < 0:
            continue
        rival = best[above]
        if rival < 0:
            best[above] = block
            strahler[above] = strahler[block]
        else:
            if (strahler[block], reach[block]) >= (strahler[rival], reach[rival]):
                best[above] = block
            # the number so far is the largest child's, or one more once two children had it
            if strahler[block] == strahler[rival] and strahler[above] == strahler[rival]:
                strahler[above] += 1
            elif strahler[block] > strahler[above]:
                strahler[above] = strahler[block]
        if reach[block] > reach[above]:
            reach[above] = reach[block]
    return np.array([block for block in best if block >= 0], np.int64)


def _segment_order(tree: PrefixTree, continuing_row_X: Ints, chunk: int) -> Ints:
    """Segments in depth-first preorder, at each branch the one first that leads to a continuing block.

    Args:
        continuing_row_X: terminal rows of the blocks that continue a chain.
    """
    preferred = np.zeros(tree.num_segments, np.bool_)
    segment_X = tree.segment_of_T[continuing_row_X]
    floor_X = tree.depth_T[continuing_row_X] // chunk * chunk
    while len(segment_X):  # every segment that starts within a continuing block lies on its way
        starts_inside = tree.depth_S[segment_X] >= floor_X
        segment_X, floor_X = segment_X[starts_inside], floor_X[starts_inside]
        preferred[segment_X] = True
        segment_X = tree.parent_S[segment_X]
        floor_X, segment_X = floor_X[segment_X >= 0], segment_X[segment_X >= 0]
    children: list[list[int]] = [[] for _ in range(tree.num_segments)]
    roots: list[int] = []
    for segment, parent in enumerate(tree.parent_S.tolist()):
        (children[parent] if parent >= 0 else roots).append(segment)
    order: list[int] = []
    stack = roots[::-1]
    while stack:
        segment = stack.pop()
        order.append(segment)
        below = children[segment]
        if len(below) > 1:
            below = sorted(below, key=lambda child: not preferred[child])
        stack.extend(reversed(below))
    return np.array(order, np.int64)
