"""Messages as OpenAI's API and fine-tuning files have them, to the members of our chat rows.

As in https://platform.openai.com/docs/api-reference/chat (an assistant message has `refusal`, `annotations`, `audio`;
content may be parts; the role `developer` stands for `system`) and
https://platform.openai.com/docs/guides/supervised-fine-tuning (`weight` 0 or 1 of an assistant message,
`parallel_tool_calls` of a row). Annotations describe the text and were not sampled: they are left out. A refusal is
what the model said where it has no content.
"""

from collections.abc import Mapping
from typing import Any

__all__ = ["normal_message"]

_ROLES = {"developer": "system"}
_TEXTS = {"input_text": "text", "output_text": "text", "refusal": "refusal"}
_OF_PARTS = frozenset({"annotations", "logprobs", "cache_control"})


def normal_message(message: Any) -> Any:
    """A message in our members; what has none stays as it is, for the check of messages to refuse it."""
    if not isinstance(message, Mapping):
        return message
    found = {name: value for name, value in message.items() if value is not None}
    role = found.get("role")
    if isinstance(role, str):
        found["role"] = _ROLES.get(role, role)
    if isinstance(found.get("content"), list | tuple):
        found["content"] = [_part(part) for part in found["content"]]
    if role != "assistant":
        return found
    found.pop("annotations", None)
    if isinstance(found.get("refusal"), str) and not found.get("content"):
        found["content"] = found.pop("refusal")
    weight = found.get("weight")
    if isinstance(weight, int) and not isinstance(weight, bool) and weight in (0, 1) and "ignore_loss" not in found:
        found.pop("weight")
        found["ignore_loss"] = weight == 0
    if isinstance(found.get("tool_calls"), list | tuple):
        found["tool_calls"] = [_call(call) for call in found["tool_calls"]]
    return found


def _part(part: Any) -> Any:
    if not isinstance(part, Mapping):
        return part
    kind = part.get("type")
    member = _TEXTS.get(kind) if isinstance(kind, str) else None
    found = {name: value for name, value in part.items() if name not in _OF_PARTS}
    if member is not None and isinstance(found.get(member), str):
        found["text"] = found.pop(member)
        found["type"] = "text"
    return found


def _call(call: Any) -> Any:
    """A call without arguments (null) is one with none: {}."""
    if not isinstance(call, Mapping):
        return call
    function = call.get("function")
    if isinstance(function, Mapping) and "arguments" in function and function["arguments"] is None:
        return {**call, "function": {**function, "arguments": "{}"}}
    if function is None and "arguments" in call and call["arguments"] is None:
        return {**call, "arguments": "{}"}
    return call
