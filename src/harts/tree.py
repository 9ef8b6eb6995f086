"""PrefixTree: the trie of a batch of trajectories, one row per distinct token.

Shape suffixes: B trajectories, N tokens of all trajectories, T rows (distinct tokens of the tree), S segments.
A suffix 1 is one more entry (`offset_B1`: B + 1 offsets). Ranges are half-open; -1 occurs only as "no parent".
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from harts.trajectory import Trajectory

__all__ = ["PrefixTree", "Share", "count_rows_without_routes"]

Ints = NDArray[np.int64]

Share = Literal["tree", "prefix", "none"]
"""What is merged: `tree` every common prefix, `prefix` a row into one that continues all of it, `none` nothing."""


@dataclass(frozen=True, eq=False)
class PrefixTree:
    """A forest of token ids in which every distinct prefix token is one row.

    Rows are numbered in depth-first preorder, subtrees in the order of their tokens, so that the numbering depends
    on the set of trajectories and not on their order. A row whose parent is the row before it continues its run; if
    row t has a child, t + 1 is one. Duplicates and prefixes of other trajectories stay trajectories of their own.

    Attributes:
        trajectories: as given to `build`.
        offset_B1: int64 [B+1]: tokens of trajectory i are `offset_B1[i]:offset_B1[i+1]` of the N tokens.
        row_of_N: int64 [N]: row of each token, trajectory after trajectory.
        token_ids_T: int32 [T].
        parent_T: int64 [T]: row of the token before; -1 at a root.
        depth_T: int64 [T]: number of tokens before it on its path, which is its position id.
        start_S: int64 [S]: first row of each segment (maximal run of rows with one set of trajectories through it).
        parent_S: int64 [S]: the segment that it continues; -1 at a root. Always smaller than the segment itself.
        share: what was merged, as given to `build`.
    """

    trajectories: tuple[Trajectory, ...]
    offset_B1: Ints
    row_of_N: Ints
    token_ids_T: NDArray[np.int32]
    parent_T: Ints
    depth_T: Ints
    start_S: Ints
    parent_S: Ints
    share: Share = "tree"

    @staticmethod
    def build(trajectories: Sequence[Trajectory], *, share: Share = "tree") -> "PrefixTree":
        """Merges trajectories into a tree, in O(N + B log B) token comparisons, without recursion.

        Args:
            trajectories: at least one. All groups go into one tree: they may share a system prompt.
            share: `"tree"` merges every common prefix. `"prefix"` merges a trajectory only into one that continues
                all of it, `"none"` merges nothing: the two baselines.

        Raises:
            ValueError: no trajectory was given, or `share` is unknown.
        """
        if share not in ("tree", "prefix", "none"):
            raise ValueError(f"share: expected 'tree', 'prefix' or 'none', got {share!r}")
        if len(trajectories) == 0:
            raise ValueError("trajectories: expected at least one, got none; there is nothing to train on")
        symbols = merge_symbols(trajectories)
        raw = [array.tobytes() for array in symbols]
        # Any total order of symbols puts common prefixes side by side and a prefix before what continues it.
        order = sorted(range(len(raw)), key=raw.__getitem__)
        common = _common_with_previous(symbols, order, share)
        return dataclasses.replace(_number_rows(tuple(trajectories), order, common), share=share)

    def reordered(self, order_S: Ints) -> "PrefixTree":
        """The same tree with its segments, and so its rows, in another depth-first preorder.

        Args:
            order_S: int64 [S]: segments of this tree in their new order, a parent before its children and nothing else
                between the segments of one subtree; `harts.chains.row_order` gives such orders.
        """
        if np.array_equal(order_S, np.arange(self.num_segments)):
            return self
        length_S = self.length_S[order_S]
        start_S = np.cumsum(length_S) - length_S
        place_S = np.empty(self.num_segments, np.int64)
        place_S[order_S] = np.arange(self.num_segments)
        row_T = np.arange(self.num_rows) + np.repeat(start_S[place_S] - self.start_S, self.length_S)
        old_T = np.empty(self.num_rows, np.int64)
        old_T[row_T] = np.arange(self.num_rows)
        parent_T, parent_S = self.parent_T[old_T], self.parent_S[order_S]
        return dataclasses.replace(
            self,
            row_of_N=row_T[self.row_of_N],
            token_ids_T=self.token_ids_T[old_T],
            parent_T=np.where(parent_T >= 0, row_T[parent_T], -1),
            depth_T=self.depth_T[old_T],
            start_S=start_S,
            parent_S=np.where(parent_S >= 0, place_S[parent_S], -1),
        )

    # -- sizes --------------------------------------------------------------------------------------------------

    @property
    def num_trajectories(self) -> int:
        """B: number of trajectories."""
        return len(self.trajectories)

    @property
    def num_tokens(self) -> int:
        """N: tokens of all trajectories, shared ones counted once per trajectory."""
        return len(self.row_of_N)

    @property
    def num_rows(self) -> int:
        """T: distinct tokens."""
        return len(self.token_ids_T)

    @property
    def num_segments(self) -> int:
        """S: number of segments."""
        return len(self.start_S)

    @property
    def sharing(self) -> float:
        """Tokens per row: N / T."""
        return self.num_tokens / self.num_rows

    # -- maps ---------------------------------------------------------------------------------------------------

    def rows_of(self, trajectory: int) -> Ints:
        """Rows of one trajectory's tokens, int64 [L]: its path from the root."""
        return self.row_of_N[self.offset_B1[trajectory] : self.offset_B1[trajectory + 1]]

    @cached_property
    def length_S(self) -> Ints:
        """int64 [S]: rows of each segment."""
        return np.diff(np.append(self.start_S, self.num_rows))

    @cached_property
    def depth_S(self) -> Ints:
        """int64 [S]: depth of each segment's first row."""
        return self.depth_T[self.start_S]

    @cached_property
    def segment_of_T(self) -> Ints:
        """int64 [T]: segment of each row."""
        return np.repeat(np.arange(self.num_segments), self.length_S)

    @cached_property
    def end_segment_B(self) -> Ints:
        """int64 [B]: the segment in which each trajectory ends (always with the segment's last row)."""
        last_row_B = self.row_of_N[self.offset_B1[1:] - 1]
        return np.searchsorted(self.start_S, last_row_B, side="right") - 1

    @cached_property
    def multiplicity_S(self) -> Ints:
        """int64 [S]: number of trajectories through each segment."""
        return self.sum_over_subtrees(np.bincount(self.end_segment_B, minlength=self.num_segments))

    @cached_property
    def trained_T(self) -> NDArray[np.bool_]:
        """bool [T]: rows whose token is trained in at least one trajectory."""
        mask_N = np.concatenate([trajectory.loss_mask for trajectory in self.trajectories])
        trained_T = np.zeros(self.num_rows, np.bool_)
        trained_T[self.row_of_N[mask_N]] = True
        return trained_T

    @cached_property
    def routes_T(self) -> NDArray[np.int16] | None:
        """int16 [T, Y, K]: recorded experts of each row, -1 where none is recorded; None if no trajectory has any."""
        shape = next((each.routes.shape[1:] for each in self.trajectories if each.routes is not None), None)
        if shape is None:
            return None
        routes_T = np.full((self.num_rows, *shape), -1, np.int16)
        recorded = [(i, each.routes) for i, each in enumerate(self.trajectories) if each.routes is not None]
        for index, routes in recorded:
            routes_T[self.rows_of(index)] = routes
        for index, routes in recorded:
            assert (routes_T[self.rows_of(index)] == routes).all(), "tokens of different routes were merged"
        return routes_T

    def sum_over_subtrees(self, value_S: Ints) -> Ints:
        """int64 [S]: for each segment, the sum of `value_S` over itself and all segments below it."""
        # In preorder the subtree of s is s:stop[s]; children come after their parent, so stops are final in reverse.
        stop = list(range(1, self.num_segments + 1))
        parent = self.parent_S.tolist()
        for segment in range(self.num_segments - 1, -1, -1):
            above = parent[segment]
            if above >= 0 and stop[segment] > stop[above]:
                stop[above] = stop[segment]
        total_S1 = np.concatenate([[0], np.cumsum(value_S)])
        return np.asarray(total_S1[stop] - total_S1[:-1], dtype=np.int64)

    def subset(self, trajectories: Sequence[int]) -> "PrefixTree":
        """The tree of some trajectories only: their rows in this tree's order, merged as they are here.

        No token is compared, so a microbatch costs no more than its own tokens. Where `share` is "tree", and either
        all or none of the trajectories have merge keys and routes, this is `build` of those trajectories.

        Args:
            trajectories: distinct indices into `self.trajectories`, at least one; the subset has them in this order.

        Raises:
            ValueError: no index, one twice, or one out of range.
        """
        index_X = np.asarray(trajectories, np.int64)
        _check_subset(index_X, self.num_trajectories)
        if np.array_equal(index_X, np.arange(self.num_trajectories)):
            return self
        old_N = np.concatenate([self.rows_of(index) for index in index_X.tolist()])
        kept_T, row_of_N = _distinct_rows(old_N, self.num_rows)
        above_T = self.parent_T[kept_T]  # paths are whole: a row's parent is kept with it
        parent_T = np.where(above_T >= 0, np.searchsorted(kept_T, above_T), -1)
        chosen = tuple(self.trajectories[index] for index in index_X.tolist())
        offset_B1 = np.append(0, np.cumsum(np.diff(self.offset_B1)[index_X]))
        is_head_T = parent_T != np.arange(-1, len(kept_T) - 1)
        is_head_T[0] = True
        start_S, parent_S = _segments(np.flatnonzero(is_head_T), parent_T, row_of_N[offset_B1[1:] - 1])
        return PrefixTree(
            chosen,
            offset_B1,
            row_of_N,
            self.token_ids_T[kept_T],
            parent_T,
            self.depth_T[kept_T],
            start_S,
            parent_S,
            self.share,
        )


