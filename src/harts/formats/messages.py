"""What a chat message may hold: every member that is not shown to the model is refused, by name."""

from collections.abc import Collection, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from harts.formats.rows import Row

__all__ = ["check_messages"]

_ANY = frozenset({"role", "content", "name"})
_KNOWN = {
    "system": _ANY,
    "user": _ANY,
    "assistant": _ANY | {"tool_calls", "reasoning_content", "ignore_loss"},
    "tool": _ANY | {"tool_call_id"},
}
_OF_OTHER_ROLES = _ANY | {"tool_call_id"}  # a chat template may know more roles than we do
_NOT_JOINED = frozenset({"tool_calls", "reasoning_content"})  # a raw row is its contents alone
_HINTS = {
    "reasoning": "rename it to reasoning_content",
    "thinking": "rename it to reasoning_content",
    "function_call": "write it as tool_calls: [{type: function, function: {name, arguments}}]",
    "weight": "write a weight of 0 as ignore_loss: true, and remove one of 1; others go into advantages",
    "ignore_loss": "only the assistant's messages are trained: remove it",
    "tool_calls": "only the assistant calls tools: check the role",
    "reasoning_content": "only the assistant reasons: check the role",
    "tool_call_id": "only a tool's message answers a call: check the role",
}
_CALL = frozenset({"id", "type", "index", "function"})
_FLAT_CALL = frozenset({"id", "type", "index", "name", "arguments"})
_FUNCTION = frozenset({"name", "arguments"})
_PART = frozenset({"type", "text"})


def check_messages(row: Row, messages: Sequence[Any]) -> None:
    """Refuse what no rendering of a conversation would show or obey. A null member is the same as an absent one.

    Raises:
        ValueError: a message that is no object; a member that its role does not have; content other than text; an
            `ignore_loss` that is no boolean; calls or reasoning in a row with render "raw".
    """
    raw = row.get("render") == "raw"
    for index, message in enumerate(messages):
        place = f"messages[{index}]"
        if not isinstance(message, Mapping):
            raise row.error(place, "an object", type(message).__name__, "give it a role and content")
        role = message.get("role")
        known = _KNOWN.get(role, _OF_OTHER_ROLES) if isinstance(role, str) else _OF_OTHER_ROLES
        if raw:
            for name in sorted(_NOT_JOINED & known):
                if message.get(name):
                    action = 'put its text into the contents, or leave render "raw" out'
                    raise row.error(f"{place}.{name}", 'contents only beside render "raw"', f"a {name}", action)
        _refuse_unknown(row, place, message, known, f"a member of a message of role {role}")
        _check_content(row, f"{place}.content", message.get("content"))
        ignored, reasoning = message.get("ignore_loss"), message.get("reasoning_content")
        if ignored is not None and not isinstance(ignored, bool):
            raise row.error(f"{place}.ignore_loss", "true or false", repr(ignored), "write 1 as true and 0 as false")
        if reasoning is not None and not isinstance(reasoning, str):
            raise row.error(f"{place}.reasoning_content", "a string", type(reasoning).__name__, "join its texts")
        _check_calls(row, f"{place}.tool_calls", message.get("tool_calls"))


def _refuse_unknown(row: Row, place: str, given: Mapping[str, Any], known: Collection[str], what: str) -> None:
    for name, value in given.items():
        if name in known or value is None:
            continue
        near = get_close_matches(str(name), known, n=1, cutoff=0.75)
        action = _HINTS.get(name) or (f"did you mean {near[0]}?" if near else "remove it: the model would not see it")
        raise row.error(f"{place}.{name}", f"{what} ({', '.join(sorted(known))})", "an unknown one", action)


def _check_content(row: Row, place: str, content: Any) -> None:
    if content is None or isinstance(content, str):
        return
    if not isinstance(content, list | tuple):
        raise row.error(place, "text", type(content).__name__, "give a string, or a list of text parts")
    for index, part in enumerate(content):
        here = f"{place}[{index}]"
        if not isinstance(part, Mapping):
            raise row.error(here, "a part {type: text, text: ...}", type(part).__name__, "join the texts to one string")
        if part.get("type") != "text" or not isinstance(part.get("text"), str):
            got = f"type {part.get('type')!r} with {', '.join(map(str, part)) or 'nothing'}"
            raise row.error(here, "a text part {type: text, text: ...}", got, "HARTS reads text only: drop this row")
        _refuse_unknown(row, here, part, _PART, "a member of a text part")


def _check_calls(row: Row, place: str, calls: Any) -> None:
    if calls is None:
        return
    if not isinstance(calls, list | tuple):
        raise row.error(place, "a list of calls", type(calls).__name__, "give a list of objects")
    for index, call in enumerate(calls):
        here = f"{place}[{index}]"
        if not isinstance(call, Mapping):
            raise row.error(here, "an object", type(call).__name__, "give it a function with name and arguments")
        function = call.get("function")
        if function is None:
            _refuse_unknown(row, here, call, _FLAT_CALL, "a member of a call")
            continue
        _refuse_unknown(row, here, call, _CALL, "a member of a call")
        if not isinstance(function, Mapping):
            raise row.error(f"{here}.function", "an object", type(function).__name__, "give it name and arguments")
        _refuse_unknown(row, f"{here}.function", function, _FUNCTION, "a member of a call's function")
