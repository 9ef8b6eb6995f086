"""BlockTree: blocks, chains, rounds and replayed rows: what the linear-attention recurrence sees of a PrefixTree.

A block is 64 consecutive depths of a path. The recurrent state is known at block boundaries only, so a branch inside
a block feeds the rows before it again (they are *replayed*). A chain is a maximal run of consecutive blocks, each
the continuing child of the one before; its state starts from the end of the block above its first one, which lies in
the middle of another chain. Chains of one round run together; a chain's round is one more than that of its source.

Shape suffixes: T rows, E blocks, C chains; a suffix 1 is one more entry. Blocks, chains and rows are numbered in row
order: depth-first preorder, the child that continues the chain first, so that a chain's own rows and blocks are
contiguous.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from harts.tree import PrefixTree

__all__ = ["BLOCK", "BlockTree", "count_replayed_rows"]

BLOCK = 64
"""Depths per block: the chunk length of the linear-attention kernel."""

Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class BlockTree:
    """Row order, chains and rounds of a tree.

    Attributes:
        row_of_tree_T: int64 [T]: row order -> where each row of the PrefixTree went.
        own_start_C1: int64 [C+1]: rows of chain c that no earlier chain has are `own_start_C1[c]:own_start_C1[c+1]`.
        first_depth_C: int64 [C]: depth of the first own row. The chain's blocks start at depth
            `first_depth_C // 64 * 64`; rows between are replayed.
        length_C: int64 [C]: depth of the last row + 1, the length of the chain's whole path.
        parent_row_C: int64 [C]: row above the first own row, -1 at a root.
        first_block_C1: int64 [C+1]: blocks of chain c are `first_block_C1[c]:first_block_C1[c+1]`; only the last one
            of a chain can have fewer than 64 rows.
        source_C: int64 [C]: chain in which the block above the chain's first block lies, -1 at a root.
        source_block_C: int64 [C]: that block, -1 at a root: the chain starts from the state at its end.
        round_C: int64 [C]: 0 at a root, else one more than the round of the source.
    """

    row_of_tree_T: Ints
    own_start_C1: Ints
    first_depth_C: Ints
    length_C: Ints
    parent_row_C: Ints
    first_block_C1: Ints
    source_C: Ints
    source_block_C: Ints
    round_C: Ints

    @staticmethod
    def build(tree: PrefixTree) -> "BlockTree":
        """Lays the tree out with the fewest rounds: the Strahler number of its block tree.

        A leaf block has number 1; an inner block has the largest number m of its children, or m + 1 if two of them
        have m. The child with the largest number continues the chain (of equals, the one with the longest path
        below). A chain that does not continue its source then has a smaller number than the block it starts from,
        so chains nest at most as deep as the root's number; no decomposition does with fewer.
        """
        terminal_E, parent_E = _find_blocks(tree)
        continues_E = _choose_continuing(tree.depth_T[terminal_E], parent_E)
        order_S = _row_order(tree, terminal_E[continues_E])
        length_S = tree.length_S[order_S]
        start_S = np.cumsum(length_S) - length_S
        row_of_tree_T = np.empty(tree.num_rows, np.int64)
        new_start_S = np.empty_like(start_S)
        new_start_S[order_S] = start_S
        row_of_tree_T[:] = np.arange(tree.num_rows) + np.repeat(new_start_S - tree.start_S, tree.length_S)
        return _lay_out_chains(tree, row_of_tree_T)

    # -- sizes --------------------------------------------------------------------------------------------------

    @property
    def num_rows(self) -> int:
        """T: rows of the tree."""
        return len(self.row_of_tree_T)

    @property
    def num_chains(self) -> int:
        """C: chains; also the number of leaf blocks."""
        return len(self.first_depth_C)

    @property
    def num_blocks(self) -> int:
        """E: blocks."""
        return int(self.first_block_C1[-1])

    @property
    def num_rounds(self) -> int:
        """Sequential calls of the recurrence."""
        return int(self.round_C.max()) + 1

    @cached_property
    def start_depth_C(self) -> Ints:
        """int64 [C]: depth at which each chain's first block starts."""
        return self.first_depth_C // BLOCK * BLOCK

    @cached_property
    def parent_C(self) -> Ints:
        """int64 [C]: chain of the row above each chain's first own row, -1 at a root."""
        return np.searchsorted(self.own_start_C1, self.parent_row_C, side="right") - 1

    @cached_property
    def linear_rows_C(self) -> Ints:
        """int64 [C]: rows that each chain feeds to the linear-attention kernel, replayed ones included."""
        return self.length_C - self.start_depth_C

    @cached_property
    def parent_block_E(self) -> Ints:
        """int64 [E]: the block from whose end each block starts, -1 at a root."""
        parent_E = np.arange(-1, self.num_blocks - 1)
        parent_E[self.first_block_C1[:-1]] = self.source_block_C
        return parent_E

    @property
    def replayed_rows(self) -> int:
        """Rows fed to the linear-attention kernel more than once, counted each further time."""
        return int((self.first_depth_C - self.start_depth_C).sum())

    @property
    def gathered_keys(self) -> int:
        """Sum of the chains' path lengths: keys that path-gathered attention reads."""
        return int(self.length_C.sum())

    @property
    def longest_path(self) -> int:
        """Length of the longest path, in blocks: the critical path of the recurrence."""
        return int((self.length_C.max() + BLOCK - 1) // BLOCK)


def count_replayed_rows(tree: PrefixTree) -> int:
    """Replayed rows of a tree without building its BlockTree: rows of all blocks less the rows of the tree."""
    depth_E = tree.depth_T[_terminal_rows(tree)]
    return int((depth_E % BLOCK + 1).sum()) - tree.num_rows


def _terminal_rows(tree: PrefixTree) -> Ints:
    """Last row of every block, ascending: rows that fill a block, and leaves.

    A partial block whose last row has a child is contained in the block of that child and is no block of its own.
    """
    is_leaf_T = np.append(tree.parent_T[1:] != np.arange(tree.num_rows - 1), True)
    return np.flatnonzero(is_leaf_T | (tree.depth_T % BLOCK == BLOCK - 1))


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


def _find_blocks(tree: PrefixTree) -> tuple[Ints, Ints]:
    """Terminal row and parent block (-1 at a root) of every block; a parent comes before its children."""
    terminal_E = _terminal_rows(tree)
    above_E = tree.depth_T[terminal_E] // BLOCK * BLOCK - 1
    parent_E = np.full(len(terminal_E), -1, np.int64)
    inner = np.flatnonzero(above_E >= 0)
    parent_E[inner] = np.searchsorted(terminal_E, _ancestor(tree, terminal_E[inner], above_E[inner]))
    return terminal_E, parent_E


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


def _row_order(tree: PrefixTree, continuing_row_X: Ints) -> Ints:
    """Segments in depth-first preorder, at each branch the one first that leads to a continuing block.

    Args:
        continuing_row_X: terminal rows of the blocks that continue a chain.
    """
    preferred = np.zeros(tree.num_segments, np.bool_)
    segment_X = tree.segment_of_T[continuing_row_X]
    floor_X = tree.depth_T[continuing_row_X] // BLOCK * BLOCK
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


def _lay_out_chains(tree: PrefixTree, row_of_tree_T: Ints) -> BlockTree:
    """Reads the chains off the row order: a chain starts wherever a row's parent is not the row before it."""
    num_rows = tree.num_rows
    tree_row_T = np.empty(num_rows, np.int64)
    tree_row_T[row_of_tree_T] = np.arange(num_rows)
    depth_T = tree.depth_T[tree_row_T]
    parent_T = tree.parent_T[tree_row_T]
    parent_T = np.where(parent_T >= 0, row_of_tree_T[parent_T], -1)
    is_head_T = parent_T != np.arange(-1, num_rows - 1)
    is_head_T[0] = True  # a root, though its parent, -1, looks like the row before
    own_start_C = np.flatnonzero(is_head_T)
    own_start_C1 = np.append(own_start_C, num_rows)
    first_depth_C = depth_T[own_start_C]
    length_C = depth_T[own_start_C1[1:] - 1] + 1
    first_block = first_depth_C // BLOCK
    num_blocks_C = (length_C + BLOCK - 1) // BLOCK - first_block
    first_block_C1 = np.concatenate([[0], np.cumsum(num_blocks_C)]).astype(np.int64)
    parent_row_C = parent_T[own_start_C]
    above_C = np.searchsorted(own_start_C, parent_row_C, side="right") - 1  # chain of the parent row
    source_C = np.full(len(own_start_C), -1, np.int64)
    source_block_C = source_C.copy()
    round_C = np.zeros(len(own_start_C), np.int64)
    for chain in np.flatnonzero(first_block > 0).tolist():
        # The block above may lie further up: the parent row's chain can itself start within this very block.
        source = above_C[chain]
        while first_depth_C[source] > first_block[chain] * BLOCK - 1:
            source = above_C[source]
        source_C[chain] = source
        source_block_C[chain] = first_block_C1[source] + first_block[chain] - 1 - first_block[source]
        round_C[chain] = round_C[source] + 1
    return BlockTree(
        row_of_tree_T=row_of_tree_T,
        own_start_C1=own_start_C1,
        first_depth_C=first_depth_C,
        length_C=length_C,
        parent_row_C=parent_row_C,
        first_block_C1=first_block_C1,
        source_C=source_C,
        source_block_C=source_block_C,
        round_C=round_C,
    )
