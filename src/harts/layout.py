"""PackedTree: one microbatch as the index tensors that the ops read.

Shape suffixes: B trajectories, N tokens of all trajectories, T rows, C chains, E blocks, U head rows
(distinct pairs of a row and a temperature that reach the head), M targets (distinct trained pairs of a row and a
temperature). A suffix 1 is one more entry, 64 a block. Index tensors are int64. A map into T rows uses T itself for
"no row" (the ops append a row of zeros), a map into M targets uses M.
"""

import dataclasses
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from harts.blocks import BLOCK, BlockTree
from harts.transfer import send
from harts.tree import PrefixTree

__all__ = ["PackedTree", "pack"]

Ints = NDArray[np.int64]

CONV_WINDOW = 3
"""Ancestors that the short convolution reads: its 4 taps less the row itself."""


@dataclass(frozen=True, eq=False)
class _OnDevice:
    """A frozen set of tensors that moves as one."""

    def to(self, device: torch.device | str) -> Self:
        """The same on another device; host-side arrays stay where they are."""
        moved: dict[str, Any] = {}
        with torch.inference_mode(False):
            for item in dataclasses.fields(self):
                value = getattr(self, item.name)
                if isinstance(value, Tensor):
                    moved[item.name] = send(value, device)
                elif isinstance(value, _OnDevice):
                    moved[item.name] = value.to(device)
        return dataclasses.replace(self, **moved)


@dataclass(frozen=True, eq=False)
class LinearLayout(_OnDevice):
    """Blocks in level order: level l holds the blocks at depths [64 l, 64 l + 64), parents before children.

    Attributes:
        row_E64: int64 [E, 64]: rows of each block, T behind the end of a partial block.
        slot_T: int64 [T]: where each row's output lies in the flattened [E * 64] slots (in the chain that owns it).
        level_sizes: number of blocks per level, host side.
        parent_E: int64 [E]: position, within the level before, of the block that each block continues.
    """

    row_E64: Tensor
    slot_T: Tensor
    level_sizes: tuple[int, ...]
    parent_E: Tensor


@dataclass(frozen=True, eq=False)
class PackedTree(_OnDevice):
    """The rows of one microbatch, in an order in which every chain is contiguous, and all maps the ops need.

    Attributes:
        tree, blocks: what was packed, host side (numpy).
        token_ids_T, position_T: int64 [T], in row order.
        ancestor_3T: int64 [3, T]: the rows 1, 2 and 3 above each row, T where there is none.
        linear: the block tree for linear attention.
        key_cap: most keys and values that attention gathers for one call, host side.
        head_row_U, temperature_U: rows whose hidden state reaches the head (int64), and at which temperature (float64).
        head_of_M, token_M: int64: head row and token id of each target.
        target_of_N: int64 [N]: target of each token, M where it is not trained.
    """

    tree: PrefixTree
    blocks: BlockTree
    token_ids_T: Tensor
    position_T: Tensor
    ancestor_3T: Tensor
    linear: LinearLayout
    key_cap: int
    head_row_U: Tensor
    temperature_U: Tensor
    head_of_M: Tensor
    token_M: Tensor
    target_of_N: Tensor

    @property
    def num_rows(self) -> int:
        """T: rows that run through the model."""
        return self.tree.num_rows

    @property
    def num_tokens(self) -> int:
        """N: tokens of all trajectories."""
        return self.tree.num_tokens

    @property
    def device(self) -> torch.device:
        """Where the index tensors lie."""
        return self.token_ids_T.device

    @cached_property
    def lengths(self) -> list[int]:
        """Tokens per trajectory."""
        return np.diff(self.tree.offset_B1).tolist()  # type: ignore[no-any-return]

    @cached_property
    def row_of_N(self) -> Tensor:
        """int64 [N]: row of each token."""
        with torch.inference_mode(False):
            return _place(self.blocks.row_of_tree_T[self.tree.row_of_N], self.device)

    @cached_property
    def loss_mask_N(self) -> Tensor:
        """bool [N]: tokens that are trained."""
        with torch.inference_mode(False):
            return self.target_of_N < len(self.token_M)

    def split(self, values_N: Tensor) -> list[Tensor]:
        """One view per trajectory of a tensor over the N tokens, in the order given to `PrefixTree.build`."""
        if values_N.shape[0] != self.num_tokens:
            raise ValueError(
                f"values: expected one entry per token of all trajectories ({self.num_tokens}), came "
                f"{values_N.shape[0]}; pass what harts.logprobs returned for this packed tree"
            )
        return list(torch.split(values_N, self.lengths))


