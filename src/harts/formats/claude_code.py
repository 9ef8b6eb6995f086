"""Claude Code's session logs, `~/.claude/projects/*/*.jsonl`: one conversation for each line of thought in them.

Anthropic documents where the files lie (https://docs.claude.com/en/docs/claude-code/settings, transcripts), not what is
in them; the fields are those that jeremedia/claude-code-log-format, CLAUDE_CODE_LOG_FORMAT.md, found in 236,000 events
of versions up to 2.0.49: `type`; `uuid` and `parentUuid`, a tree; `message`, as Anthropic's API has it, of which each
content block is an event of its own, with one `message.id`; `isSidechain` and `agentId` of subagents; `sessionId`.

Replies without another one below them end a conversation: a rewound session, one that was compacted, and a session with
subagents hold several. What they share is trained once, in the first. An image ends one: it cannot be rendered. Results
of calls are found by `tool_use_id`, as calls that ran side by side lie in no order. The system prompt and the tools are
not in the files; neither is what `attachment` events added. Replies that Claude Code wrote itself (model `<synthetic>`)
are left out.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from harts.formats.rows import Row
from harts.formats.unused import Unused

__all__ = ["conversations", "matches"]

_TELLING = frozenset({"sessionId", "parentUuid", "leafUuid", "uuid", "snapshot"})
_NOT_SHOWN = frozenset({"redacted_thinking", "fallback"})


@dataclass(slots=True)
class _Node:
    """A message: the events with its blocks, the event before it, and whether a reply stands below it."""

    events: list[Row] = field(default_factory=list)
    answered: bool = False

    @property
    def first(self) -> Row:
        return self.events[0]

    @property
    def is_reply(self) -> bool:
        own = self.first.get("type") == "assistant" and not self.first.get("isApiErrorMessage")
        return own and _message(self.first).get("model") != "<synthetic>"

    def blocks(self) -> Iterator[tuple[Row, Any]]:
        """Its content blocks, each once, and the event that has it; a text alone is a block."""
        seen: list[Any] = []
        for event in self.events:
            content = _message(event).get("content")
            for block in [content] if isinstance(content, str) else content or ():
                if block not in seen:
                    seen.append(block)
                    yield event, {"type": "text", "text": block} if isinstance(block, str) else block


def matches(row: Row) -> bool:
    """Whether a row is an event of a session."""
    return isinstance(row.get("type"), str) and bool(_TELLING & row.fields.keys()) and row.get("payload") is None


def conversations(events: Sequence[Row], unused: Unused) -> Iterator[Row]:
    """A chat row for each reply that has none below it.

    Raises:
        ValueError: a message that is none, events in a circle.
    """
    nodes, key_of = _nodes(events)
    results = _results(nodes)
    if any(event.get("type") == "attachment" for event in events):
        unused.name(events[0], {"attachment"})
    for node in nodes.values():
        if node.is_reply:
            for other in islice(_above(node, nodes, key_of), 1, None):
                if other.answered:
                    break
                other.answered = True
    trained: set[int] = set()
    counts: dict[str, int] = {}
    for node in nodes.values():
        if not node.is_reply or node.answered:
            continue
        path = list(_above(node, nodes, key_of))[::-1]
        messages: list[dict[str, Any]] = []
        news = False
        try:
            for each in path:
                for message in _messages(each, results, trained, unused):
                    messages.append(message)
                    if message["role"] == "assistant" and not message.get("ignore_loss"):
                        news = True
                        trained.add(id(each))
        except _UnreadableError as unreadable:
            unused.name(unreadable.event, {f"{unreadable.kind} and what follows it"})
        if news:
            yield _row(node, messages, counts)


class _UnreadableError(Exception):
    """A block that is no text: what follows it cannot be rendered."""

    def __init__(self, event: Row, kind: str) -> None:
        self.event, self.kind = event, kind


def _message(event: Row) -> Mapping[str, Any]:
    message = event.get("message")
    if not isinstance(message, Mapping):
        raise event.error("message", "an object with role and content", type(message).__name__, "fetch the file again")
    return message


def _nodes(events: Sequence[Row]) -> tuple[dict[str, _Node], dict[str, str]]:
    """Messages in the order of their first events, and the message of each event."""
    nodes: dict[str, _Node] = {}
    key_of: dict[str, str] = {}
    for event in events:
        uuid = event.get("uuid")
        if uuid is None or uuid in key_of:  # a title, a snapshot of files; an event that was copied
            continue
        key = uuid
        if event.get("type") == "assistant":
            key = _message(event).get("id") or uuid
        key_of[uuid] = key
        nodes.setdefault(key, _Node()).events.append(event)
    return nodes, key_of


def _above(node: _Node, nodes: Mapping[str, _Node], key_of: Mapping[str, str]) -> Iterator[_Node]:
    """The message itself and those before it, up to the first."""
    seen: set[int] = set()
    at: _Node | None = node
    while at is not None:
        if id(at) in seen:
            action = "fetch the file again, or remove one of the events"
            raise at.first.error("parentUuid", "an earlier event", "one of the events below this one", action)
        seen.add(id(at))
        yield at
        at = nodes.get(key_of.get(at.first.get("parentUuid") or "", ""))


def _results(nodes: Mapping[str, _Node]) -> dict[str, tuple[Row, Mapping[str, Any]]]:
    """The result of each call, by the call's id."""
    found: dict[str, tuple[Row, Mapping[str, Any]]] = {}
    for node in nodes.values():
        if node.first.get("type") == "user":
            for event, block in node.blocks():
                if isinstance(block, Mapping) and block.get("type") == "tool_result":
                    found.setdefault(str(block.get("tool_use_id")), (event, block))
    return found


