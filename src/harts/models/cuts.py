"""Where a tree is cut into pieces, and when each of them is done.

A piece is a run of rows in row order, and so is a subtree. A segment whose subtree is too large for a piece belongs to
the *spine*. Shape suffixes: S segments, P pieces.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from harts.chains import ORDER_CHUNK
from harts.layout import PackedTree
from harts.tree import PrefixTree

__all__ = ["done_after", "kept_in_one_sweep", "kept_in_two_sweeps", "piece_starts", "subtree_starts"]


def piece_starts(tree: PrefixTree, most_rows: int) -> list[int]:
    """Cuts into few pieces of at most so many rows; subtrees that fit into one stay whole.

    Args:
        tree: in row order.
        most_rows: at least 1.

    Returns:
        First rows of the pieces, the first one 0.
    """
    return _Cutter(tree, most_rows).cut()


def subtree_starts(tree: PrefixTree, live_rows: int) -> list[int]:
    """Cuts so that, where that can be, a piece and the spine above it have at most so many rows together.

    The spine is cut off from the subtrees that hang on it, several of which make a piece where they fit. Where a path
    alone is longer, pieces have at most a quarter of `live_rows`.

    Args:
        tree: in row order.
        live_rows: at least 1.

    Returns:
        First rows of the pieces, the first one 0.
    """
    return _Cutter(tree, live_rows, least=max(1, live_rows // 4)).cut()


@dataclass
class _Cutter:
    """Walks the segments in row order.

    Attributes:
        limit: rows.
        least: rows of a piece for which there is always room below a spine; None: a spine takes no room.
        starts: of the pieces so far.
        on_spine: whether the last piece has rows of the spine alone.
        room: most rows of the last piece.
    """

    tree: PrefixTree
    limit: int
    least: int | None = None
    starts: list[int] = field(default_factory=lambda: [0])
    on_spine: bool = True
    room: int = 0

    def cut(self) -> list[int]:
        start_S1 = np.append(self.tree.start_S, self.tree.num_rows)
        parents = self.tree.parent_S.tolist()
        ends = (self.tree.start_S + self.tree.sum_over_subtrees(self.tree.length_S)).tolist()
        above = [0] * (len(parents) + 1)  # rows of the spine down to each segment; the last entry is for roots
        segment = 0
        while segment < len(parents):
            start, stop, end = int(start_S1[segment]), int(start_S1[segment + 1]), ends[segment]
            over = above[parents[segment]]
            room = self.limit if self.least is None else max(self.limit - over, self.least)
            if end - start <= room:
                self._add_subtree(start, end, room)
                segment = int(np.searchsorted(start_S1, end))
            else:
                self._add_spine(start, stop, room)
                above[segment] = over + stop - start
                segment += 1
        return self.starts

    def _add_subtree(self, start: int, end: int, room: int) -> None:
        self.room = min(self.room, room)
        apart = self.on_spine and self.least is not None
        if apart or end - self.starts[-1] > self.room:
            self._begin(start, room)
        self.on_spine = False

    def _add_spine(self, start: int, stop: int, room: int) -> None:
        if self.least is not None:
            if not self.on_spine:
                self._begin(start, room)
            room = room if stop - start <= room else self.least
        self.on_spine, self.room = True, room
        while stop - self.starts[-1] > room:
            first = self.starts[-1]
            if start > first and stop - start <= room:
                self._begin(start, room)
                continue
            depth = int(self.tree.depth_T[first])
            aligned = (depth + room) // ORDER_CHUNK * ORDER_CHUNK - depth
            self._begin(first + (aligned if aligned > 0 else room), room)

    def _begin(self, start: int, room: int) -> None:
        if start > self.starts[-1]:
            self.starts.append(start)
        self.room = room


def done_after(pieces: Sequence[PackedTree]) -> list[int]:
    """The last piece that needs each piece: one that reads its rows, or that reads rows of such a one."""
    starts = np.array([piece.start for piece in pieces])
    done = list(range(len(pieces)))
    readers: list[set[int]] = [set() for _ in pieces]
    for index, piece in enumerate(pieces):
        for giver in np.unique(np.searchsorted(starts, piece.outside_D, side="right") - 1).tolist():
            readers[giver].add(index)
    for index in range(len(pieces) - 1, -1, -1):
        done[index] = max([index, *(done[reader] for reader in readers[index])])
    return done


def kept_in_two_sweeps(rows: Sequence[int], live_rows: int) -> set[int]:
    """The last pieces, as many as have at most so many rows together: the backward begins with them."""
    kept: set[int] = set()
    total = 0
    for index in range(len(rows) - 1, -1, -1):
        total += rows[index]
        if total > live_rows:
            break
        kept.add(index)
    return kept


def kept_in_one_sweep(rows: Sequence[int], done: Sequence[int], live_rows: int) -> set[int]:
    """Pieces whose graph is kept until they are done, those first that are done soonest.

    Where another one runs again, what lies before it is alive: some of what was when it first ran.

    Args:
        rows: of each piece.
        done: from `done_after`.
        live_rows: most rows of graphs at any time, that of the piece that runs included.
    """
    kept: set[int] = set()
    alive = [0] * len(rows)
    for index in sorted(range(len(rows)), key=lambda index: (done[index] - index, index)):
        later = range(index + 1, done[index] + 1)
        if all(rows[each] + alive[each] + rows[index] <= live_rows for each in later):
            kept.add(index)
            for each in later:
                alive[each] += rows[index]
    return kept
