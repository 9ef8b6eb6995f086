"""Counts of what a tree holds, and coefficients that turn them into FLOPs, seconds or bytes."""

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np

from harts.blocks import count_replayed_rows
from harts.tree import PrefixTree

__all__ = ["Coefficients", "Counts", "count", "count_trained_rows", "visible_pairs"]

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


def count(tree: PrefixTree, window: int | None = None) -> Counts:
    """Counts of a tree run as one microbatch, without building its BlockTree.

    O(N) for the trained rows, else linear in rows and segments.

    Args:
        tree: all rows.
        window: of layers with a sliding window, where the model has any (`Coefficients.window`).
    """
    is_leaf_S = np.append(tree.parent_S[1:] != np.arange(tree.num_segments - 1), True)
    leaf_S = np.flatnonzero(is_leaf_S)
    stop_S = tree.depth_S + tree.length_S
    pairs, window_pairs = (
        visible_pairs(stop_S, limit) - visible_pairs(tree.depth_S, limit) for limit in (None, window)
    )
    return Counts(
        rows=tree.num_rows,
        pairs=int(pairs.sum()),
        window_pairs=0 if window is None else int(window_pairs.sum()),
        linear_rows=tree.num_rows + count_replayed_rows(tree),
        trained_rows=count_trained_rows(tree),
        chains=len(leaf_S),
        gathered_keys=int(stop_S[leaf_S].sum()),
        microbatches=1,
        window=window,
    )


def count_trained_rows(tree: PrefixTree) -> int:
    """Distinct (parent row, temperature) pairs of trained tokens: rows on which the head runs."""
    kinds = np.unique([trajectory.temperature for trajectory in tree.trajectories])
    total = 0
    for temperature in kinds.tolist():
        reaches_head_T = np.zeros(tree.num_rows, np.bool_)
        for index, trajectory in enumerate(tree.trajectories):
            if trajectory.temperature == temperature:
                reaches_head_T[tree.rows_of(index)[np.flatnonzero(trajectory.loss_mask) - 1]] = True
        total += int(np.count_nonzero(reaches_head_T))
    return total


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

    @property
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

    def attention(self, counts: Counts) -> float:
        """The part of the cost that visible pairs have."""
        return Coefficients(pairs=self.pairs, window_pairs=self.window_pairs, window=self.window).of(counts)

    def scaled(self, factor: float) -> "Coefficients":
        """All coefficients times `factor`."""
        return Coefficients(**{name: getattr(self, name) * factor for name in _KINDS}, window=self.window)
