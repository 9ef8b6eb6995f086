"""Outputs of attention that outlive the activations of their layer.

Where a layer's activations are computed again in the backward, attention's outputs and log-sum-exps may be kept from
the first time: they are all that its backward needs beside queries, keys and values, small next to the rest of a layer,
and on long rows the dearest to compute again.
"""

from collections.abc import Callable
from contextvars import ContextVar, Token
from types import TracebackType

import torch
from torch import Tensor

__all__ = ["Phase", "computed_once", "current_phase", "keep_outputs"]

_Outputs = tuple[Tensor, ...]


class Phase:
    """A forward, or the same forward again: inside, attention keeps its outputs, or takes them.

    Args:
        kept: outputs of the calls so far, in their order, shared by both phases; None where they were taken.
        again: whether it is the forward again.
    """

    def __init__(self, kept: list[_Outputs | None], *, again: bool) -> None:
        self.kept, self.again, self.at = kept, again, 0
        self._tokens: list[Token[Phase | None]] = []

    def __enter__(self) -> None:
        self.at = 0
        self._tokens.append(_PHASE.set(self))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _PHASE.reset(self._tokens.pop())


_PHASE: ContextVar[Phase | None] = ContextVar("harts_kept_outputs", default=None)


def keep_outputs() -> tuple[Phase, Phase]:
    """Contexts for a forward and for the same forward again; the `context_fn` of `torch.utils.checkpoint`."""
    kept: list[_Outputs | None] = []
    return Phase(kept, again=False), Phase(kept, again=True)


def current_phase() -> Phase | None:
    """The phase that this thread is in; None without gradients, where no backward will ask for outputs."""
    return _PHASE.get() if torch.is_grad_enabled() else None


def computed_once(compute: Callable[[], _Outputs], phase: Phase | None) -> _Outputs:
    """`compute()`, or what it gave in the phase before. Nobody may change these outputs in place.

    Each is handed out once: a second backward through one graph computes again.
    """
    if phase is None:
        return compute()
    at, phase.at = phase.at, phase.at + 1
    if phase.again:
        found = phase.kept[at] if at < len(phase.kept) else None
        if found is None:
            return compute()
        phase.kept[at] = None
        return found
    outputs = compute()
    # detached, or they would hold the graph, and with it this, until a garbage collection
    phase.kept.append(tuple(output.detach() for output in outputs))
    return outputs
