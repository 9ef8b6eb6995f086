"""Where the rows of blocks lie, and where states change hands.

A slot is a place for one row in a block: slots of block e are `chunk * e : chunk * (e + 1)`, blocks numbered as in
`Blocks`, so that a chain's slots are contiguous. A boundary is the end of a block at which another chain starts, or
whose state is wanted, or it lies outside the piece. Rows are numbered own rows first, `0:T`, then the rows outside that
are replayed, `T:T + R`.

Shape suffixes: T own rows, R replayed rows from outside, E blocks, S = chunk * E slots, C chains, O boundaries outside,
J boundaries, W wanted states, D rows with several slots, X slots of those rows, L chains with a source. A suffix 1 is
one more entry.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from harts.blocks import Blocks
from harts.layout import PackedTree
from harts.transfer import to_int32, to_int64

__all__ = ["OutsideReads", "Schedule", "blocks_of", "local_rows", "outside_reads", "schedule", "wanted_blocks"]

Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class OutsideReads:
    """What a recurrence reads from outside a piece, as rows of the tree, ascending.

    Attributes:
        replayed_R: int64 [R]: rows that are fed again.
        state_O: int64 [O]: rows behind which a state is read: the last rows of blocks.
    """

    replayed_R: Ints
    state_O: Ints


@dataclass(frozen=True, eq=False)
class Schedule:
    """Slots, boundaries and copies; index tensors are int32 (kernels widen offsets themselves), -1 is "none".

    Attributes:
        num_rows: T + R, host side.
        num_outside: O, host side: boundaries 0 .. O - 1 lie outside.
        row_S: row of each slot, -1 behind the end of a partial block.
        own_row_S: the same, but -1 also where the row is replayed: each own row has one own slot.
        target_S: where the gradient of a slot goes: its row if that has one slot only, else one of T + R .. T + R + X
            - 1, the slots of one row side by side, in the order of their chains; -1 where there is no row.
        row_D: rows with several slots.
        copies_D1: their slots' targets are `T + R + copies_D1[i] : T + R + copies_D1[i + 1]`.
        first_block_C1: blocks of chain c are `first_block_C1[c]:first_block_C1[c+1]`.
        boundary_E: boundary at the end of each block, -1 if there is none.
        source_C: boundary from which each chain starts, -1 at a root.
        children_J1, child_L: chains that start at boundary j are `child_L[children_J1[j]:children_J1[j+1]]`,
            ascending: their state gradients are added up in this order. Behind them, where the state is wanted, comes
            C + w: the gradient of wanted state w.
        first_child_O: int64 [O]: the first chain that starts at each boundary outside.
        wanted_W: int64 [W]: boundary of each wanted state.
        alone_A: int64: those of them at which no chain starts.
        num_copies: X, host side.
    """

    num_rows: int
    num_outside: int
    row_S: Tensor
    own_row_S: Tensor
    target_S: Tensor
    row_D: Tensor
    copies_D1: Tensor
    first_block_C1: Tensor
    boundary_E: Tensor
    source_C: Tensor
    children_J1: Tensor
    child_L: Tensor
    first_child_O: Tensor
    wanted_W: Tensor
    alone_A: Tensor
    num_copies: int

    @property
    def num_blocks(self) -> int:
        """E."""
        return len(self.boundary_E)

    @property
    def num_chains(self) -> int:
        """C."""
        return len(self.source_C)

    @property
    def num_boundaries(self) -> int:
        """J."""
        return len(self.children_J1) - 1

    @property
    def num_wanted(self) -> int:
        """W."""
        return len(self.wanted_W)


def blocks_of(packed: PackedTree, chunk: int) -> Blocks:
    """A layout (`PackedTree.layout`): chains cut into blocks, host side."""
    return Blocks.of(packed.chains, chunk)


def outside_reads(packed: PackedTree, chunk: int) -> OutsideReads:
    """A layout (`PackedTree.layout`): what is read from outside, host side."""
    blocks = packed.layout(blocks_of, chunk)
    return OutsideReads(
        packed.outside_D[_replayed_outside(blocks)], packed.outside_D[np.unique(blocks.top_C[blocks.is_outside_C]) - 1]
    )


def _replayed_outside(blocks: Blocks) -> Ints:
    """Rows outside (see `harts.chains`) that are replayed: from the top of a block to where a chain leaves."""
    chains = blocks.chains
    if not chains.outside:
        return np.zeros(0, np.int64)
    # Depth at which each chain's path leaves the rows outside: where its first own row does.
    leaves_C = [0] * chains.num_chains
    for chain, (parent, row) in enumerate(zip(chains.parent_C.tolist(), chains.parent_row_C.tolist(), strict=True)):
        leaves_C[chain] = leaves_C[parent] if parent >= 0 else row + 1
    stop_C = np.array(leaves_C)
    here = blocks.top_C < stop_C  # if a chain's block starts among them, chains below own rows replay them too
    changes = np.zeros(chains.outside + 1, np.int64)
    np.add.at(changes, blocks.top_C[here], 1)
    np.add.at(changes, stop_C[here], -1)
    return np.flatnonzero(np.cumsum(changes)[:-1] > 0)


def wanted_blocks(blocks: Blocks, wanted: tuple[int, ...]) -> Ints:
    """Block whose end lies behind each own row; the rows are the last ones of full blocks."""
    slot_W = blocks.own_slot_T[np.array(wanted, np.int64)]
    assert (slot_W % blocks.chunk == blocks.chunk - 1).all(), "states are known at block boundaries only"
    return slot_W // blocks.chunk


def local_rows(blocks: Blocks) -> tuple[Ints, int]:
    """Row of every slot in this module's numbering, [S], -1 for none; and R."""
    chains = blocks.chains
    row_S = blocks.slot_rows().reshape(-1)
    read_R = _replayed_outside(blocks)
    place_P = np.full(chains.outside, -1, np.int64)
    place_P[read_R] = chains.num_rows + np.arange(len(read_R))
    local_P1 = np.concatenate([place_P, np.arange(chains.num_rows), [-1]])  # the last one is read for -1
    return local_P1[row_S], len(read_R)


