"""What the kernels of the gated delta rule read of a block tree: slots, boundaries where states change hands, order.

A slot is a place for one row in a block: slots of block e are `64 e : 64 (e + 1)`, blocks numbered as in `BlockTree`,
so that a chain's slots are contiguous. A boundary is the end of a block at which another chain starts. The recurrence
gives each chain to one program per value head and value tile; programs take chains in the order given here.

Shape suffixes: T rows, E blocks, S = 64 E slots, C chains, J boundaries, R rows with several slots, X slots of those
rows, L chains with a source. A suffix 1 is one more entry. Index tensors are int32 (the kernels widen offsets
themselves); -1 is "none".
"""

import heapq
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from harts.blocks import BLOCK, BlockTree
from harts.layout import PackedTree, _OnDevice

__all__ = ["Order", "Schedule", "backward_order", "forward_order", "get_order", "get_schedule"]

Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Schedule(_OnDevice):
    """Slots, boundaries and copies of one microbatch.

    Attributes:
        row_S: row of each slot, -1 behind the end of a partial block.
        own_row_S: the same, but -1 also where the row is replayed: each row has one own slot.
        target_S: where the gradient of a slot goes: its row if that has one slot only, else one of T .. T + X - 1, the
            slots of one row side by side, in the order of their chains; -1 where there is no row.
        row_R: rows with several slots.
        copies_R1: their slots' targets are `T + copies_R1[i] : T + copies_R1[i + 1]`.
        first_block_C1: blocks of chain c are `first_block_C1[c]:first_block_C1[c+1]`.
        boundary_E: boundary at the end of each block, -1 if no chain starts there.
        source_C: boundary from which each chain starts, -1 at a root.
        children_J1, child_L: chains that start at boundary j are `child_L[children_J1[j]:children_J1[j+1]]`,
            ascending: their state gradients are added up in this order.
        num_copies: X, host side.
    """

    row_S: Tensor
    own_row_S: Tensor
    target_S: Tensor
    row_R: Tensor
    copies_R1: Tensor
    first_block_C1: Tensor
    boundary_E: Tensor
    source_C: Tensor
    children_J1: Tensor
    child_L: Tensor
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


@dataclass(frozen=True, eq=False)
class Order(_OnDevice):
    """In which order programs take the chains.

    Attributes:
        forward_C: chains, sources before what starts from them.
        backward_C: chains, what starts from a chain before it.
    """

    forward_C: Tensor
    backward_C: Tensor


def get_schedule(packed: PackedTree) -> Schedule:
    """The schedule of a packed tree, on its device; made once and kept with the tree."""
    kept: dict[torch.device, Schedule] = packed.__dict__.setdefault("_gated_delta_rule_schedule", {})
    if packed.device not in kept:
        kept[packed.device] = _build(packed).to(packed.device)
    return kept[packed.device]


def get_order(packed: PackedTree, *, lanes: int) -> Order:
    """The order of a packed tree's chains, on its device; made once for each number of lanes and kept with the tree.

    Args:
        lanes: chains that run at a time, as far as known; a wrong number costs time only.
    """
    kept: dict[object, Order] = packed.__dict__.setdefault("_gated_delta_rule_orders", {})
    key = (lanes, packed.device)
    if key not in kept:
        order = Order(_int32(forward_order(packed.blocks, lanes)), _int32(backward_order(packed.blocks)))
        kept[key] = order.to(packed.device)
    return kept[key]


def forward_order(blocks: BlockTree, lanes: int) -> Ints:
    """Chains in the order in which `lanes` workers start them, each taking the ready chain with the longest path below.

    A chain comes after its source, so a program that waits for a state waits for one that runs or is done.
    """
    blocks_C = np.diff(blocks.first_block_C1)
    begin_C, end_C = _levels(blocks)
    deepest = end_C.tolist()
    source = blocks.source_C.tolist()
    children: list[list[int]] = [[] for _ in source]
    for chain in range(len(source) - 1, -1, -1):
        if source[chain] >= 0:
            children[source[chain]].append(chain)
            deepest[source[chain]] = max(deepest[source[chain]], deepest[chain])
    begin, length = begin_C.tolist(), blocks_C.tolist()
    later = [(0, chain) for chain in range(len(source)) if source[chain] < 0]  # (time from which it can run, chain)
    ready: list[tuple[int, int]] = []  # (less the blocks from its start to the deepest end, chain)
    free = [0] * max(lanes, 1)
    order: list[int] = []
    while later or ready:
        now = heapq.heappop(free)
        if not ready:
            now = max(now, later[0][0])
        while later and later[0][0] <= now:
            chain = heapq.heappop(later)[1]
            heapq.heappush(ready, (begin[chain] - deepest[chain], chain))
        chain = heapq.heappop(ready)[1]
        order.append(chain)
        heapq.heappush(free, now + length[chain])
        for child in children[chain]:
            heapq.heappush(later, (now + begin[child] - begin[chain], child))
    return np.array(order, np.int64)


