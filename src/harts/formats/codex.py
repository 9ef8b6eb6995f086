"""Codex's session logs, `~/.codex/sessions/YYYY/MM/DD/rollout-*.jsonl`: one conversation for each history in them.

Fields as in openai/codex, codex-rs/protocol/src/protocol.rs (RolloutLine: timestamp, type, payload; of the types
session_meta, response_item, compacted, turn_context, event_msg, world_state) and models.rs (ResponseItem: message,
reasoning, function_call, function_call_output, custom_tool_call, custom_tool_call_output, local_shell_call and others).

Items of the model that follow each other are one reply. `base_instructions` of session_meta is the system message; the
tools are not in the files. A compacted history, and one that was rolled back, starts a conversation of its own; what
it keeps of replies is context there. The input of a custom tool (apply_patch) becomes the argument `input`. Reasoning
is read where the file has its text: most hold a summary, which the model did not sample, and an encrypted form. An
image ends a conversation: it cannot be rendered.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from harts.formats.rows import Row
from harts.formats.unused import Unused

__all__ = ["conversations", "matches"]

_TYPES = frozenset({"session_meta", "response_item", "compacted", "turn_context", "event_msg", "world_state"})
_CALLS = frozenset({"function_call", "custom_tool_call", "local_shell_call"})
_OUTPUTS = frozenset({"function_call_output", "custom_tool_call_output"})
_SILENT = frozenset({"ghost_snapshot", "compaction"})

_Item = tuple[Row, Mapping[str, Any], bool]
"""Where an item stands, the item, and whether it is context only."""


def matches(row: Row) -> bool:
    """Whether a row is a line of a session."""
    return row.get("type") in _TYPES and isinstance(row.get("payload"), Mapping)


def conversations(lines: Sequence[Row], unused: Unused) -> Iterator[Row]:
    """A chat row for the history at the end, and for each that was compacted or rolled back before it.

    Raises:
        ValueError: a line without a payload, content that is neither text nor parts.
    """
    history: list[_Item] = []
    turns: list[int] = []  # where the user's turns start in the history
    meta: Mapping[str, Any] = {}
    number = 0
    for line in lines:
        if not isinstance(line.get("payload"), Mapping):
            expected = f"a line of type {', '.join(sorted(_TYPES))} with a payload"
            raise line.error("type", expected, repr(line.get("type")), "is this file a session of Codex?")
        if not matches(line):
            unused.name(line, {f"lines of type {line.get('type')}"})
            continue
        kind, payload = line.fields["type"], line.fields["payload"]
        cut = kind == "event_msg" and payload.get("type") == "thread_rolled_back"
        if (cut or kind == "compacted") and _has_news(history):
            yield _row(history, meta, number, unused)
            number += 1
        if kind == "session_meta":
            meta = meta or payload
        elif kind == "response_item":
            history.append((line, payload, False))
        elif kind == "compacted":
            history, turns = _compacted(line, payload), []
        elif cut:
            start = _rolled_back(history, turns, payload)
            history = [(row, item, True) for row, item, _ in history[:start]]
        elif payload.get("type") == "user_message":
            turns.append(_last_from_user(history))
    if _has_news(history):
        yield _row(history, meta, number, unused)


class _UnreadableError(Exception):
    """A part that is no text: what follows it cannot be rendered."""


def _has_news(history: Sequence[_Item]) -> bool:
    return any(_is_reply(item) and not old for _, item, old in history)


def _is_reply(item: Mapping[str, Any]) -> bool:
    kind = item.get("type")
    return kind == "reasoning" or kind in _CALLS or (kind == "message" and item.get("role") == "assistant")


def _compacted(line: Row, payload: Mapping[str, Any]) -> list[_Item]:
    kept = payload.get("replacement_history")
    if kept is None:  # older files name only the summary that the next call began with
        kept = [{"type": "message", "role": "user", "content": payload.get("message")}]
    return [(line, item, True) for item in kept]


def _rolled_back(history: Sequence[_Item], turns: list[int], payload: Mapping[str, Any]) -> int:
    """Where the history ends then; turns before a compaction are not known, and what it kept stays."""
    dropped = min(int(payload.get("num_turns") or 0), len(turns))
    if not dropped:
        return sum(old for _, _, old in history)
    start = turns[-dropped]
    del turns[-dropped:]
    return start


def _last_from_user(history: Sequence[_Item]) -> int:
    """The item that a user's turn starts with: the event of it follows the item."""
    last = len(history) - 1
    user = last >= 0 and history[last][1].get("type") == "message" and history[last][1].get("role") == "user"
    return last if user else len(history)


