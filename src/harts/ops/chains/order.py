"""In which order programs take the chains of a recurrence from a ticket counter.

Shape suffixes: C chains.
"""

import heapq
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from harts.blocks import Blocks
from harts.layout import PackedTree
from harts.ops.chains.schedule import blocks_of
from harts.transfer import to_int32

__all__ = ["ChainOrder", "backward_order", "chain_order", "forward_order"]

Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class ChainOrder:
    """In which order programs take the chains.

    Attributes:
        forward_C: int32, chains, sources before what starts from them.
        backward_C: int32, chains, what starts from a chain before it.
    """

    forward_C: Tensor
    backward_C: Tensor


def chain_order(packed: PackedTree, chunk: int, lanes: int) -> ChainOrder:
    """A layout (`PackedTree.layout`): the order of the chains.

    Args:
        packed: the rows.
        chunk: depths per block.
        lanes: chains that run at a time, as far as known; a wrong number costs time only.
    """
    blocks = packed.layout(blocks_of, chunk)
    return ChainOrder(
        to_int32(forward_order(blocks, lanes), packed.device), to_int32(backward_order(blocks), packed.device)
    )


def forward_order(blocks: Blocks, lanes: int) -> Ints:
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


def backward_order(blocks: Blocks) -> Ints:
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


def _levels(blocks: Blocks) -> tuple[Ints, Ints]:
    """First block and end of each chain, as a number of blocks from the root of its path."""
    begin_C = blocks.top_C // blocks.chunk
    return begin_C, begin_C + np.diff(blocks.first_block_C1)
