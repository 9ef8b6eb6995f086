"""Chat rows: `messages` (and `tools`) rendered to tokens, the assistant's tokens trained.

`rows="trajectory"` makes one trajectory of a conversation, cut after its last trained assistant message, all trained
assistant messages trained. `rows="turn"` makes one trajectory of every trained assistant message: its context and the
response, only the response trained, named `<id>/turn<k>` with k counting the row's assistant messages from 0. An
assistant message with `ignore_loss` is context only.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from harts.formats import chatml, conversations
from harts.formats.messages import check_messages
from harts.formats.openai import normal_message
from harts.formats.rows import Row, build, common_fields
from harts.formats.template import Template
from harts.trajectory import Trajectory

__all__ = ["KNOWN", "Reasoning", "Rows", "Turn", "matches", "parting", "trajectories", "turns_of"]

Rows = Literal["trajectory", "turn"]
Reasoning = Literal["keep", "drop"]

KNOWN = frozenset({"group", "id", "messages", "tools", "reward", "advantages", "temperature"})
KNOWN |= {"meta", "source", "render", "token_ids", "token_mask"}
_NEED_TOKENS = ("loss_mask", "logprobs", "ref_logprobs", "merge_keys")

_SHOWN = 16
"""Tokens of a difference that a message shows."""

Ids = NDArray[np.int32]
Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Turn:
    """A trained assistant message.

    Attributes:
        number: among the row's assistant messages, from 0.
        token_ids: context and response.
        start: where the response starts.
        prompt: what a chat template gives the model to continue; None where no template is used.
    """

    number: int
    token_ids: Ids
    start: int
    prompt: Ids | None = None

    @property
    def span(self) -> slice:
        """Where the response is."""
        return slice(self.start, len(self.token_ids))


def matches(row: Row) -> bool:
    """Whether a row has this source's telling field."""
    return row.get("messages") is not None or conversations.matches(row)


def trajectories(row: Row, *, rows: Rows, reasoning: Reasoning, template: Template | None) -> Iterator[Trajectory]:
    """The row's trajectories; `template` None renders ChatML in the Qwen vocabulary.

    Raises:
        ValueError: an unknown field of the row or of a message, no messages, per-token fields, something no rendering
            can show, or, with rows="trajectory", a rendering in which an earlier turn is no token prefix of a later
            one.
    """
    id = row.text("id", row.id)
    fields = common_fields(row) | {"group": row.text("group", id)}
    advantage = row.get("advantages")
    if advantage is not None:
        if np.ndim(advantage) != 0:
            raise row.error("advantages", "one number", "a list", "tokens are not known before rendering")
        fields["advantages"] = advantage
    turns = turns_of(row, reasoning, template)
    if rows == "turn":
        for turn in turns:
            yield _build(row, turn.token_ids, [turn.span], id=f"{id}/turn{turn.number}", **fields)
        return
    token_ids, spans = _stable(row, turns, template)
    if not spans:
        (whole,) = _rendered(row, _untrained(row, _messages(row), _listed(row, "tools"), template))
        token_ids = whole.token_ids
    yield _build(row, token_ids, spans, id=id, **fields)


def turns_of(row: Row, reasoning: Reasoning, template: Template | None) -> Iterator[Turn]:
    """The row's trained assistant messages, each with its context, rendered.

    Raises:
        ValueError: as `trajectories`.
    """
    for name in _NEED_TOKENS:
        if row.get(name) is not None:
            raise row.error(name, "it beside token_ids only", "it beside messages", "leave it out, or give token_ids")
    row.refuse_unknown(KNOWN)
    messages, tools = _messages(row), _listed(row, "tools")
    if tools and row.get("render") == "raw":
        action = 'put their text into the contents, or leave render "raw" out'
        raise row.error("tools", 'no tools beside render "raw", whose contents are all', f"{len(tools)} tools", action)
    return _rendered(row, _turns(row, messages, tools, reasoning, template))


def parting(earlier: Turn, later: Turn) -> int | None:
    """The first token of a turn that the context of a later one does not have in its place; None if it has all."""
    before, after = earlier.token_ids, later.token_ids[: later.start]
    shared = min(len(before), len(after))
    differs = np.flatnonzero(before[:shared] != after[:shared])
    if len(differs):
        return int(differs[0])
    return None if len(before) <= len(after) else shared