def _row(history: Sequence[_Item], meta: Mapping[str, Any], number: int, unused: Unused) -> Row:
    first = history[0][0]
    session = str(meta.get("id") or first.place)
    messages: list[dict[str, Any]] = []
    base = meta.get("base_instructions")
    text = base.get("text") if isinstance(base, Mapping) else base
    if text:
        messages.append({"role": "system", "content": text})
    open_reply = False
    for row, item, old in history:
        reply = _is_reply(item)
        try:
            if reply and not open_reply:
                messages.append({"role": "assistant", "content": [], **({"ignore_loss": True} if old else {})})
            if reply:
                _extend(row, messages[-1], item, unused)
            elif (message := _other(row, item, unused)) is not None:
                messages.append(message)
            else:
                continue
        except _UnreadableError as unreadable:
            unused.name(row, {f"{unreadable} and what follows it"})
            break
        open_reply = reply
    for message in messages:
        message["content"] = message["content"] or None
    said = ("content", "tool_calls", "reasoning_content")
    kept = [message for message in messages if any(message.get(name) is not None for name in said)]
    fields = {"group": session, "id": f"{session}/{number}" if number else session, "messages": kept}
    return Row(fields, first.place, first.number)


def _extend(row: Row, reply: dict[str, Any], item: Mapping[str, Any], unused: Unused) -> None:
    """Adds an item of the model to its reply."""
    kind = item["type"]
    if kind == "message":
        reply["content"] += _parts(row, item.get("content"))
    elif kind == "reasoning":
        texts = [part["text"] for part in item.get("content") or () if part.get("text")]
        if texts:
            before = reply.get("reasoning_content")
            reply["reasoning_content"] = "\n".join(texts if before is None else [before, *texts])
        else:
            unused.name(row, {"reasoning without its text"})
    else:
        arguments = item.get("arguments")
        if kind == "custom_tool_call":
            arguments = {"input": item.get("input")}
        elif kind == "local_shell_call":
            arguments = {name: value for name, value in (item.get("action") or {}).items() if value is not None}
        function = {"name": item.get("name", "local_shell"), "arguments": arguments}
        reply.setdefault("tool_calls", []).append(
            {"id": str(item.get("call_id")), "type": "function", "function": function}
        )


def _other(row: Row, item: Mapping[str, Any], unused: Unused) -> dict[str, Any] | None:
    """A message or a call's result; None for an item that cannot be shown."""
    kind = item.get("type")
    if kind == "message":
        return {"role": item.get("role"), "content": _parts(row, item.get("content"))}
    if kind in _OUTPUTS:
        output = item.get("output")
        if isinstance(output, Mapping):
            output = output.get("content")
        return {"role": "tool", "tool_call_id": str(item.get("call_id")), "content": _parts(row, output)}
    if kind not in _SILENT:
        unused.name(row, {str(kind)})
    return None


def _parts(row: Row, content: Any) -> list[Any]:
    if content is None:
        return []
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list | tuple):
        raise row.error("payload.content", "text or a list of parts", type(content).__name__, "fetch the file again")
    for part in content:
        if not isinstance(part, Mapping):
            raise row.error("payload.content", "parts with a type", type(part).__name__, "fetch the file again")
        if not isinstance(part.get("text"), str):
            raise _UnreadableError(part.get("type"))
    return [{"type": "text", "text": part["text"]} for part in content]
