"""The rows the doctor compares: trajectories that no other continues, duplicates once.

Shape suffixes: L tokens of a row, S segments.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from harts.trajectory import Trajectory
from harts.tree import PrefixTree, merge_symbols

__all__ = ["Row", "as_trajectory", "build_tree", "longest_rows"]


@dataclass(frozen=True, eq=False)
class Row:
    """A row that no other continues.

    Attributes:
        symbols_L: int32 [L], what has to agree for tokens to merge.
        token_ids_L: int32 [L], for its text.
        sampled_L: bool [L], whether any trajectory trains the token.
        id, group: of the trajectory.
        weight: trajectories that end on it.
    """

    symbols_L: NDArray[np.int32]
    token_ids_L: NDArray[np.int32]
    sampled_L: NDArray[np.bool_]
    id: str
    group: str
    weight: int = 1

    def __len__(self) -> int:
        """Number of tokens."""
        return len(self.symbols_L)

    def replace(self, start: int, stop: int, other: "Row", other_stop: int) -> "Row":
        """The row with tokens start:stop taken from `start:other_stop` of another, not sampled there."""
        span = slice(start, other_stop)
        parts = []
        for mine, its in (
            (self.symbols_L, other.symbols_L),
            (self.token_ids_L, other.token_ids_L),
            (self.sampled_L, np.zeros_like(other.sampled_L)),
        ):
            parts.append(np.concatenate([mine[:start], its[span], mine[stop:]]))
        return dataclasses.replace(self, symbols_L=parts[0], token_ids_L=parts[1], sampled_L=parts[2])


def build_tree(rows: Sequence[Row]) -> PrefixTree:
    """The prefix tree of rows; its trajectories are the rows in order."""
    return PrefixTree.build([as_trajectory(row.symbols_L, row.sampled_L) for row in rows])


def as_trajectory(symbols_L: NDArray[np.int32], sampled_L: NDArray[np.bool_]) -> Trajectory:
    """A trajectory of what `PrefixTree` merges by; sampled tokens are its trained ones."""
    mask_L = sampled_L
    if mask_L[0]:
        mask_L = mask_L.copy()
        mask_L[0] = False
    return Trajectory(token_ids=symbols_L, loss_mask=mask_L)


def longest_rows(tree: PrefixTree) -> list[Row]:
    """One Row for each trajectory that no other continues; duplicates once."""
    symbols = _numbered(tree.trajectories)
    is_leaf_S = np.ones(tree.num_segments, np.bool_)
    is_leaf_S[tree.parent_S[tree.parent_S >= 0]] = False
    ends = tree.end_segment_B
    weight_S = np.bincount(ends, minlength=tree.num_segments)
    rows: list[Row] = []
    taken: set[int] = set()
    for at, segment in enumerate(ends.tolist()):
        if is_leaf_S[segment] and segment not in taken:
            taken.add(segment)
            trajectory = tree.trajectories[at]
            rows.append(
                Row(
                    symbols_L=symbols[at],
                    token_ids_L=trajectory.token_ids,
                    sampled_L=tree.trained_T[tree.rows_of(at)],
                    id=trajectory.id,
                    group=trajectory.group,
                    weight=int(weight_S[segment]),
                )
            )
    return rows


def _numbered(trajectories: Sequence[Trajectory]) -> list[NDArray[np.int32]]:
    """int32 [L] per trajectory: numbers that agree where `PrefixTree` merges tokens (token ids, where those decide)."""
    symbols = merge_symbols(trajectories)
    if all(symbols_L.dtype == np.int32 for symbols_L in symbols):
        return [trajectory.token_ids for trajectory in trajectories]
    columns = [symbols_L.view(np.int64).reshape(len(symbols_L), -1) for symbols_L in symbols]
    numbers = np.unique(np.concatenate(columns), axis=0, return_inverse=True)[1].astype(np.int32)
    return list(np.split(numbers.reshape(-1), np.cumsum([len(column) for column in columns])[:-1]))
