"""Blocks level by level, for references: a level's blocks run together, each from the end of one of the level before.

Shape suffixes: T own rows, R replayed rows from outside, K rows of a block, E blocks, O states from outside, W wanted
states.
"""

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from harts.layout import PackedTree
from harts.ops.chains.schedule import blocks_of, local_rows, wanted_blocks
from harts.transfer import to_int64

__all__ = ["Levels", "levels"]


@dataclass(frozen=True, eq=False)
class Levels:
    """Blocks in level order.

    Attributes:
        row_EK: int64 [E, K]: rows of each block, numbered as in `harts.ops.chains.schedule`; T + R behind the end of a
            partial block.
        slot_T: int64 [T]: where each own row's output lies in the flattened [E * K] slots.
        level_sizes: number of blocks per level, host side.
        parent_E: int64 [E]: where each block starts. In level 0: 0 at a root, or 1 + the number of the state from
            outside. In other levels: the position of the block that it continues, within the level before.
        wanted_W: int64 [W]: block at whose end each wanted state is.
    """

    row_EK: Tensor
    slot_T: Tensor
    level_sizes: tuple[int, ...]
    parent_E: Tensor
    wanted_W: Tensor


def levels(packed: PackedTree, chunk: int, wanted: tuple[int, ...] = ()) -> Levels:
    """A layout (`PackedTree.layout`); the arguments are those of `harts.ops.chains.schedule`."""
    blocks = packed.layout(blocks_of, chunk)
    row_S, replayed = local_rows(blocks)
    num_rows, num_blocks = blocks.chains.num_rows + replayed, blocks.num_blocks
    count_C = np.diff(blocks.first_block_C1)
    first_level_C = np.zeros(blocks.chains.num_chains, np.int64)
    for chain in np.flatnonzero(blocks.source_C >= 0).tolist():
        source = blocks.source_C[chain]
        inside = blocks.source_block_C[chain] - blocks.first_block_C1[source]
        first_level_C[chain] = first_level_C[source] + inside + 1
    level_E = np.arange(num_blocks) + np.repeat(first_level_C - blocks.first_block_C1[:-1], count_C)
    order_E = np.argsort(level_E, kind="stable")
    place_E = np.empty(num_blocks, np.int64)
    place_E[order_E] = np.arange(num_blocks)
    level_sizes = np.bincount(level_E)
    level_start = np.cumsum(level_sizes) - level_sizes
    above_E = np.arange(-1, num_blocks - 1)
    above_E[blocks.first_block_C1[:-1]] = blocks.source_block_C
    parent_E = np.where(above_E >= 0, place_E[above_E] - level_start[np.maximum(level_E - 1, 0)], 0)
    outside = np.flatnonzero(blocks.is_outside_C)
    parent_E[blocks.first_block_C1[outside]] = 1 + np.unique(blocks.top_C[outside], return_inverse=True)[1]
    slot_T = place_E[blocks.own_slot_T // chunk] * chunk + blocks.own_slot_T % chunk
    row_EK = np.where(row_S >= 0, row_S, num_rows).reshape(num_blocks, chunk)
    device = packed.device
    return Levels(
        row_EK=to_int64(row_EK[order_E], device),
        slot_T=to_int64(slot_T, device),
        level_sizes=tuple(level_sizes.tolist()),
        parent_E=to_int64(parent_E[order_E], device),
        wanted_W=to_int64(place_E[wanted_blocks(blocks, wanted)], device),
    )
