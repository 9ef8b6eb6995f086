"""Whether a chat template keeps what it rendered: if not, where, and what the model sees in its place.

Two things change a rendering. History: a later turn shows an earlier one otherwise, as where thinking is stripped; then
turns share less, and conversations cannot be read as one trajectory. The generation prompt: the finished message does
not begin as the model was asked to continue; then the response starts at the first token that differs.
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import islice, pairwise
from os import PathLike
from typing import Any

import numpy as np

from harts.formats import conversations
from harts.formats.chat import Reasoning, Turn, parting, turns_of
from harts.formats.files import Source, parts_of
from harts.formats.places import STDIN
from harts.formats.renaming import parse_fields, renamed
from harts.formats.rows import Row
from harts.formats.sessions import SPREAD, rows_of
from harts.formats.sources import format_of
from harts.formats.template import Template, load

__all__ = ["Change", "Stability", "template_stability"]

_BEFORE, _SHOWN = 8, 24
"""Tokens of text before a difference, and from it on."""

_LOOKED_AT = 200
"""Conversations: rendering again costs as much as reading."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """A place where two renderings differ.

    Attributes:
        place: file and line.
        message: the assistant message, counted from 0, whose rendering changes.
        later: the one whose context shows it otherwise; the same one for a generation prompt.
        token: the first token that differs.
        before: text before it.
        first: text of the earlier rendering, or of the generation prompt, from there on.
        second: text of the later one.
    """

    place: str
    message: int
    later: int
    token: int
    before: str
    first: str
    second: str


@dataclass(frozen=True, kw_only=True)
class Stability:
    """What `template_stability` found.

    Attributes:
        conversations: rows that were looked at.
        turns: trained assistant messages in them.
        rewritten: conversations in which a later turn shows an earlier one otherwise.
        history: the first such place, or None.
        unprompted: messages that do not begin with their generation prompt.
        prompt: the first such place, or None.
    """

    conversations: int
    turns: int
    rewritten: int
    history: Change | None
    unprompted: int
    prompt: Change | None

    def to_json(self) -> dict[str, Any]:
        """A JSON-able dictionary."""
        return asdict(self)


def template_stability(
    source: Source,
    *,
    tokenizer: Any,
    fmt: str = "auto",
    reasoning: Reasoning = "keep",
    fields: Mapping[str, str] | str | None = None,
) -> Stability | None:
    """Renders the first conversations of a source once more and compares their turns.

    Args:
        source, fmt, reasoning, fields: as `harts.formats.read` takes them.
        tokenizer: a transformers tokenizer with a chat template, or its directory.

    Returns:
        None where there are no chat rows, or only such as cannot be looked at twice (standard input).

    Raises:
        ValueError: as `harts.formats.read`.
    """
    template = load(tokenizer)
    count = turns = rewritten = unprompted = 0
    history: Change | None = None
    prompt: Change | None = None
    for row in islice(_chat_rows(source, fmt, parse_fields(fields)), _LOOKED_AT):
        if row.get("render") == "raw":
            continue
        count += 1
        rendered = list(turns_of(row, reasoning, template))
        turns += len(rendered)
        changes = [change for one, two in pairwise(rendered) if (change := _history(row, template, one, two))]
        rewritten += bool(changes)
        history = history or next(iter(changes), None)
        missed = [change for turn in rendered if (change := _prompt(row, template, turn))]
        unprompted += len(missed)
        prompt = prompt or next(iter(missed), None)
    if not count:
        return None
    return Stability(
        conversations=count, turns=turns, rewritten=rewritten, history=history, unprompted=unprompted, prompt=prompt
    )


def _chat_rows(source: Source, fmt: str, names: Mapping[str, str]) -> Iterator[Row]:
    paths = source if isinstance(source, list | tuple) else [source]
    if any(isinstance(path, str | PathLike) and str(path) == STDIN for path in paths):
        return
    for part in parts_of(source):
        chat: bool | None = None
        for row in rows_of(part, fmt):
            if names:
                row = renamed(row, names)
            if chat is None:
                chat = fmt == "chat" or ((fmt == "auto" or fmt in SPREAD) and format_of(row) == "chat")
            if not chat:
                break
            row, _ = conversations.as_chat(row)
            yield row


def _history(row: Row, template: Template, one: Turn, two: Turn) -> Change | None:
    at = parting(one, two)
    return None if at is None else _change(row, template, at, (one, two), (one.token_ids, two.token_ids))


def _prompt(row: Row, template: Template, turn: Turn) -> Change | None:
    prompt = turn.prompt
    if prompt is None or turn.start >= len(prompt):
        return None
    return _change(row, template, turn.start, (turn, turn), (prompt, turn.token_ids))


def _change(row: Row, template: Template, at: int, turns: tuple[Turn, Turn], token_ids: tuple[Any, Any]) -> Change:
    one, two = (np.asarray(ids) for ids in token_ids)
    return Change(
        place=row.place,
        message=turns[0].number,
        later=turns[1].number,
        token=at,
        before=template.shown(one[max(0, at - _BEFORE) : at]),
        first=template.shown(one[at : at + _SHOWN]),
        second=template.shown(two[at : at + _SHOWN]),
    )
