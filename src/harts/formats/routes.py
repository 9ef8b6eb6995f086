"""Recorded experts of samplers and trainers: decoded from whatever form they come in, and one entry for every token.

A record comes as
- an array, a tensor or nested lists [R, Y, K]; null for a token without a record;
- base64 of an .npy file: vllm-project/vllm, vllm/entrypoints/openai/completion/protocol.py at commit 002032e;
- base64 of the bare numbers, row after row, with their shape in `routed_experts_shape` beside them:
  sgl-project/sglang 0.5.23, python/sglang/srt/state_capturer/routed_experts.py;
- {"data": base64 of the bare numbers, "shape": [R, Y, K], "dtype": name, "start": first token}:
  ai-dynamo/dynamo, components/src/dynamo/vllm/handlers.py; PrimeIntellect-ai/verifiers, verifiers/v1/graph.py at
  commit a60a606.

The last token of a request was sampled and never ran, so a record of a whole request has one row less than tokens.

Shape suffixes: R recorded tokens, L tokens, Y layers, K experts per token.
"""

import base64
import binascii
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from harts.formats.rows import Row, to_numpy

__all__ = ["Record", "align", "join", "missing_for_nulls", "read_record", "without_filler"]

_DTYPES = ("uint8", "int16", "uint16", "int32", "int64")
_OF_BYTES = {1: "uint8", 2: "int16", 4: "int32", 8: "int64"}
_NPY = b"\x93NUMPY"


@dataclass(frozen=True, slots=True, eq=False)
class Record:
    """What was recorded of a request.

    Attributes:
        name: the source's name of the field, for messages.
        experts_RYK: integers [R, Y, K], R > 0.
        start: token of the first row.
    """

    name: str
    experts_RYK: NDArray[Any]
    start: int = 0


def read_record(
    row: Row, name: str, value: Any, *, beside: Mapping[str, Any] | None = None, start: int | None = None
) -> Record | None:
    """The record in any of its forms; None where there is none, or one of no token.

    Args:
        name: the field's name, for messages.
        value: the field.
        beside: where `routed_experts_shape` ([Y, K] or [R, Y, K]) and `routed_experts_dtype` may stand.
        start: token of the first row, where the source names it; 0 by default.

    Raises:
        ValueError: no base64, no .npy, bare numbers without a shape, another shape or dtype than named, no integers.
    """
    beside = beside or {}
    shape, dtype = beside.get("routed_experts_shape"), beside.get("routed_experts_dtype")
    if isinstance(value, Mapping):
        if value.get("data") is None:
            raise row.error(name, 'an object with "data" and "shape"', f"the members {', '.join(value)}", "rename them")
        shape, dtype = value.get("shape", shape), value.get("dtype", dtype)
        start = value.get("start") if start is None else start
        value = value["data"]
    if value is None:
        return None
    start = 0 if start is None else start
    if isinstance(start, bool) or not isinstance(start, int | np.integer) or start < 0:
        raise row.error(name, "a first token >= 0", repr(start), "name the number of tokens left out in front")
    shape = None if shape is None else _checked_shape(row, name, shape)
    experts = _decoded(row, name, value, shape, dtype)
    if experts.size == 0:
        return None
    if experts.ndim != 3 or (shape is not None and experts.shape[-len(shape) :] != shape):
        expected = "shape [tokens, layers, experts per token]" if shape is None else f"the shape {list(shape)}"
        action = "name it in routed_experts_shape" if experts.ndim == 1 else "give one request's record"
        raise row.error(name, expected, f"shape {list(experts.shape)}", action)
    if experts.dtype.kind not in "iu":
        raise row.error(name, "integers", f"values of type {experts.dtype}", "give the ids of experts")
    return Record(name, experts, int(start))


def join(row: Row, prompt: Record, response: Record | None, *, boundary: int) -> Record:
    """The record of a prompt of `boundary` tokens and that of what follows it as one."""
    stop = prompt.start + len(prompt.experts_RYK)
    if stop > boundary or (response is not None and stop < boundary):
        expected = f"{max(boundary - prompt.start, 0)} rows, one per prompt token"
        got = f"{len(prompt.experts_RYK)} rows"
        raise row.error(prompt.name, expected, got, "give the prompt's own record")
    if response is None:
        return prompt
    one, other = prompt.experts_RYK, response.experts_RYK
    if one.shape[1:] != other.shape[1:]:
        expected = f"{one.shape[1]} layers and {one.shape[2]} experts per token, as {prompt.name} has"
        got = f"{other.shape[1]} and {other.shape[2]}"
        raise row.error(response.name, expected, got, "record both with one model")
    return Record(response.name, np.concatenate([one, other]), prompt.start)


