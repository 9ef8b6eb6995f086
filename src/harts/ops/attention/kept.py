"""Outputs of attention that outlive the activations of their layer.

Where a layer's activations are computed again in the backward, attention's outputs and log-sum-exps may be kept from
the first time: they are all that its backward needs beside queries, keys and values, small next to the rest of a layer,
and on long rows the dearest to compute again.
"""

from collections import deque
from collections.abc import Callable
from contextvars import ContextVar, Token
from types import TracebackType

from torch import Tensor

__all__ = ["KeptOutputs", "computed_once", "keep_outputs"]

_Outputs = tuple[Tensor, ...]


class KeptOutputs:
    """What the calls of one layer gave, in their order; each is handed out once."""

    def __init__(self) -> None:
        self.calls: deque[_Outputs] = deque()


class _Phase:
    """Inside, attention gives its outputs to `kept`, or takes them from there."""

    def __init__(self, kept: KeptOutputs, *, again: bool) -> None:
        self.kept, self.again = kept, again
        self._tokens: list[Token[_Phase | None]] = []

    def __enter__(self) -> None:
        self._tokens.append(_PHASE.set(self))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _PHASE.reset(self._tokens.pop())


_PHASE: ContextVar[_Phase | None] = ContextVar("harts_kept_outputs", default=None)


def keep_outputs() -> tuple[_Phase, _Phase]:
    """Contexts for a forward and for the same forward again; the `context_fn` of `torch.utils.checkpoint`."""
    kept = KeptOutputs()
    return _Phase(kept, again=False), _Phase(kept, again=True)


def computed_once(compute: Callable[[], _Outputs]) -> _Outputs:
    """`compute()`, or what it gave the first time."""
    phase = _PHASE.get()
    if phase is None:
        return compute()
    if phase.again and phase.kept.calls:  # none is left where a backward runs a second time
        return phase.kept.calls.popleft()
    outputs = compute()
    if not phase.again:
        # detached, or they would hold the graph, and with it this, until a garbage collection
        phase.kept.calls.append(tuple(output.detach() for output in outputs))
    return outputs
