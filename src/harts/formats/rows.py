"""One row of input and the errors about it: every message says file, line, trajectory, field and what to do."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import numpy as np
from numpy.typing import NDArray

from harts.trajectory import Trajectory

__all__ = ["Row", "build", "common_fields", "ids_of", "respond", "to_numpy"]

# Fields of our own schema that hold one value for the whole trajectory; every source may carry them too.
_PER_TRAJECTORY = ("reward", "temperature")


@dataclass(frozen=True, slots=True)
class Row:
    """One JSON object, Parquet row or mapping, and where it came from.

    Attributes:
        fields: the fields by name; a null stands for an absent field (Parquet has nothing else).
        place: file and line for messages, as "rollouts.jsonl, line 3".
        number: running number over the whole source, from 0; names rows that have no id.
    """

    fields: Mapping[str, Any]
    place: str
    number: int

    @property
    def id(self) -> str:
        """The row's own name, else its running number."""
        value = self.fields.get("id")
        named = isinstance(value, str | int) and not isinstance(value, bool) and value != ""
        return str(value) if named else f"row{self.number}"

    def get(self, *names: str) -> Any:
        """The first field of these names that is there and not null, else None."""
        for name in names:
            if self.fields.get(name) is not None:
                return self.fields[name]
        return None

    def require(self, *names: str) -> Any:
        """As `get`, but a ValueError names the first name if none is there."""
        value = self.get(*names)
        if value is None:
            other = f" (or {', '.join(names[1:])})" if len(names) > 1 else ""
            raise self.error(names[0], f"this field{other}", "none", self._near(names[0]))
        return value

    def text(self, name: str, default: str) -> str:
        """A name: strings as they are, integers as strings, absent as `default`."""
        value = self.get(name)
        if value is None:
            return default
        if isinstance(value, int | np.integer) and not isinstance(value, bool):
            return str(value)
        if not isinstance(value, str):
            raise self.error(name, "a string", repr(value), "convert it with str()")
        return value

    def error(self, name: str, expected: str, got: str, action: str) -> ValueError:
        """The ValueError to raise about one field."""
        return ValueError(
            f"{self.place}: trajectory {self.id!r}, field {name}: expected {expected}, got {got}; {action}"
        )

    def refuse_unknown(self, known: Collection[str]) -> None:
        """Raise on the first field that is not in `known`; null fields of other names are refused too."""
        for name in self.fields:
            if name not in known:
                near = get_close_matches(str(name), known, n=1)
                action = f"did you mean {near[0]}?" if near else "remove it, or put it into meta"
                raise self.error(str(name), f"one of {', '.join(sorted(known))}", "an unknown field", action)

    def refuse_unknown_masks(self, known: Collection[str]) -> None:
        """Raise on a field named like a mask that is not in `known`: it may say which tokens to train.

        Other unknown fields of other frameworks' rows are theirs, and left alone.
        """
        for name in self.fields:
            if str(name).endswith("mask") and name not in known and name != "pixel_attention_mask":
                expected = f"one of the masks {', '.join(sorted(known))}" if known else "no mask"
                raise self.error(str(name), expected, "an unknown one", "rename it, or remove it if it trains all")

    def _near(self, name: str) -> str:
        near = get_close_matches(name, [str(field) for field in self.fields if field != name], n=1)
        return f"did you mean it by {near[0]}?" if near else f"the row has {', '.join(map(str, self.fields)) or 'none'}"


def build(row: Row, **fields: Any) -> Trajectory:
    """A Trajectory whose errors name the row's place. Nulls among log-probabilities become 0.0 where untrained."""
    for name in ("logprobs", "ref_logprobs"):
        if fields.get(name) is not None:
            fields[name] = _without_nulls(row, name, fields[name], fields["loss_mask"])
    _refuse_booleans(row, "token_ids", fields["token_ids"])
    try:
        return Trajectory(**fields)
    except ValueError as error:
        raise ValueError(f"{row.place}: {error}") from error