def pack(tree: PrefixTree, *, key_cap: int | None = None, device: torch.device | str = "cpu") -> PackedTree:
    """Lays a tree out as one microbatch.

    Args:
        tree: all trajectories of the microbatch.
        key_cap: most keys and values that attention gathers (or copies, where it reads pages) for one call, forward and
            backward. The keys of all chains can be many times a tree's rows, so chains run in calls of at most this
            many (a single longer chain is its own call). By default 262,144, or twice the tree's rows if that is more.
        device: where the index tensors go.

    Raises:
        ValueError: `key_cap` is not positive.
    """
    if key_cap is None:
        key_cap = max(262_144, 2 * tree.num_rows)
    if key_cap < 1:
        raise ValueError(f"key_cap: expected a positive number of rows, came {key_cap}; leave it out for the default")
    blocks = BlockTree.build(tree)
    num_rows = tree.num_rows
    tree_row_T = np.empty(num_rows, np.int64)
    tree_row_T[blocks.row_of_tree_T] = np.arange(num_rows)
    parent_T = tree.parent_T[tree_row_T]
    parent_T = np.where(parent_T >= 0, blocks.row_of_tree_T[parent_T], -1)
    head_row_U, temperature_U, head_of_M, token_M, target_of_N = _targets(tree, blocks, parent_T)
    place = partial(_place, device=device)
    with torch.inference_mode(False):  # a layout first used without gradients can be trained later
        return PackedTree(
            tree=tree,
            blocks=blocks,
            token_ids_T=place(tree.token_ids_T[tree_row_T]),
            position_T=place(tree.depth_T[tree_row_T]),
            ancestor_3T=_ancestors(place(parent_T), num_rows),
            linear=_linear_layout(blocks, _block_rows(blocks), device),
            key_cap=key_cap,
            head_row_U=place(head_row_U),
            temperature_U=send(torch.from_numpy(temperature_U), device),
            head_of_M=place(head_of_M),
            token_M=place(token_M),
            target_of_N=place(target_of_N),
        )


def _place(array: NDArray[Any], device: torch.device | str) -> Tensor:
    """An int64 tensor on a device, where possible in the memory of the array, which nobody else keeps."""
    return send(torch.from_numpy(np.ascontiguousarray(array)), device).long()


def _block_rows(blocks: BlockTree) -> Ints:
    """Rows of every block, chain by chain, [E, 64].

    Chains come in preorder, so when one starts, a buffer by depth still holds its ancestors.
    """
    row_E64 = np.full((blocks.num_blocks, BLOCK), blocks.num_rows, np.int64)
    slots = row_E64.reshape(-1)
    path = np.empty(int(blocks.length_C.max()), np.int64)
    start, first, length = blocks.own_start_C1.tolist(), blocks.first_depth_C.tolist(), blocks.length_C.tolist()
    offset, top = (blocks.first_block_C1 * BLOCK).tolist(), blocks.start_depth_C.tolist()
    for chain in range(blocks.num_chains):
        path[first[chain] : length[chain]] = np.arange(start[chain], start[chain + 1])
        rows = path[top[chain] : length[chain]]
        slots[offset[chain] : offset[chain] + len(rows)] = rows
    return row_E64


def _ancestors(parent_T: Tensor, num_rows: int) -> Tensor:
    """[3, T]: rows 1, 2 and 3 above each row; T where there is none, as for -1 in `parent_T`."""
    above = torch.nn.functional.pad(parent_T.masked_fill(parent_T < 0, num_rows), (0, 1), value=num_rows)
    ancestors = [above]
    for _ in range(CONV_WINDOW - 1):
        ancestors.append(above[ancestors[-1]])
    return torch.stack(ancestors)[:, :num_rows].contiguous()


