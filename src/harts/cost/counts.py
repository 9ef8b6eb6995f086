"""Counts of what a tree holds, and coefficients that turn them into FLOPs, seconds or bytes.

A microbatch has a price that is linear in its paths. Each of its leaves, in depth-first order, counts with its whole
path (`count_paths`), less what it shares with the leaf before (`count_shared`). Everything that prices a tree, a
microbatch or a plan adds these two up.

Shape suffixes: K counts in the order of `Counts.values`, X paths, L leaves, S segments, B trajectories, T rows.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from harts.blocks import whole_blocks
from harts.tree import PrefixTree

__all__ = [
    "Coefficients",
    "Counts",
    "count",
    "count_paths",
    "count_shared",
    "count_trained_rows",
    "leaf_paths",
    "trained_rows_by",
    "visible_pairs",
]

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


_KINDS = (
    "rows",
    "pairs",
    "window_pairs",
    "linear_rows",
    "trained_rows",
    "chains",
    "gathered_keys",
    "microbatches",
)
"""What is counted, and what has a coefficient."""


def visible_pairs(length_X: Any, window: int | None = None) -> Any:
    """Attention pairs of the first rows of a path: the sum over depths d of d + 1, but at most `window`.

    Args:
        length_X: numbers of rows.
        window: None: a row sees all rows above it.
    """
    inside_X = length_X if window is None else np.minimum(length_X, window)
    return inside_X * (inside_X + 1) // 2 + (length_X - inside_X) * inside_X


@dataclass(frozen=True, kw_only=True)
class Counts:
    """What one or several microbatches hold; counts of microbatches add up with `+`.

    Attributes:
        rows: tokens that pass through the model.
        pairs: visible attention pairs, the sum over rows of depth + 1.
        window_pairs: those of layers in which a row sees at most `window` rows; 0 where no window was given.
        linear_rows: rows fed to the linear-attention kernel: rows, and replayed rows again.
        trained_rows: distinct pairs of a parent row and a temperature; the head runs once for each.
        chains: sequences of the kernel calls, one per leaf.
        gathered_keys: sum of the chains' path lengths, keys that path-gathered attention reads.
        microbatches: how many microbatches these counts are of.
        window: of `window_pairs`; counts of one window add up.
    """

    rows: int = 0
    pairs: int = 0
    window_pairs: int = 0
    linear_rows: int = 0
    trained_rows: int = 0
    chains: int = 0
    gathered_keys: int = 0
    microbatches: int = 0
    window: int | None = None

    def __add__(self, other: "Counts") -> "Counts":
        if self.window != other.window:
            raise ValueError(f"counts: expected those of one window, got {self.window} and {other.window}")
        sums = {name: getattr(self, name) + getattr(other, name) for name in _KINDS}
        return Counts(**sums, window=self.window)

    @staticmethod
    def of_values(values: Sequence[int], window: int | None = None) -> "Counts":
        """Counts with such `values`."""
        return Counts(**dict(zip(_KINDS, values, strict=True)), window=window)

    @property
    def values(self) -> tuple[int, ...]:
        """The counts without the window, in the order of `Coefficients.values`."""
        return tuple(getattr(self, name) for name in _KINDS)

    @property
    def replayed_rows(self) -> int:
        """Rows fed to the linear-attention kernel more than once, counted each further time."""
        return self.linear_rows - self.rows

    def without_replay(self) -> "Counts":
        """The same with every row fed to linear attention once: what the model itself asks for."""
        return dataclasses.replace(self, linear_rows=self.rows)


def count_paths(length_X: Ints, trained_X: Ints | None = None, *, window: int | None = None) -> tuple[Ints, ...]:
    """Counts of paths from the root, each as a microbatch of its own: a tuple over K of int64 [X].

    Args:
        length_X: int64 [X]: rows of each path.
        trained_X: int64 [X]: rows on which the head runs; None: none.
        window: of layers with a sliding window (`Coefficients.window`); None counts no window pairs.
    """
    zero_X, one_X = np.zeros_like(length_X), np.ones_like(length_X)
    window_pairs_X = zero_X if window is None else visible_pairs(length_X, window)
    head_X = zero_X if trained_X is None else trained_X
    return length_X, visible_pairs(length_X), window_pairs_X, length_X, head_X, one_X, length_X, one_X


def count_shared(depth_X: Ints, *, window: int | None = None) -> tuple[Ints, ...]:
    """What one microbatch of two sets of paths that part at a depth has less than two microbatches; as `count_paths`.

    The rows above are run once. Of those fed to linear attention, only the ones in whole blocks are; the others are
    replayed. Each path keeps its chain, its keys and its trained rows.

    Args:
        depth_X: int64 [X]: rows that the sets share.
        window: as for `count_paths`.
    """
    zero_X = np.zeros_like(depth_X)
    window_pairs_X = zero_X if window is None else visible_pairs(depth_X, window)
    pairs_X = visible_pairs(depth_X)
    return depth_X, pairs_X, window_pairs_X, whole_blocks(depth_X), zero_X, zero_X, zero_X, zero_X + 1


def leaf_paths(tree: PrefixTree) -> tuple[Ints, Ints, Ints]:
    """Leaves of a tree in depth-first order.

    Returns:
        `segment_L`, the segment that each is the last row of; `length_L`, rows of its path; and `common_L`, rows that
        it shares with the leaf before, 0 for the first.
    """
    is_leaf_S = np.append(tree.parent_S[1:] != np.arange(tree.num_segments - 1), True)
    segment_L = np.flatnonzero(is_leaf_S)
    common_L = np.zeros(len(segment_L), np.int64)
    common_L[1:] = tree.depth_S[segment_L[:-1] + 1]  # the next segment in preorder leaves the path there
    return segment_L, tree.depth_S[segment_L] + tree.length_S[segment_L], common_L


def count(tree: PrefixTree, window: int | None = None) -> Counts:
    """Counts of a tree run as one microbatch: O(N) for the trained rows, else linear in segments.

    Args:
        tree: all rows.
        window: of layers with a sliding window, where the model has any (`Coefficients.window`).
    """
    _, length_L, common_L = leaf_paths(tree)
    sizes = zip(count_paths(length_L, window=window), count_shared(common_L[1:], window=window), strict=True)
    counts = Counts.of_values([int(alone_L.sum() - shared_X.sum()) for alone_L, shared_X in sizes], window)
    return dataclasses.replace(counts, trained_rows=count_trained_rows(tree))


def count_trained_rows(tree: PrefixTree) -> int:
    """Distinct (parent row, temperature) pairs of trained tokens: rows on which the head runs."""
    return int(trained_rows_by(tree, np.zeros(tree.num_trajectories, np.int64), 1)[0])


def trained_rows_by(tree: PrefixTree, set_of_B: Ints, sets: int) -> Ints:
    """Rows on which the head runs, by sets of trajectories; int64 [sets].

    Args:
        tree: all trajectories.
        set_of_B: int64 [B]: number of the set that each trajectory belongs to. A row that several train counts with the
            lowest.
        sets: how many there are.
    """
    trained = np.zeros(sets, np.int64)
    order = np.argsort(-set_of_B, kind="stable").tolist()
    for temperature in sorted({trajectory.temperature for trajectory in tree.trajectories}):
        set_of_T = np.full(tree.num_rows, -1, np.int64)
        for index in order:
            trajectory = tree.trajectories[index]
            if trajectory.temperature == temperature:
                set_of_T[tree.rows_of(index)[np.flatnonzero(trajectory.loss_mask) - 1]] = set_of_B[index]
        trained += np.bincount(set_of_T[set_of_T >= 0], minlength=sets)
    return trained


@dataclass(frozen=True, kw_only=True)
class Coefficients:
    """Non-negative cost of one of each of `Counts`, in one unit (FLOPs, seconds, bytes, ...).

    Attributes:
        window: that `window_pairs` are counted with.

    Raises:
        ValueError: a coefficient is negative or not finite, or window pairs cost something and there is no window.
    """

    rows: float = 0.0
    pairs: float = 0.0
    window_pairs: float = 0.0
    linear_rows: float = 0.0
    trained_rows: float = 0.0
    chains: float = 0.0
    gathered_keys: float = 0.0
    microbatches: float = 0.0
    window: int | None = None

    def __post_init__(self) -> None:
        for name in _KINDS:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
                raise ValueError(f"coefficient {name}: expected a finite number >= 0, got {value!r}")
            object.__setattr__(self, name, float(value))
        window = self.window
        known = isinstance(window, int) and not isinstance(window, bool) and window >= 1
        if not known and (window is not None or self.window_pairs):
            raise ValueError(f"coefficients, field window: expected an integer >= 1, got {window!r}")

    @cached_property
    def values(self) -> tuple[float, ...]:
        """The coefficients without the window."""
        return tuple(getattr(self, name) for name in _KINDS)

    def of(self, counts: Counts) -> float:
        """Cost of `counts`: the sum of coefficient times count.

        Raises:
            ValueError: window pairs cost something, and were counted with another window.
        """
        if self.window_pairs and counts.window != self.window:
            raise ValueError(f"counts: expected those of window {self.window}, got window {counts.window}")
        return float(np.dot(self.values, counts.values))

    def of_each(self, counts_KX: tuple[Ints, ...]) -> Floats:
        """Costs, float64 [X], of several counts, as `count_paths` gives them for this window."""
        total_X = np.zeros(len(counts_KX[0]))
        for value, count_X in zip(self.values, counts_KX, strict=True):
            if value:
                total_X += value * count_X
        return total_X

    def attention(self, counts: Counts) -> float:
        """The part of the cost that visible pairs have."""
        return Coefficients(pairs=self.pairs, window_pairs=self.window_pairs, window=self.window).of(counts)

    def __add__(self, other: "Coefficients") -> "Coefficients":
        if None not in (self.window, other.window) and self.window != other.window:
            raise ValueError(f"coefficients: expected those of one window, got {self.window} and {other.window}")
        sums = {name: getattr(self, name) + getattr(other, name) for name in _KINDS}
        return Coefficients(**sums, window=self.window or other.window)

    def scaled(self, factor: float) -> "Coefficients":
        """All coefficients times `factor`."""
        return Coefficients(**{name: getattr(self, name) * factor for name in _KINDS}, window=self.window)