def _build(row: Row, token_ids: Ids, spans: Sequence[slice], **fields: Any) -> Trajectory:
    mask = np.zeros(len(token_ids), np.bool_)
    for span in spans:
        mask[span] = True
    mask[:1] = False  # a raw row may start with the assistant: nothing predicts its first token
    return build(row, token_ids=token_ids, loss_mask=mask, **fields)


def _stable(row: Row, turns: Iterator[Turn], template: Template | None) -> tuple[Ids, list[slice]]:
    """The last turn's tokens and all turns' responses in them, if each turn is a token prefix of the next."""
    last: Turn | None = None
    spans = []
    for turn in turns:
        at = None if last is None else parting(last, turn)
        if last is not None and at is not None:
            expected = f"assistant message {last.number} as a token prefix of message {turn.number}"
            got = "another rendering"
            if template is not None:
                old, new = (template.shown(each.token_ids[at : at + _SHOWN]) for each in (last, turn))
                got += f" from its token {at} on, {new!r} in place of {old!r}"
            action = 'this rendering rewrites earlier turns: use rows="turn" (--rows turn), one row a model call'
            raise row.error("messages", expected, got, action)
        last = turn
        spans.append(turn.span)
    return (np.zeros(0, np.int32) if last is None else last.token_ids), spans


def _turns(
    row: Row, messages: Sequence[Message], tools: Any, reasoning: Reasoning, template: Template | None
) -> Iterator[Turn]:
    own = [index for index, message in enumerate(messages) if message.get("role") == "assistant"]
    trained = [(number, index) for number, index in enumerate(own) if not messages[index].get("ignore_loss")]
    context = list(messages)
    if reasoning == "drop":
        for index in own:
            context[index] = chatml.without_reasoning(messages[index])
    if template is not None and row.get("render") != "raw":
        for number, index in trained:
            yield Turn(number, *template.turn(context[:index], messages[index], tools))
        return
    pieces = _pieces(row, messages, tools, template)
    added = len(pieces) - len(messages)  # a system message may have been put in front
    full = np.concatenate([ids for piece in pieces for ids in piece])
    full.flags.writeable = False  # so that a trajectory takes views of it as they are
    ends = np.cumsum([sum(map(len, piece)) for piece in pieces])
    shorter = pieces if context == messages else _pieces(row, context, tools, template)
    for number, index in trained:
        before, body, after = pieces[index + added]
        if shorter is pieces:  # all turns are views of one array
            stop = int(ends[index + added]) - len(after)
            yield Turn(number, full[:stop], stop - len(body))
        else:
            ids = np.concatenate([*(ids for piece in shorter[: index + added] for ids in piece), before, body])
            yield Turn(number, ids, len(ids) - len(body))


def _pieces(row: Row, messages: Sequence[Message], tools: Any, template: Template | None) -> list[chatml.Piece]:
    if row.get("render") == "raw":
        return chatml.raw_pieces(messages, chatml.encode if template is None else template.text)
    return chatml.pieces(messages, tools)


def _untrained(row: Row, messages: Sequence[Message], tools: Any, template: Template | None) -> Iterator[Turn]:
    """The whole conversation, where no message is trained."""
    if template is not None and row.get("render") != "raw":
        ids = template.render(messages, tools)
    else:
        ids = np.concatenate([ids for piece in _pieces(row, messages, tools, template) for ids in piece])
    yield Turn(0, ids, len(ids))


def _rendered(row: Row, turns: Iterator[Turn]) -> Iterator[Turn]:
    """The turns; what a renderer or a template complains of becomes an error that names the row."""
    while True:
        try:
            turn = next(turns)
        except StopIteration:
            return
        except Exception as error:  # jinja templates raise what they like
            got = f"{type(error).__name__}: {error}"
            raise row.error("messages", "messages that can be rendered", got, "fix or drop this row") from error
        yield turn


def _messages(row: Row) -> list[Message]:
    messages = [normal_message(message) for message in _listed(row, "messages")]
    if not messages:
        raise row.error("messages", "at least one message", "none", "drop this row")
    if row.get("render") not in (None, "raw"):
        raise row.error("render", '"raw" or nothing', repr(row.get("render")), "leave it out for a chat template")
    check_messages(row, messages)
    return messages


def _listed(row: Row, name: str) -> list[Any]:
    """A list field; a JSON string of one is taken too, as Parquet files hold schemas of many shapes."""
    value = row.get(name)
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise row.error(name, "a list", f"a string that is no JSON ({error})", "give a list") from error
    if value is None:
        return []
    if not isinstance(value, list | tuple):
        raise row.error(name, "a list", type(value).__name__, "give a list of objects")
    return list(value)
