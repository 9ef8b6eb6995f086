"""Which pieces, and which of their graphs are kept, so that a tree fits into a given memory and least runs twice.

Shape suffix: P pieces.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from harts.layout import PackedTree
from harts.mixers import Exchange
from harts.models.cuts import piece_starts, subtree_starts
from harts.models.memory.meter import allocated_bytes, parameter_bytes
from harts.models.memory.probes import footprint_of
from harts.models.memory.simulate import Bytes, one_sweep, two_sweeps, without_gradients
from harts.models.memory.sizes import Memory, format_bytes, parse_memory
from harts.models.scorer import Scorer
from harts.models.streaming import Stream

__all__ = ["Choice", "choose_one_sweep", "choose_two_sweeps"]

Floats = NDArray[np.float64]

_MARGIN = 1.01
"""On what is predicted beyond what lies there already."""
_FEWEST_ROWS = 64
_MORE = 3
"""Numbers of pieces that are looked at beyond the first that fits."""
_log = logging.getLogger("harts")


@dataclass(frozen=True, eq=False, kw_only=True)
class Choice:
    """Pieces that fit.

    Attributes:
        stream: the pieces, not yet run.
        keep: those whose graph is kept.
        peak_bytes: predicted, with everything that lies on the device.
        rows_again: rows whose forward runs twice.
    """

    stream: Stream
    keep: frozenset[int]
    peak_bytes: int
    rows_again: int


def choose_two_sweeps(scorer: Scorer, packed: PackedTree, memory: Memory, most_rows: int | None) -> Choice:
    """Pieces for `harts.models.streaming.in_two_sweeps`.

    Args:
        scorer: of an unsharded model.
        packed: the whole tree.
        memory: most bytes on the device, everything that lies there included.
        most_rows: of a piece; None: any.

    Raises:
        ValueError: the memory is no size, or too small for any pieces; the model is sharded.
    """
    trained = torch.is_grad_enabled() and any(each.requires_grad for each in scorer.backbone.inner.parameters())
    return _Chooser(scorer, packed, memory, most_rows).choose(
        piece_starts, two_sweeps if trained else without_gradients
    )


def choose_one_sweep(scorer: Scorer, packed: PackedTree, memory: Memory, most_rows: int | None) -> Choice:
    """Pieces for `harts.models.streaming.in_one_sweep`; arguments and errors of `choose_two_sweeps`."""
    return _Chooser(scorer, packed, memory, most_rows).choose(subtree_starts, one_sweep)


class _Chooser:
    def __init__(self, scorer: Scorer, packed: PackedTree, memory: Memory, most_rows: int | None) -> None:
        if scorer.whole is not None:
            raise ValueError(
                "memory: expected a model that fully_shard was not called on, got a sharded one, whose gathered layers "
                "are not measured yet; use token_budget"
            )
        self._scorer, self._packed, self._most_rows = scorer, packed, most_rows
        inner = scorer.backbone.inner
        device = packed.device
        self._resident = allocated_bytes(device) or parameter_bytes(inner)
        self._missing = sum(
            each.numel() * each.element_size()
            for each in inner.parameters()
            if each.requires_grad and each.grad is None
        )
        self._memory = parse_memory(memory, device, self._resident)
        self._asked = memory
        self._footprint = footprint_of(scorer, packed)

    def choose(
        self,
        cut: Callable[..., list[int]],
        simulate: Callable[[Bytes, float], tuple[frozenset[int], float]],
    ) -> Choice:
        """The cut with the least to run twice, of those that fit; of equals the one with the fewest pieces."""
        best: tuple[float, Choice] | None = None
        least = float("inf")
        tried_since = 0
        for starts in self._cuts(cut):
            stream = Stream(self._scorer, self._packed, starts)
            bytes_ = self._bytes(stream)
            limit = self._resident + (self._memory - self._resident) / _MARGIN
            keep, peak = simulate(bytes_, limit)
            least = min(least, peak)
            if peak <= limit:
                rows = np.array([piece.num_rows for piece in stream.pieces])
                again = int(rows.sum() - rows[sorted(keep)].sum()) if simulate is not without_gradients else 0
                price = again + len(starts) * max(_FEWEST_ROWS, self._scorer.kernels.min_rows) / 4
                if best is None or price < best[0]:
                    shown = int(self._resident + (peak - self._resident) * _MARGIN)
                    best = price, Choice(stream=stream, keep=keep, peak_bytes=shown, rows_again=again)
            tried_since += best is not None
            if tried_since > _MORE or (best is not None and best[1].rows_again == 0):
                break
        if best is None:
            needed = self._resident + (least - self._resident) * _MARGIN
            raise ValueError(
                f"memory: expected at least {format_bytes(needed)}, which the batch takes in its smallest pieces with "
                f"what lies on the device already ({format_bytes(self._resident)}), got {self._asked!r}; give more, "
                "recompute activations (harts.models.recompute_activations), or shorten the longest trajectory"
            )
        chosen = best[1]
        _log.info(
            "%d pieces, %d of them kept, %d rows run twice, at most %s predicted",
            len(chosen.stream.pieces),
            len(chosen.keep),
            chosen.rows_again,
            format_bytes(chosen.peak_bytes),
        )
        return chosen

    def _cuts(self, cut: Callable[..., list[int]]) -> Iterator[list[int]]:
        """Cuts with fewer and fewer rows a piece."""
        rows = self._packed.num_rows
        most = rows if self._most_rows is None else min(rows, self._most_rows)
        before: list[int] | None = None
        parts, at = [1.0, 1.5], 0
        while True:
            wanted = int(most / parts[at])
            starts = [0] if wanted == rows else cut(self._packed.tree, max(wanted, 1))
            if starts != before:
                yield starts
            before = starts
            if wanted <= _FEWEST_ROWS:
                return
            at += 1
            if at == len(parts):
                parts.append(parts[-2] * 2)

    def _bytes(self, stream: Stream) -> Bytes:
        kernels = self._scorer.kernels
        phases, layout_P = self._footprint.phases(
            stream.pieces, min_rows=kernels.min_rows, chunk_rows=kernels.chunk_rows
        )
        footprint = self._footprint
        return Bytes(
            resident=float(self._resident) + self._outcome() + float(layout_P.sum()),
            missing=float(self._missing),
            phases=phases,
            given_P=_entries(stream, Exchange.given, footprint.entry_bytes),
            grads_P=_entries(stream, Exchange.given, footprint.grad_bytes),
            copied_P=_entries(stream, Exchange.copied, footprint.entry_bytes),
            done_P=np.array(stream.done_after),
        )

    def _outcome(self) -> float:
        """Scores of the whole batch and their gradients, by token and by target."""
        packed, extras = self._packed, self._scorer.extras
        hidden = self._scorer.backbone.config.hidden_size if extras.get("hidden") else 0
        numbers = 1 + bool(extras.get("entropy")) + hidden + 2 * (extras.get("top_k") or 0)
        return 8.0 * numbers * 3 * (packed.num_tokens + len(packed.token_M))


def _entries(
    stream: Stream, count: Callable[[Exchange, int], dict[str, int]], per_entry: Mapping[tuple[object, str], int]
) -> Floats:
    """[P]: bytes of what pieces give or take."""
    total_P = np.zeros(len(stream.pieces))
    for mixer, exchange in stream.exchanges.items():
        for piece in range(len(total_P)):
            entries = count(exchange, piece).items()
            total_P[piece] += sum(number * per_entry[mixer, name] for name, number in entries if number)
    return total_P