def common_fields(row: Row) -> dict[str, Any]:
    """Reward, temperature and meta of a row, under the names of our own schema."""
    fields = {name: row.fields[name] for name in _PER_TRAJECTORY if row.get(name) is not None}
    meta = row.get("meta")
    if meta is not None and not isinstance(meta, Mapping):
        raise row.error("meta", "an object", type(meta).__name__, "put the value under a name")
    source = row.get("source")
    return fields | {"meta": dict(meta or {}) | ({} if source is None else {"source": source})}


def respond(
    row: Row,
    *,
    id: str,
    group: str,
    prompt: NDArray[np.int64],
    response: NDArray[np.int64],
    mask: tuple[str, Any] | None = None,
    values: Mapping[str, tuple[str, Any]] | None = None,
    advantages: Any = None,
    **fields: Any,
) -> Trajectory:
    """A trajectory of a prompt and a response, of which only the response is trained.

    Args:
        prompt, response: token ids, [P] and [R].
        mask: the source's name of the mask and its values, one per response token; None trains the whole response.
        values: our field -> (the source's name, values): one value per response token; the prompt gets 0.
        advantages: a number, or one per response token.
    """
    start, length = len(prompt), len(prompt) + len(response)
    loss_mask: NDArray[Any] = np.zeros(length, np.float64)
    loss_mask[start:] = 1.0 if mask is None else _per_response_token(row, *mask, len(response))
    for name, (theirs, given) in (values or {}).items():
        if given is not None:
            if len(given) != len(response):
                raise _length_error(row, theirs, len(given), len(response))
            fields[name] = [0.0] * start + list(given)
    if advantages is not None:
        if np.ndim(advantages) == 0:
            fields["advantages"] = advantages
        else:
            per_token = _per_response_token(row, "advantages", advantages, len(response))
            fields["advantages"] = np.concatenate([np.zeros(start), per_token])
    token_ids = np.concatenate([prompt, response])
    return build(row, id=id, group=group, token_ids=token_ids, loss_mask=loss_mask, **fields)


def ids_of(row: Row, name: str, value: Any) -> NDArray[np.int64]:
    """Token ids as int64 [L]; a ValueError for anything but flat integers."""
    _refuse_booleans(row, name, value)
    try:
        array = to_numpy(value)
    except ValueError as error:
        raise row.error(name, "a flat list of token ids", "a ragged sequence", "pass one list per row") from error
    if array.size == 0:
        return np.zeros(0, np.int64)
    if array.ndim != 1:
        raise row.error(name, "a flat list of token ids", f"shape {list(array.shape)}", "pass one list per row")
    if array.dtype.kind not in "iu":
        raise row.error(name, "integer token ids", f"values of type {array.dtype}", "convert them before")
    return array.astype(np.int64)


def to_numpy(value: Any) -> NDArray[Any]:
    """An array of a list, a numpy array or a tensor of any library that has .detach/.cpu/.numpy."""
    if hasattr(value, "detach"):
        value = value.detach().cpu()
        try:
            return np.asarray(value.numpy())
        except TypeError:  # bfloat16, which numpy does not have
            return np.asarray(value.float().numpy())
    return np.asarray(value.numpy() if hasattr(value, "numpy") else value)


def _refuse_booleans(row: Row, name: str, ids: Any) -> None:
    if isinstance(ids, list) and bool in set(map(type, ids)):  # numpy would make them 0 and 1
        raise row.error(name, "integers", "booleans among them", "is this the mask?")


def _per_response_token(row: Row, name: str, value: Any, length: int) -> NDArray[Any]:
    array = to_numpy(value)
    if array.shape != (length,):
        raise _length_error(row, name, array.size, length)
    if array.dtype.kind not in "iufb":
        raise row.error(name, "numbers", f"values of type {array.dtype}", "pass plain numbers")
    return array


def _length_error(row: Row, name: str, got: int, length: int) -> ValueError:
    return row.error(name, f"one value per response token ({length})", f"{got} values", "give every token its value")


def _without_nulls(row: Row, name: str, values: Any, mask: Any) -> Any:
    if not isinstance(values, Sequence) or not any(value is None for value in values):
        return values
    for position, (value, trained) in enumerate(zip(values, mask, strict=False)):  # Trajectory compares the lengths
        if value is None and trained:
            action = "give every trained token its log-probability"
            raise row.error(name, "a number at every trained position", f"null at position {position}", action)
    return [0.0 if value is None else value for value in values]
