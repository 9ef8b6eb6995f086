"""Interrupts that wait for the step in hand."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType
from typing import Any

__all__ = ["Flag", "signals_as_flag"]


@dataclass
class Flag:
    """Whether a signal came."""

    is_set: bool = False


@contextmanager
def signals_as_flag(tell: Callable[[], None] = lambda: None) -> Iterator[Flag]:
    """Turns the first SIGINT or SIGTERM into a flag; a second one acts as usual.

    Args:
        tell: called on the first, to say what happens next.
    """
    flag = Flag()
    previous: dict[int, Any] = {}

    def on_signal(number: int, frame: FrameType | None) -> None:
        flag.is_set = True
        for kind, handler in previous.items():
            signal.signal(kind, handler)
        with suppress(RuntimeError):  # the signal came in the middle of a print, which cannot be entered again
            tell()

    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            previous[number] = signal.signal(number, on_signal)
    except ValueError:  # not in the main thread: whoever owns it handles signals
        previous.clear()
    try:
        yield flag
    finally:
        for kind, handler in previous.items():
            signal.signal(kind, handler)
