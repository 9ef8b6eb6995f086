"""Any source to trajectories: find out what a file is, hand each row to its reader, check the whole."""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import chain, islice
from os import PathLike, fspath
from typing import Any, get_args

from harts.formats import chat, conversations
from harts.formats.chat import Reasoning, Rows
from harts.formats.checks import untrained
from harts.formats.files import Source, parts_of
from harts.formats.renaming import check_names, parse_fields, renamed
from harts.formats.rows import Row
from harts.formats.sessions import SPREAD, rows_of
from harts.formats.sources import MODULES, Format, format_of
from harts.formats.template import load
from harts.formats.unused import ALWAYS, Unused
from harts.trajectory import Trajectory

__all__ = ["Format", "iter_trajectories", "read"]

Reader = Callable[[Row], Iterator[Trajectory]]


def read(
    source: Source,
    *,
    rows: Rows = "trajectory",
    fmt: Format = "auto",
    tokenizer: Any = None,
    reasoning: Reasoning = "keep",
    limit: int | None = None,
    fields: Mapping[str, str] | str | None = None,
) -> list[Trajectory]:
    """All trajectories of a source, checked.

    Args:
        source: a path or several, to JSON Lines (plain, gzip, Zstandard) or Parquet; or rows in memory: a mapping or
            an iterable of them.
        rows: what a chat row becomes: one trajectory a conversation, or one a model call ("turn").
        fmt: whose field names the rows have; "auto" looks at the first row of every file.
        tokenizer: for chat rows: a transformers tokenizer with a chat template, or its directory; None renders ChatML
            in the Qwen vocabulary.
        reasoning: for chat rows: "drop" leaves the reasoning of earlier turns out of the context.
        limit: read no further than this many trajectories.
        fields: for rows under other names: our field -> theirs, or "token_ids=output.ids,loss_mask=mask"; with it,
            other fields that no reader knows are named and left out. A row of tokens without `id` is named by its
            number.

    Raises:
        ValueError: a file or row that is not what docs/data.md describes; the message names file, line, trajectory
            and field. Also if no token is trained in all that was read.
    """
    options: Any = {"rows": rows, "fmt": fmt, "tokenizer": tokenizer, "reasoning": reasoning, "fields": fields}
    return list(iter_trajectories(source, limit=limit, **options))


def iter_trajectories(
    source: Source,
    *,
    rows: Rows = "trajectory",
    fmt: Format = "auto",
    tokenizer: Any = None,
    reasoning: Reasoning = "keep",
    limit: int | None = None,
    fields: Mapping[str, str] | str | None = None,
) -> Iterator[Trajectory]:
    """As `read`, one trajectory at a time; keeps only the ids that it has seen.

    The check that some token is trained can only come after the last trajectory.
    """
    for name, value, known in (("rows", rows, Rows), ("fmt", fmt, Format), ("reasoning", reasoning, Reasoning)):
        if value not in get_args(known):
            raise ValueError(f"{name}: expected one of {', '.join(get_args(known))}, got {value!r}")
    if limit is not None and (not isinstance(limit, int) or limit < 1):
        raise ValueError(f"limit: expected None or a positive number of trajectories, got {limit!r}")
    template = None if tokenizer is None else load(tokenizer)
    chats = partial(chat.trajectories, rows=rows, reasoning=reasoning, template=template)
    return _checked(islice(_all(source, fmt, parse_fields(fields), chats), limit), source)


def _all(source: Source, fmt: Format, names: Mapping[str, str], chats: Reader) -> Iterator[Trajectory]:
    places: dict[str, str] = {}
    for part in parts_of(source):
        reader: Reader | None = None
        for row in rows_of(part, fmt):
            if names:
                row = renamed(row, names)
            if reader is None:
                named = format_of(row) if fmt == "auto" or fmt in SPREAD else fmt
                reader = _reader(named, names, chats)
            for trajectory in reader(row):
                if trajectory.id in places:
                    got = f"the id of {places[trajectory.id]}"
                    raise row.error("id", "a name used once", f"{trajectory.id!r}, {got}", "give every row its own")
                places[trajectory.id] = row.place
                yield trajectory


def _checked(trajectories: Iterator[Trajectory], source: Source) -> Iterator[Trajectory]:
    trained, count = False, 0
    for trajectory in trajectories:
        count += 1
        trained = trained or bool(trajectory.loss_mask.any())
        yield trajectory
    if not trained:
        raise untrained(fspath(source) if isinstance(source, str | PathLike) else "source", count)


def _reader(fmt: str, names: Mapping[str, str], chats: Reader) -> Reader:
    """What makes trajectories of a row of a format; where fields were renamed, only those that it knows are left."""
    if fmt == "chat":
        check_names(names, chat.KNOWN | conversations.NAMES, fmt)
        others = Unused(fmt, chat.KNOWN, ())

        def of_chat(row: Row) -> Iterator[Trajectory]:
            row, dropped = conversations.as_chat(row)
            others.name(row, dropped)
            yield from chats(_only(row, chat.KNOWN, others) if names else row)

        return of_chat
    module = MODULES[fmt]
    if not hasattr(module, "READ"):  # our own schema refuses what it does not know, but where fields were renamed
        check_names(names, module.KNOWN, fmt)
        unused = Unused(fmt, module.KNOWN, ())

        def of_ours(row: Row) -> Iterator[Trajectory]:
            if names:
                named = {"id": row.id, "group": row.id}
                row = _only(row, module.KNOWN, unused)
                row = replace(row, fields={**named, **row.fields})
            yield from module.trajectories(row)

        return of_ours
    check_names(names, ALWAYS | module.READ | set(chain.from_iterable(module.CHOICES)), fmt)
    unused = Unused(fmt, module.READ, module.CHOICES)

    def reader(row: Row) -> Iterator[Trajectory]:
        unused.look(row)
        yield from module.trajectories(row)

    return reader


def _only(row: Row, known: Collection[str], unused: Unused) -> Row:
    """The row's fields that are known and not null; the others are named."""
    given = {name: value for name, value in row.fields.items() if value is not None}
    unused.name(row, {str(name) for name in given if name not in known})
    return replace(row, fields={name: value for name, value in given.items() if name in known})
