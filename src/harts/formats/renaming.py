"""Rows of any source under our names: `token_ids=output.ids,loss_mask=mask` says where each of our fields is."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from difflib import get_close_matches
from typing import Any

from harts.formats.rows import Row

__all__ = ["check_names", "parse_fields", "renamed"]


def parse_fields(fields: Mapping[str, str] | str | None) -> Mapping[str, str]:
    """Our field -> theirs, of a mapping or of text as "token_ids=ids,loss_mask=mask".

    Raises:
        ValueError: something other than pairs, or one of our fields twice.
    """
    if fields is None:
        return {}
    if isinstance(fields, Mapping):
        return dict(fields)
    found: dict[str, str] = {}
    for pair in fields.split(","):
        ours, equals, theirs = (part.strip() for part in pair.partition("="))
        if not equals or not ours or not theirs:
            example = "fields: expected OURS=THEIRS, several with commas between, as token_ids=ids,loss_mask=mask"
            raise ValueError(f"{example}, got {pair!r}; write one pair for each field")
        if ours in found:
            raise ValueError(f"fields: expected each of our fields once, got {ours} twice; remove one of them")
        found[ours] = theirs
    return found


def check_names(names: Mapping[str, str], known: Collection[str], fmt: str) -> None:
    """Raise ValueError for a field of ours that rows of a format do not have."""
    for ours in names:
        if ours not in known:
            near = get_close_matches(ours, known, n=1)
            action = f"did you mean {near[0]}?" if near else "or pass another format"
            raise ValueError(f"fields: expected fields of {fmt} ({', '.join(sorted(known))}), got {ours!r}; {action}")


def renamed(row: Row, names: Mapping[str, str]) -> Row:
    """The row with the fields that are named, under our names; its other fields stay.

    `a.b` is the member b of the object a, unless the row has a field of that very name. A field that a row has as null
    or not at all stays away where another row's reader would do without it; our required fields are asked for later.

    Raises:
        ValueError: none of the fields is in the row, or a field of ours stands there already.
    """
    used = {theirs if theirs in row.fields else theirs.split(".")[0] for theirs in names.values()}
    found = {ours: value for ours, theirs in names.items() if (value := _at(row, theirs)) is not None}
    if not found:
        have = ", ".join(_paths(row.fields)) or "none"
        raise row.error(
            "fields", f"one of {', '.join(names.values())}", f"a row with {have}", "name fields that it has"
        )
    kept = {name: value for name, value in row.fields.items() if name not in used}
    for ours in found:
        if kept.get(ours) is not None:
            action = f"leave {ours} out of fields, or rename it in the rows"
            raise row.error(ours, f"it to be {names[ours]}", f"a field {ours} in the row too", action)
    return replace(row, fields={**kept, **found})


def _at(row: Row, path: str) -> Any:
    if path in row.fields:
        return row.fields[path]
    value: Any = row.fields
    for name in path.split("."):
        if not isinstance(value, Mapping) or name not in value:
            return None
        value = value[name]
    return value


def _paths(fields: Mapping[str, Any]) -> Iterator[str]:
    """Names of fields, and of the members of objects."""
    for name, value in fields.items():
        yield str(name)
        if isinstance(value, Mapping):
            yield from (f"{name}.{inner}" for inner in value)