def align(row: Row, record: Record | None, length: int, *, least: int | None = None) -> NDArray[Any] | None:
    """Experts of each of `length` tokens, [L, Y, K], -1 where none is recorded; None without a record.

    Layers that hold 0 in every place of every recorded token (K > 1) have no experts, as K experts of a token differ:
    engines record all decoder layers and leave the dense ones 0. They are left out.

    Args:
        least: tokens, from the first on, of which the record must not end before; by default all but the last.

    Raises:
        ValueError: the record ends before that or behind the last token, or is 0 throughout.
    """
    if record is None:
        return None
    experts_RYK, start = record.experts_RYK, record.start
    least = length - 1 if least is None else least
    stop = start + len(experts_RYK)
    if not least <= stop <= length:
        needed = max(least - start, 0)
        expected = f"{needed} rows, for tokens {start} to {least - 1} of {length} (the last one never ran)"
        if least < length - 1:
            expected = f"{needed} to {length - start} rows, for tokens from {start} on, of {length}"
        action = "give the record of the whole request, or name the token it starts at"
        raise row.error(record.name, expected, f"{len(experts_RYK)} rows", action)
    missing_RYK = experts_RYK == -1
    zero_Y = (missing_RYK | (experts_RYK == 0)).all((0, 2)) & ~missing_RYK.all((0, 2))
    routed_Y = ~zero_Y | (experts_RYK.shape[2] == 1)
    if not routed_Y.any():
        raise row.error(
            record.name, "experts", "0 in all places of all tokens", "the engine captured none: leave it out"
        )
    experts_RYK = experts_RYK[:, routed_Y]
    wide = experts_RYK.dtype.itemsize == 8  # no integer holds uint64 and -1
    dtype = np.dtype(np.int64) if wide else np.promote_types(experts_RYK.dtype, np.int16)
    routes_LYK = np.full((length, *experts_RYK.shape[1:]), -1, dtype)
    routes_LYK[start:stop] = experts_RYK
    return routes_LYK


def without_filler(name: str, experts_LYK: NDArray[Any]) -> Record | None:
    """The record in an array with a place for every token, in which zeros follow the last recorded one.

    verl fills so: verl-project/verl, verl/experimental/agent_loop/agent_loop.py at commit 1dda039. None where all is 0.
    """
    used = np.flatnonzero(experts_LYK.any((1, 2)))
    return Record(name, experts_LYK[: int(used[-1]) + 1]) if len(used) else None


def missing_for_nulls(tokens: Any) -> Any:
    """Nested lists in which a token's null has become -1 throughout; None where all are null; else as it was."""
    if not isinstance(tokens, list) or all(token is not None for token in tokens):
        return tokens
    recorded = next((token for token in tokens if token is not None), None)
    if recorded is None:
        return None
    none = [[-1] * len(layer) for layer in recorded]
    return [none if token is None else token for token in tokens]


def _decoded(row: Row, name: str, value: Any, shape: tuple[int, ...] | None, dtype: Any) -> NDArray[Any]:
    if isinstance(value, str):
        try:
            value = base64.b64decode(value, validate=True)
        except (binascii.Error, ValueError) as error:
            raise row.error(name, "base64", str(error), "give it as the engine returned it") from error
    if isinstance(value, bytes | bytearray | memoryview):
        return _of_bytes(row, name, bytes(value), shape, dtype)
    value = missing_for_nulls(value)
    try:
        array = np.zeros(0, np.int64) if value is None else to_numpy(value)
    except ValueError as error:
        raise row.error(name, "as many layers and experts for every token", "ragged lists", "check the file") from error
    return _shaped(row, name, array, shape) if array.ndim == 1 and shape is not None else array


def _of_bytes(row: Row, name: str, data: bytes, shape: tuple[int, ...] | None, dtype: Any) -> NDArray[Any]:
    if data.startswith(_NPY):
        try:
            loaded: NDArray[Any] = np.load(io.BytesIO(data), allow_pickle=False)
        except (ValueError, EOFError) as error:
            raise row.error(name, "an .npy file", f"a damaged one ({error})", "record it again") from error
        return loaded
    if not data:
        return np.zeros(0, np.int64)
    if shape is None:
        action = "put [num_hidden_layers, num_experts_per_tok] of the model's config there"
        raise row.error(name, "its shape in routed_experts_shape beside it", "bare numbers alone", action)
    if dtype is None:
        bytes_each = len(data) // max(1, int(np.prod(shape))) if len(shape) == 3 else 4
        dtype = _OF_BYTES.get(bytes_each, "int32")
    if dtype not in _DTYPES:
        raise row.error(name, f"a dtype of {', '.join(_DTYPES)}", repr(dtype), "convert it before")
    itemsize = np.dtype(dtype).itemsize
    if len(data) % itemsize:
        raise row.error(name, f"whole numbers of {itemsize} bytes ({dtype})", f"{len(data)} bytes", "check its dtype")
    return _shaped(row, name, np.frombuffer(data, np.dtype(dtype).newbyteorder("<")), shape)


def _shaped(row: Row, name: str, flat: NDArray[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    """Flat numbers as [R, Y, K]; R is what there is where the shape does not say."""
    per_token = int(np.prod(shape[-2:]))
    if flat.size % per_token or (len(shape) == 3 and flat.size != shape[0] * per_token):
        got = f"{flat.size} numbers"
        expected = (
            f"{'a multiple of ' if len(shape) == 2 else ''}{int(np.prod(shape))} numbers, for shape {list(shape)}"
        )
        raise row.error(name, expected, got, "check routed_experts_shape and its dtype")
    return flat.reshape(-1, *shape[-2:])


def _checked_shape(row: Row, name: str, shape: Any) -> tuple[int, ...]:
    sizes = shape.tolist() if hasattr(shape, "tolist") else shape
    whole = isinstance(sizes, Sequence) and not isinstance(sizes, str) and all(type(size) is int for size in sizes)
    if not whole or len(sizes) not in (2, 3) or min(sizes[-2:]) < 1 or sizes[0] < 0:
        expected = "a shape [layers, experts per token] or [tokens, layers, experts per token]"
        raise row.error(name, expected, repr(shape), "put num_hidden_layers and num_experts_per_tok there")
    return tuple(sizes)
