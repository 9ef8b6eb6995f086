"""What the pieces of a tree hand to one another in one layer: kept in a forward sweep, and its gradients in a backward.

A piece reads rows above it, and those lie in earlier pieces. A store keeps one tensor for each piece that gives
something and each name that a mixer reads, and one of gradients, summed in fp32. Pieces run forward in row order, so
that whatever one reads is there, and backward once all that read them have, so that all gradients of what one gave are
there; then what it gave can be dropped.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from harts.layout import PackedTree
from harts.mixers.context import Context, Wanted
from harts.mixers.protocol import Mixer
from harts.transfer import to_int64

__all__ = ["Exchange", "Store"]

Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class _Read:
    """A part of what a piece reads: entries of what an earlier piece gives, a range where they follow each other."""

    giver: int
    entries: slice | Tensor
    count: int


class Exchange:
    """Which rows each piece reads from which, in one layer; layers with the same mixers share it.

    Args:
        mixers: those of one layer, which read under different names; none where its rows do not see each other.
        pieces: from `PackedTree.pieces`, all of them.
    """

    def __init__(self, mixers: Sequence[Mixer], pieces: Sequence[PackedTree]) -> None:
        outside = [{name: rows for mixer in mixers for name, rows in mixer.outside(piece).items()} for piece in pieces]
        starts_P1 = np.array([*(piece.start for piece in pieces), pieces[0].tree.num_rows])
        self.reads: list[dict[str, list[_Read]]] = [{} for _ in pieces]
        self.wanted: list[dict[str, Wanted]] = [{} for _ in pieces]
        for name in outside[0]:
            all_U = np.unique(np.concatenate([each[name] for each in outside]))
            edge_P1 = np.searchsorted(all_U, starts_P1)
            for index, piece in enumerate(pieces):
                rows = tuple((all_U[edge_P1[index] : edge_P1[index + 1]] - piece.start).tolist())
                self.wanted[index][name] = Wanted(rows, piece.device)
                at_X = np.searchsorted(all_U, outside[index][name])
                self.reads[index][name] = list(_reads(at_X, edge_P1, piece.device))

    def given(self, piece: int) -> dict[str, int]:
        """Entries that a piece hands on, by name."""
        return {name: len(wanted.rows) for name, wanted in self.wanted[piece].items()}

    def copied(self, piece: int) -> dict[str, int]:
        """Entries that a piece takes as copies: all but a range of what one other piece gave."""
        return {
            name: sum(read.count for read in reads)
            for name, reads in self.reads[piece].items()
            if len(reads) > 1 or any(isinstance(read.entries, Tensor) for read in reads)
        }


def _reads(at_X: Ints, edge_P1: Ints, device: torch.device) -> Iterator[_Read]:
    """Places among all that is read, ascending, as entries of what each giver gives."""
    giver_X = np.searchsorted(edge_P1, at_X, side="right") - 1
    cuts = [0, *(np.flatnonzero(np.diff(giver_X)) + 1).tolist(), len(at_X)]
    for first, stop in pairwise(cuts):
        if first == stop:
            continue
        giver = int(giver_X[first])
        entry_X = at_X[first:stop] - edge_P1[giver]
        follow = entry_X[-1] - entry_X[0] + 1 == len(entry_X)
        entries = slice(int(entry_X[0]), int(entry_X[-1]) + 1) if follow else to_int64(entry_X, device)
        yield _Read(giver, entries, len(entry_X))


class Store:
    """One layer's store over all pieces of one tree.

    Args:
        exchange: of the layer.
    """

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._values: dict[int, dict[str, Tensor]] = {}
        self._grads: dict[int, dict[str, Tensor]] = {}

    def context(self, piece: int) -> Context:
        """The context of a piece; what it takes are leaves, which collect gradients where gradients are on."""
        taken = {}
        for name, reads in self._exchange.reads[piece].items():
            parts = [self._values[read.giver][name][read.entries] for read in reads]
            if parts:
                both = parts[0] if len(parts) == 1 else torch.cat(parts)
                taken[name] = both.detach().requires_grad_(torch.is_grad_enabled())
        return Context(taken, self._exchange.wanted[piece])

    def keep(self, piece: int, context: Context) -> None:
        """Keeps what a piece gave, for the pieces behind it."""
        self._values[piece] = {name: given.detach() for name, given in context.given.items()}

    def changes(self, piece: int, context: Context) -> Tensor | None:
        """bool []: whether the piece gave other bits than before; None where it gives nothing."""
        kept = self._values[piece]
        flags = [_differ(given.detach(), kept[name]).any() for name, given in context.given.items()]
        return torch.stack(flags).any() if flags else None

    def roots(self, piece: int, context: Context) -> list[tuple[Tensor, Tensor]]:
        """What a piece gave, with the gradients that the pieces behind it left."""
        grads = self._grads.get(piece, {})
        return [
            (given, grads[name].to(given.dtype))
            for name, given in context.given.items()
            if given.requires_grad and name in grads
        ]

    def collect(self, piece: int, context: Context) -> None:
        """Adds the gradients of what a piece took; every entry once, so the order of additions is fixed."""
        for name, taken in context.taken.items():
            if taken.grad is None:
                continue
            reads = self._exchange.reads[piece][name]
            grads = torch.split(taken.grad, [read.count for read in reads])
            for read, grad in zip(reads, grads, strict=True):
                total = self._grads_of(read.giver, name)
                if isinstance(read.entries, slice):
                    total[read.entries] += grad
                else:
                    total.index_add_(0, read.entries, grad.to(total.dtype))
            taken.grad = None

    def _grads_of(self, giver: int, name: str) -> Tensor:
        grads = self._grads.setdefault(giver, {})
        if name not in grads:
            values = self._values[giver][name]
            grads[name] = torch.zeros_like(values, dtype=torch.promote_types(values.dtype, torch.float32))
        return grads[name]

    def drop(self, piece: int) -> None:
        """Forgets what a piece gave, and the gradients of it."""
        self._values.pop(piece, None)
        self._grads.pop(piece, None)


def _differ(a: Tensor, b: Tensor) -> Tensor:
    """bool: where values differ; what is not a number equals itself."""
    return (a != b) & ~(a.isnan() & b.isnan())
