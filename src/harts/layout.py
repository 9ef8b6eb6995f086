"""PackedTree: one microbatch, or a piece of one, as the index tensors that the ops read.

Shape suffixes: B trajectories, N tokens of all trajectories, T rows, D rows outside a piece, U head rows (distinct
pairs of a row and a temperature that reach the head), M targets (distinct trained pairs of a row and a temperature).
Index tensors are int64. A map into M targets uses M itself for "no target".
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from harts.chains import Chains, row_order
from harts.transfer import OnDevice, send, to_int64
from harts.tree import PrefixTree

__all__ = ["PackedTree", "pack"]

Ints = NDArray[np.int64]
_Options = ParamSpec("_Options")
_Layout = TypeVar("_Layout")


@dataclass(frozen=True, eq=False)
class PackedTree(OnDevice):
    """The rows of one microbatch and what every op reads of them; or those of a piece, a run of its rows.

    Ops number the rows outside a piece, which lie on one path, `0:D`, and the piece's own rows `D:D + T`; see
    `harts.chains`. What an op must know beyond this it builds itself, with `layout`.

    Attributes:
        tree: the whole microbatch, host side (numpy), its rows in row order.
        start: row of the tree that is the first of the piece; 0 for a whole tree.
        chains: the chains of the piece, host side.
        token_ids_T, position_T: int64 [T].
        key_cap: most keys and values that attention gathers for one call, host side.
        head_row_U, temperature_U: own rows, counted from 0, whose hidden state reaches the head (int64, ascending), and
            at which temperature (float64).
        head_of_M, token_M: int64: head row and token id of each target.
        target_of_N: int64 [N]: target of each token; M where it is not trained. Empty in a piece.
    """

    tree: PrefixTree
    start: int
    chains: Chains
    token_ids_T: Tensor
    position_T: Tensor
    key_cap: int
    head_row_U: Tensor
    temperature_U: Tensor
    head_of_M: Tensor
    token_M: Tensor
    target_of_N: Tensor
    _layouts: dict[tuple[Any, ...], Any] = field(default_factory=dict, init=False, repr=False)

    @property
    def num_rows(self) -> int:
        """T: rows that run through the model."""
        return self.chains.num_rows

    @property
    def num_outside(self) -> int:
        """D: rows above a piece; 0 for a whole tree."""
        return self.chains.outside

    @property
    def is_whole(self) -> bool:
        """Whether these are all rows of the tree."""
        return self.num_rows == self.tree.num_rows

    @property
    def num_tokens(self) -> int:
        """N: tokens of all trajectories of the whole tree."""
        return self.tree.num_tokens

    @property
    def device(self) -> torch.device:
        """Where the index tensors lie."""
        return self.token_ids_T.device

    @cached_property
    def outside_D(self) -> Ints:
        """int64 [D]: the rows outside, as rows of the tree."""
        return _path_above(self.tree, self.start)

    @cached_property
    def lengths(self) -> list[int]:
        """Tokens per trajectory."""
        return np.diff(self.tree.offset_B1).tolist()  # type: ignore[no-any-return]

    @cached_property
    def row_of_N(self) -> Tensor:
        """int64 [N]: row of the tree of each token."""
        with torch.inference_mode(False):
            return to_int64(self.tree.row_of_N, self.device)

    @cached_property
    def loss_mask_N(self) -> Tensor:
        """bool [N]: tokens that are trained."""
        trained_N = np.concatenate([trajectory.loss_mask for trajectory in self.tree.trajectories])
        with torch.inference_mode(False):
            return send(torch.from_numpy(trained_N), self.device)

    def layout(
        self,
        build: Callable[Concatenate["PackedTree", _Options], _Layout],
        *options: _Options.args,
        **names: _Options.kwargs,
    ) -> _Layout:
        """`build(self, *options)`, what one op must know of these rows: built when first asked for, then kept.

        Args:
            build: gives a frozen object whose tensors lie on `device`; a function of the layout and the options alone.
            options, names: hashable.
        """
        key = (build, *options, *names.items())
        if key not in self._layouts:
            with torch.inference_mode(False):  # a layout that was first used without gradients is trained later
                self._layouts[key] = build(self, *options, **names)
        return self._layouts[key]  # type: ignore[no-any-return]

    def split(self, values_N: Tensor) -> list[Tensor]:
        """One view per trajectory of a tensor over the N tokens, in the order given to `PrefixTree.build`."""
        if values_N.shape[0] != self.num_tokens:
            raise ValueError(
                f"values: expected one entry per token of all trajectories ({self.num_tokens}), got "
                f"{values_N.shape[0]}; pass what harts.logprobs returned for this packed tree"
            )
        return list(torch.split(values_N, self.lengths))

    def pieces(self, starts: Sequence[int]) -> list["PackedTree"]:
        """Cuts a whole tree into runs of its rows, each a layout of its own on the same device.

        A target belongs to the piece that has the row which predicts it.

        Args:
            starts: first rows of the pieces, ascending, the first one 0.

        Raises:
            ValueError: this is a piece already, or `starts` are not ascending rows from 0.
        """
        if not self.is_whole:
            raise ValueError("pieces: expected a whole tree, got a piece of one; cut the tree it was cut from")
        edges = [*starts, self.num_rows]
        if edges[0] != 0 or any(stop <= start for start, stop in pairwise(edges)):
            raise ValueError(
                f"starts: expected ascending rows below {self.num_rows}, the first one 0, got {list(starts)}"
            )
        heads = torch.searchsorted(self.head_row_U, torch.tensor(edges, device=self.device)).tolist()
        with torch.inference_mode(False):
            return [
                self._piece(slice(*rows), slice(*part))
                for rows, part in zip(pairwise(edges), pairwise(heads), strict=True)
            ]

    def _piece(self, rows: slice, heads: slice) -> "PackedTree":
        outside_D = _path_above(self.tree, rows.start)
        parent_T = self.tree.parent_T[rows]
        # A row outside is numbered by its depth, an own row behind those.
        parent_T = np.where(
            parent_T >= rows.start,
            parent_T - rows.start + len(outside_D),
            np.where(parent_T >= 0, self.tree.depth_T[parent_T], -1),
        )
        is_here_M = (self.head_of_M >= heads.start) & (self.head_of_M < heads.stop)
        return PackedTree(
            tree=self.tree,
            start=rows.start,
            chains=Chains.of(parent_T, self.tree.depth_T[rows], len(outside_D)),
            token_ids_T=self.token_ids_T[rows],
            position_T=self.position_T[rows],
            key_cap=self.key_cap,
            head_row_U=self.head_row_U[heads] - rows.start,
            temperature_U=self.temperature_U[heads],
            head_of_M=self.head_of_M[is_here_M] - heads.start,
            token_M=self.token_M[is_here_M],
            target_of_N=self.target_of_N[:0],
        )


def pack(tree: PrefixTree, *, key_cap: int | None = None, device: torch.device | str = "cpu") -> PackedTree:
    """Lays a tree out as one microbatch.

    Args:
        tree: all trajectories of the microbatch. It is put into row order.
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
        raise ValueError(f"key_cap: expected a positive number of rows, got {key_cap}; leave it out for the default")
    tree = tree.reordered(row_order(tree))
    head_row_U, temperature_U, head_of_M, token_M, target_of_N = _targets(tree)
    with torch.inference_mode(False):  # a layout first used without gradients can be trained later
        return PackedTree(
            tree=tree,
            start=0,
            chains=Chains.of(tree.parent_T, tree.depth_T),
            token_ids_T=to_int64(tree.token_ids_T, device),
            position_T=to_int64(tree.depth_T, device),
            key_cap=key_cap,
            head_row_U=to_int64(head_row_U, device),
            temperature_U=send(torch.from_numpy(temperature_U), device),
            head_of_M=to_int64(head_of_M, device),
            token_M=to_int64(token_M, device),
            target_of_N=to_int64(target_of_N, device),
        )


