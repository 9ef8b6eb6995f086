"""Blocks: what a recurrence over chunks of a path sees of chains.

A block is a chunk of consecutive depths of a path, `chunk` of them. The recurrent state is known at block boundaries
only, so a branch inside a block feeds the rows before it again (they are *replayed*). A chain's blocks run one after
the other; the first one starts from the state at the end of the block above it, which lies in the middle of another
chain, or outside the piece.

Shape suffixes: T rows, C chains, E blocks; a suffix 1 is one more entry. Blocks are numbered chain by chain.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import overload

import numpy as np
from numpy.typing import NDArray

from harts.chains import Chains, row_order
from harts.tree import PrefixTree

__all__ = ["BLOCK", "Blocks", "whole_blocks"]

BLOCK = 64
"""Depths per block of the gated delta rule: the chunk of its kernels."""

Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Blocks:
    """The blocks of chains.

    Attributes:
        chains: whose blocks they are.
        chunk: depths per block.
        first_block_C1: int64 [C+1]: blocks of chain c are `first_block_C1[c]:first_block_C1[c+1]`; only the last one of
            a chain can have fewer rows than `chunk`.
        source_C: int64 [C]: chain in which the block above the chain's first block lies; -1 at a root and outside.
        source_block_C: int64 [C]: that block, -1 at a root and outside: the chain starts from the state at its end.
        nesting_C: int64 [C]: sources above each chain, one of another.
    """

    chains: Chains
    chunk: int
    first_block_C1: Ints
    source_C: Ints
    source_block_C: Ints
    nesting_C: Ints

    @staticmethod
    def of(chains: Chains, chunk: int = BLOCK) -> "Blocks":
        """Cuts chains into blocks of `chunk` depths."""
        first = chains.depth_C // chunk
        first_block_C1 = np.append(0, np.cumsum(-(-chains.length_C // chunk) - first)).astype(np.int64)
        source_C = np.full(chains.num_chains, -1, np.int64)
        source_block_C, nesting_C = source_C.copy(), np.zeros(chains.num_chains, np.int64)
        for chain in np.flatnonzero(first > 0).tolist():
            # The block above may lie further up: the parent row's chain can itself start within this very block.
            source = chains.parent_C[chain]
            while source >= 0 and chains.depth_C[source] > first[chain] * chunk - 1:
                source = chains.parent_C[source]
            if source >= 0:
                source_C[chain] = source
                source_block_C[chain] = first_block_C1[source] + first[chain] - 1 - first[source]
                nesting_C[chain] = nesting_C[source] + 1
        return Blocks(chains, chunk, first_block_C1, source_C, source_block_C, nesting_C)

    @staticmethod
    def of_tree(tree: PrefixTree, chunk: int = BLOCK) -> "Blocks":
        """The blocks of a tree in row order."""
        tree = tree.reordered(row_order(tree))
        return Blocks.of(Chains.of(tree.parent_T, tree.depth_T), chunk)

    @property
    def num_blocks(self) -> int:
        """E."""
        return int(self.first_block_C1[-1])

    @cached_property
    def top_C(self) -> Ints:
        """int64 [C]: depth at which each chain's first block starts."""
        return self.chains.depth_C // self.chunk * self.chunk

    @cached_property
    def is_outside_C(self) -> NDArray[np.bool_]:
        """bool [C]: chains that start from a state outside: that behind row `top_C - 1`."""
        return (self.top_C > 0) & (self.source_C < 0)

    @property
    def replayed_rows(self) -> int:
        """Rows fed to the recurrence more than once, counted each further time."""
        return int((self.chains.depth_C - self.top_C).sum())

    @property
    def nesting(self) -> int:
        """Most chains of which one starts from another, at any path; the least possible in row order."""
        return int(self.nesting_C.max()) + 1

    @property
    def longest_path(self) -> int:
        """Length of the longest path, in blocks: the critical path of the recurrence."""
        return int(-(-self.chains.length_C.max() // self.chunk))

    def slot_rows(self) -> Ints:
        """Row in every place of every block, int64 [E, chunk]; -1 behind the end of a partial block.

        Chains come in preorder, so when one starts, a buffer by depth still holds its ancestors.
        """
        chains = self.chains
        row_EK = np.full((self.num_blocks, self.chunk), -1, np.int64)
        slots = row_EK.reshape(-1)
        path = np.empty(max(int(chains.length_C.max()), chains.outside), np.int64)
        path[: chains.outside] = np.arange(chains.outside)
        start, depth, length = chains.start_C1.tolist(), chains.depth_C.tolist(), chains.length_C.tolist()
        offset, top = (self.first_block_C1 * self.chunk).tolist(), self.top_C.tolist()
        for chain in range(chains.num_chains):
            path[depth[chain] : length[chain]] = np.arange(start[chain], start[chain + 1])
            rows = path[top[chain] : length[chain]]
            slots[offset[chain] : offset[chain] + len(rows)] = rows
        return row_EK

    @cached_property
    def own_slot_T(self) -> Ints:
        """int64 [T]: place of every own row, among all `E * chunk`, in the chain that owns it (not where replayed)."""
        chains = self.chains
        shift_C = self.first_block_C1[:-1] * self.chunk + chains.depth_C - self.top_C - chains.start_C1[:-1]
        return np.arange(chains.num_rows) + chains.outside + np.repeat(shift_C, chains.rows_C)


@overload
def whole_blocks(depth: int) -> int: ...


@overload
def whole_blocks(depth: Ints) -> Ints: ...


def whole_blocks(depth: int | Ints) -> int | Ints:
    """Of the rows above a depth on a path, those in whole blocks; the others are replayed where the path branches."""
    return depth // BLOCK * BLOCK
