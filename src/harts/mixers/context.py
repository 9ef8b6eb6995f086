"""What one layer of a piece of a tree takes from rows outside it, and hands on to later pieces.

A piece (see `harts.layout`) reads rows that lie above it: keys and values of its path, say. A mixer names what it reads
and of which rows; whoever runs pieces keeps these tensors, and passes to each layer of each piece a `Context`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

__all__ = ["Context", "Wanted"]


@dataclass(frozen=True, eq=False)
class Wanted:
    """Own rows of a piece, counted from 0, ascending, of which other pieces read something."""

    rows: tuple[int, ...]
    device: torch.device

    @cached_property
    def index(self) -> Tensor:
        """int64, on the device."""
        with torch.inference_mode(False):
            return torch.tensor(self.rows, dtype=torch.int64, device=self.device)


@dataclass(frozen=True, eq=False)
class Context:
    """One layer's context in one piece.

    Attributes:
        taken: what the piece reads from outside, by name, one entry a row that `Mixer.outside` lists; names of which it
            reads nothing may be missing.
        wanted: rows of this piece of which others read something, by name.
        given: filled by the mixer: that something, one entry a wanted row, differentiable.
    """

    taken: Mapping[str, Tensor]
    wanted: Mapping[str, Wanted]
    given: dict[str, Tensor] = field(default_factory=dict)

    def take(self, name: str, like: Tensor, *shape: int) -> Tensor:
        """What the piece reads, [X, *shape]; where it reads nothing, an empty tensor like another one."""
        found = self.taken.get(name)
        return like.new_empty(0, *shape) if found is None else found

    def hand_on(self, name: str, values_TX: Tensor) -> None:
        """Gives the wanted rows of a tensor over own rows."""
        if self.wanted[name].rows:
            self.give(name, values_TX.index_select(0, self.wanted[name].index))

    def give(self, name: str, values: Tensor) -> None:
        """Gives one entry a wanted row. The first time counts: recomputation in a backward gives the same again."""
        if len(values) != len(self.wanted[name].rows):
            raise ValueError(f"{name}: expected {len(self.wanted[name].rows)} wanted rows, got {len(values)}")
        if self.wanted[name].rows:
            self.given.setdefault(name, values)
