"""Any source to trajectories: find out what a file is, hand each row to its reader, check the whole."""

from collections.abc import Callable, Iterator
from itertools import islice
from os import PathLike, fspath
from typing import Any, get_args

from harts.formats import chat
from harts.formats.chat import Reasoning, Rows
from harts.formats.checks import untrained
from harts.formats.conversations import as_chat
from harts.formats.files import Source, parts_of
from harts.formats.rows import Row
from harts.formats.sessions import SPREAD, rows_of
from harts.formats.sources import MODULES, Format, format_of
from harts.formats.template import Template, load
from harts.formats.unused import Unused
from harts.trajectory import Trajectory

__all__ = ["Format", "iter_trajectories", "read"]


def read(
    source: Source,
    *,
    rows: Rows = "trajectory",
    fmt: Format = "auto",
    tokenizer: Any = None,
    reasoning: Reasoning = "keep",
    limit: int | None = None,
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

    Raises:
        ValueError: a file or row that is not what docs/data.md describes; the message names file, line, trajectory
            and field. Also if no token is trained in all that was read.
    """
    return list(iter_trajectories(source, rows=rows, fmt=fmt, tokenizer=tokenizer, reasoning=reasoning, limit=limit))


def iter_trajectories(
    source: Source,
    *,
    rows: Rows = "trajectory",
    fmt: Format = "auto",
    tokenizer: Any = None,
    reasoning: Reasoning = "keep",
    limit: int | None = None,
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
    return _checked(islice(_all(source, fmt, rows, reasoning, template), limit), source)


def _all(
    source: Source, fmt: Format, rows: Rows, reasoning: Reasoning, template: Template | None
) -> Iterator[Trajectory]:
    places: dict[str, str] = {}
    for part in parts_of(source):
        reader: Callable[[Row], Iterator[Trajectory]] | None = None
        for row in rows_of(part, fmt):
            if reader is None:
                named = format_of(row) if fmt == "auto" or fmt in SPREAD else fmt
                reader = _reader(named, rows, reasoning, template)
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


def _reader(
    fmt: str, rows: Rows, reasoning: Reasoning, template: Template | None
) -> Callable[[Row], Iterator[Trajectory]]:
    if fmt == "chat":
        others = Unused(fmt, (), ())

        def chats(row: Row) -> Iterator[Trajectory]:
            row, dropped = as_chat(row)
            others.name(row, dropped)
            yield from chat.trajectories(row, rows=rows, reasoning=reasoning, template=template)

        return chats
    module = MODULES[fmt]
    if not hasattr(module, "READ"):  # our own schema refuses what it does not know
        plain: Callable[[Row], Iterator[Trajectory]] = module.trajectories
        return plain
    unused = Unused(fmt, module.READ, module.CHOICES)

    def reader(row: Row) -> Iterator[Trajectory]:
        unused.look(row)
        yield from module.trajectories(row)

    return reader
