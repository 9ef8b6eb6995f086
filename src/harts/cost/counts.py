"""Counts of what a tree holds, and coefficients that turn them into FLOPs, seconds or bytes."""

import dataclasses
from dataclasses import dataclass

import numpy as np

from harts.blocks import count_replayed_rows
from harts.tree import PrefixTree

__all__ = ["Coefficients", "Counts", "count", "count_trained_rows"]


@dataclass(frozen=True, kw_only=True)
class Counts:
    """What one or several microbatches hold; counts of microbatches add up with `+`.

    Attributes:
        rows: tokens that pass through the model.
        pairs: visible attention pairs, the sum over rows of depth + 1.
        linear_rows: rows fed to the linear-attention kernel: rows, and replayed rows again.
        trained_rows: distinct pairs of a parent row and a temperature; the head runs once for each.
        chains: sequences of the kernel calls, one per leaf.
        gathered_keys: sum of the chains' path lengths, keys that path-gathered attention reads.
        microbatches: how many microbatches these counts are of.
    """

    rows: int = 0
    pairs: int = 0
    linear_rows: int = 0
    trained_rows: int = 0
    chains: int = 0
    gathered_keys: int = 0
    microbatches: int = 0

    def __add__(self, other: "Counts") -> "Counts":
        mine, its = dataclasses.astuple(self), dataclasses.astuple(other)
        return Counts(**{field.name: a + b for field, a, b in zip(dataclasses.fields(self), mine, its, strict=True)})

    @property
    def replayed_rows(self) -> int:
        """Rows fed to the linear-attention kernel more than once, counted each further time."""
        return self.linear_rows - self.rows

    def without_replay(self) -> "Counts":
        """The same with every row fed to linear attention once: what the model itself asks for."""
        return dataclasses.replace(self, linear_rows=self.rows)


def count(tree: PrefixTree) -> Counts:
    """Counts of a tree run as one microbatch, without building its BlockTree.

    O(N) for the trained rows, else linear in rows and segments.
    """
    is_leaf_S = np.append(tree.parent_S[1:] != np.arange(tree.num_segments - 1), True)
    leaf_S = np.flatnonzero(is_leaf_S)
    stop_S = tree.depth_S + tree.length_S
    pairs = (stop_S * (stop_S + 1) - tree.depth_S * (tree.depth_S + 1)) // 2
    return Counts(
        rows=tree.num_rows,
        pairs=int(pairs.sum()),
        linear_rows=tree.num_rows + count_replayed_rows(tree),
        trained_rows=count_trained_rows(tree),
        chains=len(leaf_S),
        gathered_keys=int(stop_S[leaf_S].sum()),
        microbatches=1,
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

    Raises:
        ValueError: a coefficient is negative or not finite.
    """

    rows: float = 0.0
    pairs: float = 0.0
    linear_rows: float = 0.0
    trained_rows: float = 0.0
    chains: float = 0.0
    gathered_keys: float = 0.0
    microbatches: float = 0.0

    def __post_init__(self) -> None:
        for name, value in dataclasses.asdict(self).items():
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
                raise ValueError(f"coefficient {name}: expected a finite number >= 0, got {value!r}")
            object.__setattr__(self, name, float(value))

    def of(self, counts: Counts) -> float:
        """Cost of `counts`: the sum of coefficient times count."""
        return float(np.dot(dataclasses.astuple(self), dataclasses.astuple(counts)))

    def scaled(self, factor: float) -> "Coefficients":
        """All coefficients times `factor`."""
        return Coefficients(**{name: value * factor for name, value in dataclasses.asdict(self).items()})
