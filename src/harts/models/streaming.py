"""A tree that runs through a model in pieces, so that what must be kept at once is bounded.

Forward, pieces run in row order, and each hands on what later ones read (`harts.mixers.Store`). A piece whose graph was
kept goes backward from there; another runs forward again first, with the same bits, which is checked. A piece goes
backward once all pieces that read it have, so the gradients of what it gave are whole.

In *two sweeps* the caller has the log-probabilities of the whole batch before any gradient is known. In *one sweep* the
loss is a sum over trajectories, so that a piece's gradients are known as soon as all trajectories through it have run:
it goes backward then, and only the pieces above are kept.

Shape suffixes: M targets, U head rows, N tokens of all trajectories.
"""

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from harts.layout import PackedTree, pack
from harts.mixers import Context, Exchange, Store
from harts.models.cuts import done_after
from harts.models.heads import to_tokens
from harts.models.outcomes import Outcome, Whole
from harts.models.scorer import Scorer
from harts.models.scores import Scores
from harts.slots import PADDING
from harts.tree import PrefixTree

__all__ = ["Stream", "SumOfLosses", "in_one_sweep", "in_two_sweeps"]

SumOfLosses = Callable[[Sequence[int], Scores], Tensor]
"""(indices of trajectories, scores of their tokens one after the other) -> []."""


@dataclass(frozen=True, eq=False)
class _Run:
    """One run of a piece: what it gave, and the contexts of its layers."""

    outcome: Outcome
    contexts: Mapping[int, Context]


class Stream:
    """The pieces of one tree on their way through a model.

    Args:
        scorer: the model, checked.
        packed: the whole tree.
        starts: first rows of the pieces.

    Attributes:
        pieces: of the tree.
        done_after: for each the last piece that needs it.
        whole: what has been put together so far.
        mixers: of each layer.
        exchanges: what pieces read from one another, by mixer.
    """

    def __init__(self, scorer: Scorer, packed: PackedTree, starts: Sequence[int]) -> None:
        self.packed = packed
        self.pieces = packed.pieces(starts)
        self.done_after = done_after(self.pieces)
        self.whole = Whole(packed, self.pieces)
        self._scorer = scorer
        backbone = scorer.backbone
        self.mixers = backbone.family.mixers(backbone.config)
        self.exchanges = {mixer: Exchange(mixer, self.pieces) for mixer in dict.fromkeys(self.mixers)}
        self._stores = [Store(self.exchanges[mixer]) for mixer in self.mixers]
        self._alive: dict[int, _Run] = {}
        self._autocast = _autocast_of(packed.device)

    @property
    def is_trained(self) -> bool:
        """Whether anything in the model has gradients."""
        return any(each.requires_grad for each in self._scorer.backbone.inner.parameters())

    def forward(self, piece: int, *, keep: bool) -> None:
        """Runs a piece; its outcome is put into `whole`.

        Args:
            piece: all before it have run.
            keep: whether its graph stays for `backward`.
        """
        with torch.set_grad_enabled(keep):
            run = self._run(piece)
        self.keep(piece, run.contexts)
        self.whole.put(piece, run.outcome)
        if keep:
            self._alive[piece] = run

    def backward(self, piece: int, grads: Mapping[str, Tensor | None]) -> None:
        """Adds a piece's gradients to those of parameters and of the pieces that it reads, then forgets it.

        Args:
            piece: all that read it went backward before.
            grads: of the whole outcome, by name.

        Raises:
            ValueError: the piece ran again and gave other bits.
        """
        run = self._alive.pop(piece, None)
        if run is None:
            with torch.enable_grad():
                run = self._run(piece)
            self._check_same(piece, run)
        roots = self.whole.roots(piece, run.outcome, grads)
        for layer, store in enumerate(self._stores):
            roots += store.roots(piece, run.contexts[layer])
        if roots:
            outputs, gradients = zip(*roots, strict=True)
            torch.autograd.backward(outputs, gradients)
        for layer, store in enumerate(self._stores):
            store.collect(piece, run.contexts[layer])
        self.forget(piece)

    def pad(self, *, keep: bool) -> Tensor:
        """Runs a padding row, for processes that run more pieces than this one; gives no entries, with their graph.

        Args:
            keep: whether they have one.
        """
        row = pack(PrefixTree.build([PADDING]), device=self.packed.device)
        with torch.set_grad_enabled(keep), self._autocast():
            return self._scorer.run(row)[0].logprobs_M

    def forget(self, piece: int) -> None:
        """Drops what a piece gave to others."""
        for store in self._stores:
            store.drop(piece)

    def contexts(self, piece: int) -> Mapping[int, Context]:
        """What the layers of a piece start from, once all before it have run."""
        return {layer: store.context(piece) for layer, store in enumerate(self._stores)}

    def keep(self, piece: int, contexts: Mapping[int, Context]) -> None:
        """Keeps what a piece gave, for the pieces behind it."""
        for layer, store in enumerate(self._stores):
            store.keep(piece, contexts[layer])

    def _run(self, piece: int) -> _Run:
        contexts = self.contexts(piece)
        with self._autocast():
            return _Run(Outcome(*self._scorer.run(self.pieces[piece], contexts)), contexts)

    def _check_same(self, piece: int, run: _Run) -> None:
        flags = {
            f"layer {layer}": store.changes(piece, run.contexts[layer]) for layer, store in enumerate(self._stores)
        }
        flags["the head"] = self.whole.changes(piece, run.outcome)
        found = {name: flag for name, flag in flags.items() if flag is not None}
        changed = torch.stack(list(found.values())).tolist() if found else []  # one wait for the GPU
        if any(changed):
            rows = range(self.pieces[piece].start, self.pieces[piece].start + self.pieces[piece].num_rows)
            raise ValueError(
                f"model: expected the same bits whenever rows {rows.start} to {rows.stop - 1} run, got others from "
                f"{list(found)[changed.index(True)]}; something in it draws random numbers, counts its calls, or adds "
                "in an order that changes; take it out, or run the tree whole (no token_budget)"
            )


