"""Trajectories from what is in memory: lists, numpy arrays and tensors, flat or padded."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from harts.formats.checks import check_ids
from harts.formats.routes import align, without_filler
from harts.formats.rows import Row, build, to_numpy
from harts.trajectory import Trajectory

__all__ = ["from_lists", "from_padded"]

_PER_TOKEN = ("logprobs", "ref_logprobs", "merge_keys")


def from_lists(
    token_ids: Sequence[Any],
    loss_mask: Sequence[Any],
    *,
    group: Sequence[str] | None = None,
    id: Sequence[str] | None = None,
    logprobs: Sequence[Any] | None = None,
    ref_logprobs: Sequence[Any] | None = None,
    advantages: Sequence[Any] | None = None,
    reward: Sequence[float | None] | None = None,
    temperature: Sequence[float] | float = 1.0,
    merge_keys: Sequence[Any] | None = None,
    routes: Sequence[Any] | None = None,
    meta: Sequence[Mapping[str, Any]] | None = None,
) -> list[Trajectory]:
    """One trajectory per element; every argument but `temperature` holds one element per trajectory.

    Args:
        token_ids: B sequences of integers; element b has length L_b.
        loss_mask: B sequences of 0/1 or booleans of the same lengths.
        group: B names; by default every trajectory is a group of its own.
        id: B names; by default "row0", "row1", ...
        logprobs, ref_logprobs, merge_keys: B sequences of length L_b, or None.
        advantages: B numbers, or B sequences of length L_b, or None.
        reward: B numbers or None.
        temperature: one number for all, or B numbers.
        routes: B arrays [L_b, layers, experts per token] of recorded experts, or None.
        meta: B mappings.

    Raises:
        ValueError: another number of elements, the same id twice, or what `Trajectory` refuses.
    """
    count = len(token_ids)
    columns: dict[str, Sequence[Any]] = {"token_ids": token_ids, "loss_mask": loss_mask}
    columns["id"] = [f"row{index}" for index in range(count)] if id is None else id
    columns["group"] = columns["id"] if group is None else group
    scalar = np.ndim(to_numpy(temperature)) == 0
    columns["temperature"] = [temperature] * count if scalar else cast(Sequence[float], temperature)
    given = {"logprobs": logprobs, "ref_logprobs": ref_logprobs, "merge_keys": merge_keys, "advantages": advantages}
    given |= {"reward": reward, "routes": routes, "meta": meta}
    columns |= {name: value for name, value in given.items() if value is not None}
    for name, column in columns.items():
        if len(column) != count:
            raise ValueError(f"{name}: expected one element per trajectory ({count}), got {len(column)}")
    done = []
    for index in range(count):
        fields = {name: _plain(column[index]) for name, column in columns.items() if column[index] is not None}
        done.append(build(Row(fields, f"row {index + 1}", index), **fields))
    check_ids(done)
    return done


def from_padded(
    token_ids: Any,
    attention_mask: Any,
    loss_mask: Any,
    *,
    logprobs: Any = None,
    ref_logprobs: Any = None,
    merge_keys: Any = None,
    advantages: Any = None,
    routes: Any = None,
    **columns: Any,
) -> list[Trajectory]:
    """One trajectory per line of a padded batch; numpy arrays, tensors or nested lists; padding on any side.

    Args:
        token_ids: integers [B, L].
        attention_mask: [B, L]; 1 for a token, 0 for padding at the start or the end.
        loss_mask: [B, L] of 0/1 or booleans; what it says about padding is ignored.
        logprobs, ref_logprobs, merge_keys: [B, L] or None.
        advantages: [B], [B, L] or None.
        routes: recorded experts [B, L, layers, experts per token] or None. Behind the last recorded token of a line
            zeros count as no record, as verl fills its `routed_experts`; -1 does everywhere.
        columns: `group`, `id`, `reward`, `temperature`, `meta`, as in `from_lists`.

    Raises:
        ValueError: shapes that differ, padding between tokens, a line of nothing but padding, or what `from_lists`
            refuses.
    """
    ids, attention = to_numpy(token_ids), to_numpy(attention_mask)
    if ids.ndim != 2:
        raise ValueError(f"token_ids: expected shape [B, L], got {list(ids.shape)}; use from_lists for ragged lists")
    padded = {"attention_mask": attention, "loss_mask": to_numpy(loss_mask)}
    optional = {"logprobs": logprobs, "ref_logprobs": ref_logprobs, "merge_keys": merge_keys}
    padded |= {name: to_numpy(value) for name, value in optional.items() if value is not None}
    if advantages is not None:
        advantages = to_numpy(advantages)
        if advantages.ndim == 2:
            padded["advantages"] = advantages
        else:
            columns["advantages"] = advantages
    for name, array in padded.items():
        if array.shape != ids.shape:
            raise ValueError(f"{name}: expected the shape of token_ids {list(ids.shape)}, got {list(array.shape)}")
    given = columns.get("id")
    names = [f"row{b}" for b in range(len(ids))] if given is None else given
    if len(names) != len(ids):
        raise ValueError(f"id: expected one element per trajectory ({len(ids)}), got {len(names)}")
    spans = [_span(line, name) for line, name in zip(attention, names, strict=True)]
    if routes is not None:
        columns["routes"] = _cut_routes(to_numpy(routes), ids.shape, spans, names)
    cut = {name: [line[span] for line, span in zip(array, spans, strict=True)] for name, array in padded.items()}
    del cut["attention_mask"]
    return from_lists([line[span] for line, span in zip(ids, spans, strict=True)], **cut, **columns)


def _cut_routes(
    routes: NDArray[Any], shape: tuple[int, ...], spans: Sequence[slice], names: Sequence[str]
) -> list[NDArray[Any] | None]:
    if routes.ndim != 4 or routes.shape[:2] != shape or routes.dtype.kind not in "iu":
        expected = f"integers of shape {[*shape, 'layers', 'experts per token']}"
        raise ValueError(f"routes: expected {expected}, got {routes.dtype} of shape {list(routes.shape)}")
    done = []
    for index, (line, span, name) in enumerate(zip(routes, spans, names, strict=True)):
        row = Row({"id": name}, f"row {index + 1}", index)
        done.append(align(row, without_filler("routes", line[span]), span.stop - span.start, least=0))
    return done


def _span(attention: NDArray[Any], name: str) -> slice:
    if attention.dtype.kind not in "iufb" or not np.isin(attention, (0, 1)).all():
        raise ValueError(f"trajectory {name!r}, field attention_mask: expected 0/1 or booleans, got other values")
    inside = np.flatnonzero(attention)
    if len(inside) == 0:
        raise ValueError(
            f"trajectory {name!r}, field attention_mask: expected a token, got padding only; drop the line"
        )
    start, stop = int(inside[0]), int(inside[-1]) + 1
    if stop - start != len(inside):
        hole = start + int(np.argmin(attention[start:stop]))
        raise ValueError(
            f"trajectory {name!r}, field attention_mask: expected padding only before or after the tokens, got a hole "
            f"at position {hole}; move the padding to one side"
        )
    return slice(start, stop)


def _plain(value: Any) -> Any:
    """Tensors as numpy; numpy scalars as Python numbers; everything else as it is."""
    if not hasattr(value, "numpy") and not isinstance(value, np.ndarray | np.generic):
        return value
    array = to_numpy(value)
    return array.item() if array.ndim == 0 else array