def _linear_layout(blocks: BlockTree, row_E64: Ints, device: torch.device | str) -> LinearLayout:
    """Puts blocks, given chain by chain, in level order."""
    num_rows, num_blocks = blocks.num_rows, blocks.num_blocks
    first_level_C = blocks.first_depth_C // BLOCK
    offset_C = blocks.first_block_C1[:-1] * BLOCK
    level_E = np.repeat(first_level_C - blocks.first_block_C1[:-1], np.diff(blocks.first_block_C1))
    level_E += np.arange(num_blocks)
    order_E = np.argsort(level_E, kind="stable")
    place_E = np.empty(num_blocks, np.int64)
    place_E[order_E] = np.arange(num_blocks)
    # A row's output is taken where its own chain holds it, not where it is replayed.
    own_length_C = np.diff(blocks.own_start_C1)
    replayed_C = blocks.first_depth_C - blocks.start_depth_C
    chain_slot_T = np.arange(num_rows) + np.repeat(offset_C + replayed_C - blocks.own_start_C1[:-1], own_length_C)
    slot_T = place_E[chain_slot_T // BLOCK] * BLOCK + chain_slot_T % BLOCK
    level_sizes = np.bincount(level_E)
    level_start = np.cumsum(level_sizes) - level_sizes
    parent_E = blocks.parent_block_E[order_E]
    is_root = parent_E < 0
    parent_E = place_E[parent_E] - level_start[np.maximum(level_E[order_E] - 1, 0)]
    parent_E[is_root] = 0  # never read: level 0 starts from zero states
    place = partial(_place, device=device)
    return LinearLayout(place(row_E64[order_E]), place(slot_T), tuple(level_sizes.tolist()), place(parent_E))


def _targets(
    tree: PrefixTree, blocks: BlockTree, parent_T: Ints
) -> tuple[Ints, NDArray[np.float64], Ints, Ints, NDArray[np.int32]]:
    """Distinct (parent row, temperature) pairs that reach the head, the targets picked from them, and who reads them.

    Siblings are predicted by one row, so they share a head row; trajectories of different temperatures do not.
    """
    trained_N = np.concatenate([trajectory.loss_mask for trajectory in tree.trajectories])
    temperatures, kind_B = np.unique([trajectory.temperature for trajectory in tree.trajectories], return_inverse=True)
    num_kinds = len(temperatures)
    place_N = blocks.row_of_tree_T[tree.row_of_N[trained_N]]
    if num_kinds > 1:
        place_N = place_N * num_kinds + np.repeat(kind_B, np.diff(tree.offset_B1))[trained_N]
    target_M, target_of_trained = _distinct(place_N, tree.num_rows * num_kinds)
    row_M, kind_M = target_M // num_kinds, target_M % num_kinds
    head_U, head_of_M = _distinct(parent_T[row_M] * num_kinds + kind_M, tree.num_rows * num_kinds)
    token_T = np.empty(tree.num_rows, np.int64)
    token_T[blocks.row_of_tree_T] = tree.token_ids_T
    target_of_N = np.full(tree.num_tokens, len(target_M), np.int32)  # many: half the bytes on their way
    target_of_N[trained_N] = target_of_trained
    return head_U // num_kinds, temperatures[head_U % num_kinds], head_of_M, token_T[row_M], target_of_N


def _distinct(values_X: Ints, below: int) -> tuple[Ints, Ints]:
    """Distinct values, rising, and the place of each value among them, as `np.unique` gives them.

    Without sorting, but where few of the possible values occur: each trajectory may have a temperature of its own.
    """
    if below > 16 * len(values_X):
        return np.unique(values_X, return_inverse=True)
    occurs = np.zeros(below, np.bool_)
    occurs[values_X] = True
    place = np.cumsum(occurs) - 1
    return np.flatnonzero(occurs), place[values_X]