def _path_above(tree: PrefixTree, row: int) -> Ints:
    """Rows of the tree above a row, from the root."""
    parent = int(tree.parent_T[row])
    if parent < 0:
        return np.zeros(0, np.int64)
    parts = []
    segment = int(tree.segment_of_T[parent])
    while segment >= 0:
        first = int(tree.start_S[segment])
        parts.append(np.arange(first, parent + 1))
        parent, segment = int(tree.parent_T[first]), int(tree.parent_S[segment])
    return np.concatenate(parts[::-1])


def _targets(tree: PrefixTree) -> tuple[Ints, NDArray[np.float64], Ints, Ints, NDArray[np.int32]]:
    """Distinct (parent row, temperature) pairs that reach the head, the targets picked from them, and who reads them.

    Siblings are predicted by one row, so they share a head row; trajectories of different temperatures do not.
    """
    trained_N = np.concatenate([trajectory.loss_mask for trajectory in tree.trajectories])
    temperatures, kind_B = np.unique([trajectory.temperature for trajectory in tree.trajectories], return_inverse=True)
    num_kinds = len(temperatures)
    place_N = tree.row_of_N[trained_N]
    if num_kinds > 1:
        place_N = place_N * num_kinds + np.repeat(kind_B, np.diff(tree.offset_B1))[trained_N]
    target_M, target_of_trained = _distinct(place_N, tree.num_rows * num_kinds)
    row_M, kind_M = target_M // num_kinds, target_M % num_kinds
    head_U, head_of_M = _distinct(tree.parent_T[row_M] * num_kinds + kind_M, tree.num_rows * num_kinds)
    target_of_N = np.full(tree.num_tokens, len(target_M), np.int32)  # many: half the bytes on their way
    target_of_N[trained_N] = target_of_trained
    token_M = tree.token_ids_T[row_M].astype(np.int64)
    return head_U // num_kinds, temperatures[head_U % num_kinds], head_of_M, token_M, target_of_N


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