def _messages(
    node: _Node, results: Mapping[str, tuple[Row, Mapping[str, Any]]], trained: set[int], unused: Unused
) -> Iterator[dict[str, Any]]:
    if node.is_reply:
        reply = _reply(node, unused)
        yield reply | ({"ignore_loss": True} if id(node) in trained else {})
        for call in reply.get("tool_calls", ()):
            if call["id"] in results:
                event, block = results[call["id"]]
                yield {"role": "tool", "tool_call_id": call["id"], "content": _result(event, block)}
    elif node.first.get("type") == "user":
        parts = [_part(event, block) for event, block in node.blocks() if _kind(event, block) != "tool_result"]
        if parts:
            yield {"role": "user", "content": parts}


def _reply(node: _Node, unused: Unused) -> dict[str, Any]:
    texts: list[Any] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for event, block in node.blocks():
        kind = _kind(event, block)
        if kind == "thinking":
            thoughts.append(str(block.get("thinking") or ""))
        elif kind == "tool_use":
            function = {"name": block.get("name"), "arguments": block.get("input") or {}}
            calls.append({"id": str(block.get("id")), "type": "function", "function": function})
        elif kind in _NOT_SHOWN:
            unused.name(event, {kind})
        else:
            texts.append(_part(event, block))
    reply: dict[str, Any] = {"role": "assistant", "content": texts or None}
    if any(thoughts):
        reply["reasoning_content"] = "\n".join(thought for thought in thoughts if thought)
    if calls:
        reply["tool_calls"] = calls
    return reply


def _kind(event: Row, block: Any) -> str:
    if not isinstance(block, Mapping):
        raise event.error("message.content", "blocks with a type", type(block).__name__, "fetch the file again")
    return str(block.get("type"))


def _part(event: Row, block: Mapping[str, Any]) -> dict[str, Any]:
    if block.get("type") != "text" or not isinstance(block.get("text"), str):
        raise _UnreadableError(event, _kind(event, block))
    return {"type": "text", "text": block["text"]}


def _result(event: Row, block: Mapping[str, Any]) -> Any:
    content = block.get("content")
    if content is None or isinstance(content, str):
        return content
    return [_part(event, part) for part in content]


def _row(leaf: _Node, messages: list[dict[str, Any]], counts: dict[str, int]) -> Row:
    last = leaf.events[-1]
    session = last.text("sessionId", last.id)
    agent = last.get("agentId") if last.get("isSidechain") else None
    name = session if agent is None else f"{session}/{agent}"
    number = counts[name] = counts.get(name, -1) + 1
    fields: dict[str, Any] = {"group": session, "id": f"{name}/{number}" if number else name, "messages": messages}
    model = _message(last).get("model")
    if model is not None:
        fields["meta"] = {"model": model}
    return Row(fields, last.place, last.number)