def count_rows_without_routes(trajectories: Sequence[Trajectory], *, share: Share = "tree") -> int:
    """Rows that the tree would have if no routes were recorded: the rest of its rows is what forcing them costs."""
    free = [dataclasses.replace(each, routes=None) for each in trajectories]
    return PrefixTree.build(free, share=share).num_rows


def merge_symbols(trajectories: Sequence[Trajectory]) -> list[NDArray[np.void] | NDArray[np.int32]]:
    """What has to agree for two tokens to merge: the id and, where any trajectory has them, merge key and routes."""
    columns: list[list[NDArray[Any] | int]] = [[each.token_ids for each in trajectories]]
    if any(each.merge_keys is not None for each in trajectories):
        columns.append([0 if each.merge_keys is None else each.merge_keys for each in trajectories])
    if any(each.routes is not None for each in trajectories):
        columns.append(_route_keys(trajectories))
    if len(columns) == 1:
        return [each.token_ids for each in trajectories]
    symbols = []
    for index, trajectory in enumerate(trajectories):
        table = np.empty((len(trajectory), len(columns)), np.int64)
        for place, column in enumerate(columns):
            table[:, place] = column[index]
        symbols.append(table.view(np.dtype(f"V{8 * len(columns)}")).reshape(-1))
    return symbols


