"""How an op picks its implementation: by name, and never another one than was named."""

from collections.abc import Callable, Mapping
from typing import TypeVar

__all__ = ["choose"]

F = TypeVar("F", bound=Callable[..., object])


def choose(op: str, impl: str, implementations: Mapping[str, F]) -> F:
    """The implementation called `impl`.

    Raises:
        ValueError: there is none of that name; the message lists those there are.
    """
    if impl not in implementations:
        names = ", ".join(repr(name) for name in implementations)
        raise ValueError(f"{op}: impl={impl!r} is not available; expected one of {names}")
    return implementations[impl]
