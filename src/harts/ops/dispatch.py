"""How an op picks its implementation: by name, and never another one than was named."""

from collections.abc import Mapping
from typing import TypeVar

from torch import Tensor

__all__ = ["check_context", "choose"]

F = TypeVar("F")


def choose(op: str, impl: str, implementations: Mapping[str, F]) -> F:
    """What `impl` names, one of the implementations of an op.

    Raises:
        ValueError: there is none of that name; the message lists those there are.
    """
    if impl not in implementations:
        names = ", ".join(repr(name) for name in implementations)
        raise ValueError(f"{op}: impl={impl!r} is not available; expected one of {names}")
    return implementations[impl]


def check_context(op: str, context: Mapping[str, Tensor], rows: int) -> None:
    """Compares what a piece was given of the rows outside it with what it reads.

    Args:
        op: whose context.
        context: tensors of one entry a row, by name; empty where none was given.
        rows: entries that the piece reads.

    Raises:
        ValueError: the context is missing, or of another length.
    """
    if rows and not context:
        raise ValueError(f"{op}: expected the context of {rows} rows outside this piece of a tree, got none")
    for name, tensor in context.items():
        if len(tensor) != rows:
            raise ValueError(
                f"{op}: expected a context of {rows} {name} from outside this piece of a tree, got {len(tensor)}"
            )