def _route_keys(trajectories: Sequence[Trajectory]) -> list[NDArray[Any] | int]:
    """A number per token that agrees where the routes agree, and that of no route where none is recorded.

    A random linear form modulo 2**64: different routes get one number with a chance of about 2**-64 a pair, which
    `PrefixTree.routes_T` would find.
    """
    shapes = {each.routes.shape[1:]: each for each in trajectories if each.routes is not None}
    if len(shapes) > 1:
        (one, _), (other, trajectory), *_ = shapes.items()
        raise ValueError(
            f"trajectory {trajectory.name}, field routes: expected {one[0]} layers and {one[1]} experts per token, as "
            f"others have, got {other[0]} and {other[1]}; record all with one model"
        )
    size = int(np.prod(next(iter(shapes))))
    factors = np.random.default_rng(0).integers(0, 2**64, size, np.uint64) | np.uint64(1)
    none = -int(factors.sum(dtype=np.uint64))
    keys: list[NDArray[Any] | int] = []
    for trajectory in trajectories:
        if trajectory.routes is None:
            keys.append(int(np.uint64(none % 2**64).astype(np.int64)))
        else:
            flat = trajectory.routes.reshape(len(trajectory), size)
            hashed = np.einsum("lf,f->l", flat, factors, dtype=np.uint64, casting="unsafe")
            keys.append(hashed.astype(np.int64))
    return keys


