"""Conversations under other names than `messages`, to our chat rows.

- TRL, https://huggingface.co/docs/trl/dataset_formats: `prompt` and `completion`, both texts or both messages; the
  completion is trained.
- `results.jsonl` of verifiers, PrimeIntellect-ai/verifiers, verifiers/utils/save_utils.py (state_to_output): the same
  two lists beside reward, example_id and tool_defs; each call of a message is a string of JSON (message_utils.py,
  sanitize_tool_calls), and a prompt without chat is messages of role "text".
- ShareGPT, as in https://llamafactory.readthedocs.io/en/latest/getting_started/data_preparation.html: `conversations`
  of {from, value}, `system`, `tools`.
- SWE-agent, https://swe-agent.com/latest/usage/trajectories/: `history`, the messages of a .traj file; a demonstration
  (`is_demo`) is context. Each message also has what the agent made of it (thought, action): not shown to the model.
- mini-swe-agent, SWE-agent/mini-swe-agent, minisweagent/run/utils/save.py (save_traj): `messages` with `extra` and
  `timestamp`, told by `trajectory_format`; the last message, of role "exit", is the agent's own note.
- inspect_ai: a sample of a log, see `harts.formats.inspect_ai`.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from harts.formats import inspect_ai
from harts.formats.rows import Row

__all__ = ["NAMES", "as_chat", "matches"]

NAMES = frozenset({"prompt", "completion", "tool_defs", "conversations", "history", "system"})
"""Fields that stand for messages and tools."""

_KEPT = ("id", "group", "reward", "advantages", "temperature", "meta", "source", "tools")
_FROM = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "model": "assistant"}
_FROM |= {"system": "system", "observation": "tool", "tool": "tool", "function_response": "tool"}
_OF_SWE_AGENT = frozenset({"agent", "message_type", "thought", "action", "cache_control", "tags", "is_demo"})
_OF_SWE_AGENT |= {"tool_call_ids", "thinking_blocks", "provider_specific_fields"}
_OF_MINI = frozenset({"extra", "timestamp", "provider_specific_fields", "object"})


def matches(row: Row) -> bool:
    """Whether a row has the telling fields of one of these."""
    pair = row.get("prompt") is not None and row.get("completion") is not None
    return pair or any(isinstance(row.get(name), list | tuple) for name in ("conversations", "history"))


def as_chat(row: Row) -> tuple[Row, frozenset[str]]:
    """The row as one with `messages`, and the names of its fields that are not used.

    Raises:
        ValueError: prompt and completion of two kinds, a speaker that is not known, a call that is no JSON.
    """
    used: tuple[str, ...]
    if inspect_ai.is_sample(row):
        own, read = inspect_ai.chat_fields(row)
        given = {name for name, value in row.fields.items() if value is not None}
        shared = {name: row.fields[name] for name in ("temperature", "meta", "source") if row.get(name) is not None}
        return replace(row, fields={**shared, **own}), frozenset(given - read - shared.keys())
    if row.get("messages") is not None:
        if not str(row.get("trajectory_format") or "").startswith("mini-swe-agent"):
            dropped = frozenset({"parallel_tool_calls"} & row.fields.keys())
            return _without(row, dropped), dropped
        own, used = {"messages": _mini(row.fields["messages"])}, ("messages", "trajectory_format")
    elif row.get("conversations") is not None:
        own, used = {"messages": _sharegpt(row)}, ("conversations", "system")
    elif row.get("history") is not None:
        own, used = {"messages": [_swe_agent(message) for message in row.fields["history"]]}, ("history",)
    elif matches(row):
        own, used = _pair(row), ("prompt", "completion", "tool_defs")
    else:
        return row, frozenset()
    kept = {name: row.fields[name] for name in _KEPT if row.get(name) is not None}
    group = next((name for name in ("group", "example_id", "instance_id") if row.get(name) is not None), None)
    if group is not None:
        kept["group"] = row.fields[group]
    dropped = frozenset(str(name) for name, value in row.fields.items() if value is not None)
    return replace(row, fields={**kept, **own}), dropped - {*kept, *used, *((group,) if group else ())}


def _without(row: Row, names: frozenset[str]) -> Row:
    return replace(row, fields={name: value for name, value in row.fields.items() if name not in names})


def _pair(row: Row) -> dict[str, Any]:
    prompt, completion = row.fields["prompt"], row.fields["completion"]
    if isinstance(prompt, str) and isinstance(completion, str):
        texts = [{"role": "user", "content": prompt}, {"role": "assistant", "content": completion}]
        return {"messages": texts, "render": "raw"}
    for name, value in (("prompt", prompt), ("completion", completion)):
        if not isinstance(value, list | tuple):
            expected = "two texts, or two lists of messages"
            raise row.error(name, f"prompt and completion as {expected}", type(value).__name__, "make them alike")
    context = [_verifiers(row, f"prompt[{index}]", message) for index, message in enumerate(prompt)]
    answer = [_verifiers(row, f"completion[{index}]", message) for index, message in enumerate(completion)]
    tools = {"tools": _tool_defs(row)} if row.get("tool_defs") else {}
    if context and all(isinstance(message, Mapping) and message.get("role") == "text" for message in context):
        texts = [*({**message, "role": "user"} for message in context), *map(_spoken, answer)]
        return {"messages": texts, "render": "raw", **tools}
    context = [
        {**message, "ignore_loss": True}
        if isinstance(message, Mapping) and message.get("role") == "assistant"
        else message
        for message in context
    ]
    return {"messages": [*context, *answer], **tools}


def _verifiers(row: Row, place: str, message: Any) -> Any:
    """A message with calls as objects; blocks that repeat its reasoning are left out."""
    if not isinstance(message, Mapping):
        return message
    found = dict(message)
    if found.get("reasoning_content") is not None:
        found.pop("thinking_blocks", None)
    calls = found.get("tool_calls")
    if isinstance(calls, list | tuple):
        found["tool_calls"] = [_parsed(row, f"{place}.tool_calls", call) for call in calls]
    return found


def _parsed(row: Row, place: str, call: Any) -> Any:
    if not isinstance(call, str):
        return call
    try:
        return json.loads(call)
    except ValueError as error:
        raise row.error(place, "calls as objects or JSON of them", str(error), "fix or drop this row") from error


def _spoken(message: Any) -> Any:
    own = isinstance(message, Mapping) and message.get("role") == "text"
    return {**message, "role": "assistant"} if own else message


def _tool_defs(row: Row) -> list[Any]:
    """Tools as chat templates know them."""
    known = ("name", "description", "parameters")
    given = row.fields["tool_defs"]
    if not isinstance(given, list | tuple) or not all(isinstance(tool, Mapping) for tool in given):
        raise row.error("tool_defs", "a list of tools", type(given).__name__, "give a list of objects")
    return [
        tool
        if "function" in tool
        else {"type": "function", "function": {key: tool[key] for key in known if key in tool}}
        for tool in given
    ]


def _sharegpt(row: Row) -> list[Any]:
    messages: list[Any] = []
    if row.get("system") is not None:
        messages.append({"role": "system", "content": row.fields["system"]})
    for index, turn in enumerate(row.fields["conversations"]):
        place = f"conversations[{index}]"
        if not isinstance(turn, Mapping):
            raise row.error(place, "an object {from, value}", type(turn).__name__, "fix or drop this row")
        if "from" not in turn:  # some files have messages under this name
            messages.append(turn)
            continue
        speaker, rest = turn["from"], {name: item for name, item in turn.items() if name not in ("from", "value")}
        if speaker == "function_call":
            messages.append(
                {**rest, "role": "assistant", "tool_calls": _calls(row, f"{place}.value", turn.get("value"))}
            )
            continue
        role = _FROM.get(speaker) if isinstance(speaker, str) else None
        if role is None:
            known = ", ".join([*_FROM, "function_call"])
            raise row.error(f"{place}.from", f"one of {known}", repr(speaker), "rename the speaker")
        messages.append({**rest, "role": role, "content": turn.get("value")})
    return messages


def _calls(row: Row, place: str, value: Any) -> list[Any]:
    try:
        found = json.loads(value)
    except (TypeError, ValueError) as error:
        raise row.error(place, "a call as JSON {name, arguments}", str(error), "fix or drop this row") from error
    return [{"type": "function", "function": call} for call in (found if isinstance(found, list) else [found])]


def _swe_agent(message: Any) -> Any:
    if not isinstance(message, Mapping):
        return message
    found = {name: value for name, value in message.items() if name not in _OF_SWE_AGENT}
    ids = message.get("tool_call_ids")
    if ids and found.get("role") == "tool":
        found["tool_call_id"] = ids[0]
    if found.get("role") == "assistant":
        if message.get("is_demo"):
            found["ignore_loss"] = True
        thoughts = [
            block.get("thinking") for block in message.get("thinking_blocks") or () if isinstance(block, Mapping)
        ]
        if any(thoughts) and not found.get("reasoning_content"):
            found["reasoning_content"] = "\n".join(thought for thought in thoughts if thought)
    return found


def _mini(messages: Any) -> Any:
    if not isinstance(messages, list | tuple):
        return messages
    own = [message for message in messages if not (isinstance(message, Mapping) and message.get("role") == "exit")]
    return [
        {name: value for name, value in message.items() if name not in _OF_MINI}
        if isinstance(message, Mapping)
        else message
        for message in own
    ]