def schedule(packed: PackedTree, chunk: int, wanted: tuple[int, ...] = ()) -> Schedule:
    """A layout (`PackedTree.layout`) of kernels that run chains side by side.

    Args:
        packed: the rows.
        chunk: depths per block.
        wanted: own rows, from 0, the last ones of full blocks, behind which the state is an output.
    """
    blocks = packed.layout(blocks_of, chunk)
    chains, device = blocks.chains, packed.device
    row_S, replayed = local_rows(blocks)
    num_rows = chains.num_rows + replayed
    own_row_S = np.full(len(row_S), -1, np.int64)
    own_row_S[blocks.own_slot_T] = np.arange(chains.num_rows)

    used = np.flatnonzero(row_S >= 0)
    slots_T = np.bincount(row_S[used], minlength=num_rows)
    target_S = row_S.copy()
    shared = used[slots_T[row_S[used]] > 1]
    by_row = shared[np.argsort(row_S[shared], kind="stable")]
    target_S[by_row] = num_rows + np.arange(len(by_row))
    row_D = np.flatnonzero(slots_T > 1)
    boundary_E, source_C, children_J1, child_L, wanted_W, num_outside = _boundaries(blocks, wanted)
    return Schedule(
        num_rows=num_rows,
        num_outside=num_outside,
        row_S=to_int32(row_S, device),
        own_row_S=to_int32(own_row_S, device),
        target_S=to_int32(target_S, device),
        row_D=to_int32(row_D, device),
        copies_D1=to_int32(np.append(0, np.cumsum(slots_T[row_D])), device),
        first_block_C1=to_int32(blocks.first_block_C1, device),
        boundary_E=to_int32(boundary_E, device),
        source_C=to_int32(source_C, device),
        children_J1=to_int32(children_J1, device),
        child_L=to_int32(child_L, device),
        first_child_O=to_int64(child_L[children_J1[:num_outside]], device),
        wanted_W=to_int64(wanted_W, device),
        alone_A=to_int64(wanted_W[np.diff(children_J1)[wanted_W] == 1], device),
        num_copies=len(by_row),
    )


def _boundaries(blocks: Blocks, wanted: tuple[int, ...]) -> tuple[Ints, Ints, Ints, Ints, Ints, int]:
    """Boundaries outside by depth, then the others by block; who starts at each, and the gradients that are given."""
    num_chains = blocks.chains.num_chains
    outside, inside = np.flatnonzero(blocks.is_outside_C), np.flatnonzero(blocks.source_C >= 0)
    top_O, boundary_of_outside = np.unique(blocks.top_C[outside], return_inverse=True)
    block_W = wanted_blocks(blocks, wanted)
    block_J, place = np.unique(np.concatenate([blocks.source_block_C[inside], block_W]), return_inverse=True)
    boundary_E = np.full(blocks.num_blocks, -1, np.int64)
    boundary_E[block_J] = len(top_O) + np.arange(len(block_J))
    source_C = np.full(num_chains, -1, np.int64)
    source_C[outside] = boundary_of_outside
    source_C[inside] = len(top_O) + place[: len(inside)]
    wanted_W = len(top_O) + place[len(inside) :]
    start_L = np.concatenate([np.flatnonzero(source_C >= 0), num_chains + np.arange(len(block_W))])
    boundary_L = np.concatenate([source_C[source_C >= 0], wanted_W])
    children_J = np.bincount(boundary_L, minlength=len(top_O) + len(block_J))
    child_L = start_L[np.argsort(boundary_L, kind="stable")]
    return boundary_E, source_C, np.append(0, np.cumsum(children_J)), child_L, wanted_W, len(top_O)
