"""Batches and padding of other frameworks' rows: split the one, cut the other."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from harts.formats.rows import Row, to_numpy

__all__ = ["first_of", "inside", "per_token", "split", "zero_one"]


def split(row: Row, key: str) -> Iterator[Row]:
    """The samples of a row that holds a batch (field `key` is a list of lists); else the row itself.

    Fields with one element per sample are split, others are shared. Samples of a row with an id get "<id>/<index>".
    """
    value = row.get(key)
    if value is None or len(value) == 0 or np.ndim(to_numpy(value[0])) == 0:
        yield row
        return
    size = len(value)
    columns = {name: column for name, column in row.fields.items() if _splits(column, size)}
    for index in range(size):
        fields = {**row.fields, **{name: column[index] for name, column in columns.items()}}
        if "id" not in columns:
            fields["id"] = f"{row.id}/{index}"
        yield replace(row, fields={name: _plain(item) for name, item in fields.items()})


def inside(row: Row, name: str, length: int, *, what: str) -> NDArray[np.bool_]:
    """A padding mask as bool [length]: 1 for a token; all True where the row has none.

    Raises:
        ValueError: another length, other values, or padding between tokens.
    """
    mask = zero_one(row, name, length, what=what)
    at = np.flatnonzero(mask)
    if len(at) and int(at[-1]) - int(at[0]) + 1 != len(at):
        hole = int(at[0]) + int(np.argmin(mask[at[0] :]))
        raise row.error(name, "padding only before or after the tokens", f"a hole at position {hole}", "move it aside")
    return mask


def zero_one(row: Row, name: str, length: int, *, what: str) -> NDArray[np.bool_]:
    """A mask as bool [length]; all True where the row has none; a ValueError for other lengths or values."""
    if row.get(name) is None:
        return np.ones(length, np.bool_)
    mask = per_token(row, name, length, what=what)
    if not np.isin(mask, (0, 1)).all():
        raise row.error(name, "0/1 or booleans", "other values", "use advantages for weights")
    return mask.astype(np.bool_)


def per_token(row: Row, name: str, length: int, *, what: str) -> NDArray[Any]:
    """Numbers, one per token: [length]; of [length, k] (top-k log-probabilities) the first, the sampled token's."""
    values = to_numpy(row.get(name))
    if values.ndim == 2 and name == "logprobs":
        values = values[:, 0]
    if values.shape != (length,):
        got = f"shape {list(values.shape)}"
        raise row.error(name, f"one value per {what} token ({length})", got, "give every token its value")
    return values


def first_of(row: Row, names: Sequence[str]) -> str | None:
    """The first of the names that the row has."""
    return next((name for name in names if row.get(name) is not None), None)


def _splits(column: Any, size: int) -> bool:
    if isinstance(column, str | bytes | Mapping) or getattr(column, "ndim", 1) == 0:
        return False
    return hasattr(column, "__len__") and len(column) == size


def _plain(value: Any) -> Any:
    return value.item() if np.ndim(value) == 0 and hasattr(value, "item") else value