def _common_with_previous(
    symbols: Sequence[NDArray[np.void] | NDArray[np.int32]], order: list[int], share: Share
) -> list[int]:
    """For each trajectory in sorted order, the number of leading tokens it shares with the one before."""
    common = [0] * len(order)
    if share == "none":
        return common
    for at in range(1, len(order)):
        before, here = symbols[order[at - 1]], symbols[order[at]]
        length = min(len(before), len(here))
        differs = before[:length] != here[:length]
        first = int(differs.argmax())
        shared = first if differs[first] else length
        common[at] = shared if share == "tree" or shared == len(before) else 0
    return common


def _number_rows(trajectories: tuple[Trajectory, ...], order: list[int], common: list[int]) -> PrefixTree:
    """Gives each trajectory, in sorted order, new rows for what follows its common prefix."""
    lengths = np.array([len(trajectory) for trajectory in trajectories])
    offset_B1 = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    run_start = np.concatenate([[0], np.cumsum(lengths[order] - common)]).astype(np.int64)
    num_rows = int(run_start[-1])
    row_of_N = np.empty(offset_B1[-1], np.int64)
    token_ids_T = np.empty(num_rows, np.int32)
    branch_row = np.full(len(order), -1, np.int64)
    path = row_of_N[:0]
    for at, trajectory in enumerate(order):
        shared, first, stop = common[at], run_start[at], run_start[at + 1]
        rows = row_of_N[offset_B1[trajectory] : offset_B1[trajectory + 1]]
        rows[:shared] = path[:shared]
        rows[shared:] = np.arange(first, stop)
        token_ids_T[first:stop] = trajectories[trajectory].token_ids[shared:]
        if shared:
            branch_row[at] = path[shared - 1]
        path = rows
    new = run_start[1:] > run_start[:-1]  # an exact duplicate adds no row
    run_start_R, run_length_R = run_start[:-1][new], np.diff(run_start)[new]
    parent_T = np.arange(-1, num_rows - 1)
    parent_T[run_start_R] = branch_row[new]
    depth_T = np.arange(num_rows) + np.repeat(np.asarray(common)[new] - run_start_R, run_length_R)
    start_S, parent_S = _segments(run_start_R, parent_T, row_of_N[offset_B1[1:] - 1])
    return PrefixTree(trajectories, offset_B1, row_of_N, token_ids_T, parent_T, depth_T, start_S, parent_S)


def _segments(run_start_R: Ints, parent_T: Ints, last_row_B: Ints) -> tuple[Ints, Ints]:
    """First row and parent of each segment, from the first rows of runs and the last rows of trajectories.

    The set of trajectories changes where a run starts, behind a branch point and behind a trajectory's end.
    """
    branch_row_R = parent_T[run_start_R]
    starts = np.concatenate([run_start_R, branch_row_R[branch_row_R >= 0] + 1, last_row_B + 1])
    start_S = np.unique(starts[starts < len(parent_T)])
    parent_S = np.searchsorted(start_S, parent_T[start_S], side="right") - 1
    return start_S, parent_S


def _distinct_rows(row_N: Ints, num_rows: int) -> tuple[Ints, Ints]:
    """Distinct rows, rising, and the place of each entry among them; marked where many of all rows occur."""
    if num_rows > 16 * len(row_N):
        return np.unique(row_N, return_inverse=True)
    occurs_T = np.zeros(num_rows, np.bool_)
    occurs_T[row_N] = True
    return np.flatnonzero(occurs_T), (np.cumsum(occurs_T) - 1)[row_N]


def _check_subset(index_X: Ints, num_trajectories: int) -> None:
    if index_X.ndim != 1 or len(index_X) == 0:
        raise ValueError(f"trajectories: expected at least one index, got shape {list(index_X.shape)}; name some")
    if index_X.min() < 0 or index_X.max() >= num_trajectories:
        bad = int(index_X.min()) if index_X.min() < 0 else int(index_X.max())
        raise ValueError(f"trajectories: expected indices in [0, {num_trajectories}), got {bad}; index this tree")
    if len(np.unique(index_X)) < len(index_X):
        values, counts = np.unique(index_X, return_counts=True)
        raise ValueError(
            f"trajectories: expected distinct indices, got {int(values[counts.argmax()])} twice; name each once"
        )