def in_two_sweeps(stream: Stream, keep: Collection[int] = (), padding: int = 0) -> Scores:
    """Runs all pieces forward; the backward of the result runs all backward, and adds to `.grad` of parameters.

    Args:
        stream: fresh.
        keep: pieces whose graph is kept, where gradients are on; padding is counted on from the last piece.
        padding: padding rows that run after the pieces.
    """
    if not (torch.is_grad_enabled() and stream.is_trained):
        for piece in range(len(stream.pieces)):
            stream.forward(piece, keep=False)
            for other, after in enumerate(stream.done_after):
                if after == piece:
                    stream.forget(other)
        for _ in range(padding):
            stream.pad(keep=False)
        return _to_scores(stream, stream.whole.values)
    anchor = torch.zeros((), requires_grad=True)  # makes the outputs differentiable
    given = _TwoSweeps.apply(anchor, stream, frozenset(keep), padding)  # type: ignore[no-untyped-call]
    return _to_scores(stream, dict(zip(stream.whole.names, given, strict=True)))


class _TwoSweeps(torch.autograd.Function):
    """As reentrant checkpointing: its backward runs others, which add to `.grad`."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, stream: Stream, keep: Collection[int], padding: int) -> tuple[Tensor, ...]:
        pieces = len(stream.pieces)
        for piece in range(pieces):
            stream.forward(piece, keep=piece in keep)
        ctx.stream = stream
        ctx.padded = [stream.pad(keep=piece in keep) for piece in range(pieces, pieces + padding)]
        return tuple(stream.whole.values[name].detach().clone() for name in stream.whole.names)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, ...]:
        stream, ctx.stream = ctx.stream, None
        padded, ctx.padded = ctx.padded, []
        if stream is None:
            raise RuntimeError(
                "harts.logprobs: expected one backward through a tree in pieces, got a second one; call "
                "harts.logprobs again"
            )
        while padded:
            value = padded.pop()
            if not value.requires_grad:
                value = stream.pad(keep=True)
            torch.autograd.backward(value, torch.zeros_like(value))
        by_name = dict(zip(stream.whole.names, grads, strict=True))
        for piece in reversed(range(len(stream.pieces))):
            stream.backward(piece, by_name)
        return None, None, None, None


def in_one_sweep(stream: Stream, loss: SumOfLosses, keep: Collection[int]) -> tuple[Tensor, Scores]:
    """Runs all pieces forward and backward, each as soon as its gradients are known; adds to `.grad` of parameters.

    Args:
        stream: fresh.
        loss: of some trajectories; all calls add up.
        keep: pieces whose graph is kept until they go backward.

    Returns:
        The loss, and all scores; both detached.
    """
    tree = stream.packed.tree
    starts = np.array([piece.start for piece in stream.pieces])
    last_row_B = tree.row_of_N[tree.offset_B1[1:] - 1]
    last_piece_B = np.searchsorted(starts, last_row_B, side="right") - 1
    total = torch.zeros((), device=stream.packed.device)
    grads: dict[str, Tensor | None] = {}
    for piece in range(len(stream.pieces)):
        stream.forward(piece, keep=piece in keep)
        finished = np.flatnonzero(last_piece_B == piece).tolist()
        if finished:
            total = total + _differentiate(stream, loss, finished, grads)
        for other in reversed(range(piece + 1)):
            if stream.done_after[other] == piece:
                stream.backward(other, grads)
    return total, _to_scores(stream, stream.whole.values)


def _differentiate(
    stream: Stream, loss: SumOfLosses, finished: Sequence[int], grads: dict[str, Tensor | None]
) -> Tensor:
    """The loss of trajectories whose tokens have all run; adds its gradients to those of the whole outcome."""
    leaves = {name: stream.whole.values[name].detach().requires_grad_() for name in stream.whole.names}
    with torch.enable_grad():
        scores = dataclasses.replace(_to_scores(stream, leaves), router=None).of(finished, stream.packed)
        value = loss(finished, scores)
    if not isinstance(value, Tensor) or value.numel() != 1 or not value.requires_grad:
        raise ValueError(
            f"loss: expected one number that depends on the scores, got {value!r}; return the sum of the losses of "
            "these trajectories"
        )
    found = torch.autograd.grad(value, list(leaves.values()), allow_unused=True)
    for name, grad in zip(leaves, found, strict=True):
        if grad is not None:
            before = grads.get(name)
            grads[name] = grad if before is None else before + grad
    return value.detach()


def _to_scores(stream: Stream, values: Mapping[str, Tensor]) -> Scores:
    parts, router = stream.whole.outcome(values)
    return to_tokens(parts, stream.packed, router)


def _autocast_of(device: torch.device) -> Callable[[], AbstractContextManager[Any]]:
    """The caller's autocast, for runs that happen in a backward, where none is active."""
    enabled, dtype = torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type)
    cache = torch.is_autocast_cache_enabled()
    return lambda: torch.autocast(device.type, dtype=dtype, enabled=enabled, cache_enabled=cache)