def backward_order(blocks: BlockTree) -> Ints:
    """Chains in the order in which the backward starts them: all below a chain before it, else the deepest end first.

    A chain runs from its end and waits, at each boundary, for the gradients of the chains that start there; as they
    come before it, a program waits only for programs that run or are done, and those that wait cannot fill the device.
    """
    end_C = _levels(blocks)[1].tolist()
    source = blocks.source_C.tolist()
    missing = [0] * len(source)  # chains that start from this one and have not been placed
    for above in source:
        if above >= 0:
            missing[above] += 1
    ready = [(-end_C[chain], chain) for chain in range(len(source)) if not missing[chain]]
    heapq.heapify(ready)
    order: list[int] = []
    while ready:
        chain = heapq.heappop(ready)[1]
        order.append(chain)
        above = source[chain]
        if above >= 0:
            missing[above] -= 1
            if not missing[above]:
                heapq.heappush(ready, (-end_C[above], above))
    assert len(order) == len(source), "every chain is placed once"
    return np.array(order, np.int64)


def _levels(blocks: BlockTree) -> tuple[Ints, Ints]:
    """First block and end of each chain, as a number of blocks from the root of its path."""
    begin_C = blocks.first_depth_C // BLOCK
    return begin_C, begin_C + np.diff(blocks.first_block_C1)


def _int32(array: Ints) -> Tensor:
    return torch.from_numpy(array.astype(np.int32))


def _build(packed: PackedTree) -> Schedule:
    blocks = packed.blocks
    num_rows, num_blocks = blocks.num_rows, blocks.num_blocks
    row_S = _rows_by_block(packed)
    own_slot_T = _own_slots(blocks)
    own_row_S = np.full(num_blocks * BLOCK, -1, np.int64)
    own_row_S[own_slot_T] = np.arange(num_rows)

    used = np.flatnonzero(row_S >= 0)
    slots_T = np.bincount(row_S[used], minlength=num_rows)
    target_S = row_S.copy()
    shared = used[slots_T[row_S[used]] > 1]
    by_row = shared[np.argsort(row_S[shared], kind="stable")]
    target_S[by_row] = num_rows + np.arange(len(by_row))
    row_R = np.flatnonzero(slots_T > 1)

    starts = np.flatnonzero(blocks.source_block_C >= 0)
    boundary_block_J, boundary_L, children_J = np.unique(
        blocks.source_block_C[starts], return_inverse=True, return_counts=True
    )
    boundary_E = np.full(num_blocks, -1, np.int64)
    boundary_E[boundary_block_J] = np.arange(len(boundary_block_J))
    source_C = np.full(blocks.num_chains, -1, np.int64)
    source_C[starts] = boundary_L
    return Schedule(
        row_S=_int32(row_S),
        own_row_S=_int32(own_row_S),
        target_S=_int32(target_S),
        row_R=_int32(row_R),
        copies_R1=_int32(np.append(0, np.cumsum(slots_T[row_R]))),
        first_block_C1=_int32(blocks.first_block_C1),
        boundary_E=_int32(boundary_E),
        source_C=_int32(source_C),
        children_J1=_int32(np.append(0, np.cumsum(children_J))),
        child_L=_int32(starts[np.argsort(boundary_L, kind="stable")]),
        num_copies=len(by_row),
    )


def _rows_by_block(packed: PackedTree) -> Ints:
    """Row of every slot: the layout's blocks, which are in level order, put back in the order of `BlockTree`."""
    blocks = packed.blocks
    begin_C, _ = _levels(blocks)
    level_E = np.arange(blocks.num_blocks) + np.repeat(
        begin_C - blocks.first_block_C1[:-1], np.diff(blocks.first_block_C1)
    )
    row_E64 = np.empty((blocks.num_blocks, BLOCK), np.int64)
    row_E64[np.argsort(level_E, kind="stable")] = packed.linear.row_E64.cpu().numpy()
    row_S: Ints = np.where(row_E64 < blocks.num_rows, row_E64, -1).reshape(-1)
    return row_S


def _own_slots(blocks: BlockTree) -> Ints:
    """Slot of every row in the chain that owns it; rows before it in the chain's first block are replayed."""
    offset_C = blocks.first_block_C1[:-1] * BLOCK + blocks.first_depth_C - blocks.start_depth_C
    shift_C = offset_C - blocks.own_start_C1[:-1]
    own_slot_T: Ints = np.arange(blocks.num_rows) + np.repeat(shift_C, np.diff(blocks.own_start_C1))
    return own_slot_T
