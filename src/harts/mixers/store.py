"""What the pieces of a tree hand to one another in one layer: kept in a forward sweep, and its gradients in a backward.

A piece reads rows above it. All rows that any piece reads are one set, `U`, for each name that a mixer reads; a store
has one tensor for it, and one of gradients, summed in fp32. Pieces run forward in row order, so that whatever one reads
is there, and backward in the opposite order, so that all gradients of what one gave are there.

Shape suffixes: U rows that are read by some piece.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from harts.layout import PackedTree
from harts.mixers.context import Context, Wanted
from harts.mixers.protocol import Mixer
from harts.transfer import to_int64

__all__ = ["Store"]


@dataclass(frozen=True, eq=False)
class _Places:
    """Of one piece and name: the read rows' places in U (a range where they follow each other), and those it gives."""

    reads: slice | Tensor
    gives: slice
    wanted: Wanted


class Store:
    """One layer's store over all pieces of one tree.

    Args:
        mixer: of the layer.
        pieces: from `PackedTree.pieces`, all of them.
    """

    def __init__(self, mixer: Mixer, pieces: Sequence[PackedTree]) -> None:
        self._values: dict[str, Tensor] = {}
        self._grads: dict[str, Tensor] = {}
        reads = [mixer.outside(piece) for piece in pieces]
        self._sizes = {}
        self._places: list[dict[str, _Places]] = [{} for _ in pieces]
        for name in reads[0]:
            all_U = np.unique(np.concatenate([each[name] for each in reads]))
            self._sizes[name] = len(all_U)
            for places, piece, each in zip(self._places, pieces, reads, strict=True):
                at = np.searchsorted(all_U, each[name])
                first, stop = np.searchsorted(all_U, [piece.start, piece.start + piece.num_rows]).tolist()
                follow = len(at) == 0 or at[-1] - at[0] + 1 == len(at)
                range_of = slice(int(at[0]), int(at[-1]) + 1) if len(at) else slice(0, 0)
                wanted = Wanted(tuple((all_U[first:stop] - piece.start).tolist()), piece.device)
                places[name] = _Places(range_of if follow else to_int64(at, piece.device), slice(first, stop), wanted)

    @property
    def kept_bytes(self) -> int:
        """Bytes of what has been handed on so far, without gradients."""
        return sum(values.nbytes for values in self._values.values())

    def context(self, piece: int) -> Context:
        """The context of a piece; what it takes are leaves, which collect gradients where gradients are on."""
        taken = {}
        for name, places in self._places[piece].items():
            if name in self._values:
                values = self._values[name]
                taken[name] = values[places.reads].detach().requires_grad_(torch.is_grad_enabled())
        return Context(taken, {name: places.wanted for name, places in self._places[piece].items()})

    def keep(self, piece: int, context: Context) -> None:
        """Keeps what a piece gave, for the pieces behind it."""
        for name, given in context.given.items():
            if name not in self._values:
                self._values[name] = given.new_empty(self._sizes[name], *given.shape[1:])
            self._values[name][self._places[piece][name].gives] = given.detach()

    def roots(self, piece: int, context: Context) -> list[tuple[Tensor, Tensor]]:
        """What a piece gave, with the gradients that the pieces behind it left."""
        return [
            (given, self._grads[name][self._places[piece][name].gives].to(given.dtype))
            for name, given in context.given.items()
            if given.requires_grad and name in self._grads
        ]

    def collect(self, piece: int, context: Context) -> None:
        """Adds the gradients of what a piece took."""
        for name, taken in context.taken.items():
            if taken.grad is None or not len(taken):
                continue
            if name not in self._grads:
                dtype = torch.promote_types(taken.dtype, torch.float32)
                self._grads[name] = taken.new_zeros(self._sizes[name], *taken.shape[1:], dtype=dtype)
            reads = self._places[piece][name].reads
            grad = taken.grad.to(self._grads[name].dtype)
            if isinstance(reads, slice):
                self._grads[name][reads] += grad
            else:  # every row once, so the order of additions is fixed
                self._grads[name].index_add_(0, reads, grad)
            taken.grad = None
