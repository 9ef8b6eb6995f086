"""Chat rows through a transformers tokenizer and its chat template.

A turn is found by rendering twice: the messages before it with the generation prompt, and those up to and with it. What
the second adds is the response; it ends with the tokenizer's end-of-sequence token where it holds one (templates put a
newline after it that no model samples). Where the generation prompt itself is no prefix (it opens a <think> that the
finished message lacks), the response starts at the first token that differs.
"""

import json
from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any

import numpy as np
from numpy.typing import NDArray

from harts.formats.chatml import text_of
from harts.formats.tokenizer import load_tokenizer

__all__ = ["Template", "load"]

Ids = NDArray[np.int32]


def load(tokenizer: Any) -> "Template":
    """A Template of a tokenizer object, or of the directory of one.

    Raises:
        ValueError: the tokenizer cannot be loaded or has no chat template.
    """
    if isinstance(tokenizer, str | PathLike):
        tokenizer = load_tokenizer(tokenizer)
    if not hasattr(tokenizer, "apply_chat_template"):
        got = type(tokenizer).__name__
        raise ValueError(f"tokenizer: expected a directory or a transformers tokenizer, got {got}; see docs/data.md")
    if not getattr(tokenizer, "chat_template", None):
        action = "set tokenizer.chat_template, or pass tokenizer=None for ChatML in the Qwen vocabulary"
        raise ValueError(f"tokenizer: expected one with a chat template, got {type(tokenizer).__name__}; {action}")
    return Template(tokenizer)


class Template:
    """A tokenizer with a chat template."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def text(self, text: str) -> Ids:
        """Token ids of a text alone, int32 [L], no special tokens added or found in it; for rows with render "raw"."""
        encoded = self._tokenizer(text, add_special_tokens=False, split_special_tokens=True)
        return np.asarray(encoded["input_ids"], np.int32)

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Any, *, prompt: bool = False) -> Ids:
        """Token ids of messages, int32 [L]; `prompt` adds the generation prompt."""
        rendered = self._tokenizer.apply_chat_template(
            [_message(message) for message in messages],
            tools=list(tools) if tools else None,
            add_generation_prompt=prompt,
            tokenize=True,
            return_dict=False,
        )
        return np.asarray(rendered, np.int32)

    def shown(self, token_ids: Ids) -> str:
        """The text of token ids, special tokens by their names."""
        return str(self._tokenizer.decode(token_ids.tolist()))

    def turn(
        self, context: Sequence[Mapping[str, Any]], message: Mapping[str, Any], tools: Any
    ) -> tuple[Ids, int, Ids]:
        """Context and response of one assistant message, int32 [L], where the response starts, and the prompt.

        The prompt is what the model was given to continue: the context with the generation prompt, int32 [P]. Where the
        finished message does not begin with it, the response starts before its end.
        """
        asked = self.render(context, tools, prompt=True)
        whole = self.render([*context, message], tools)
        shared = min(len(asked), len(whole))
        differs = np.flatnonzero(asked[:shared] != whole[:shared])
        start = int(differs[0]) if len(differs) else shared
        ends = np.flatnonzero(whole[start:] == self._tokenizer.eos_token_id)
        stop = start + int(ends[-1]) + 1 if len(ends) else len(whole)
        return whole[:stop], start, asked


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message as templates expect it: a string as content, the arguments of calls as objects."""
    shown = {name: value for name, value in message.items() if name != "ignore_loss" and value is not None}
    shown["content"] = text_of(message)  # many templates show no list of parts
    if shown.get("tool_calls"):
        shown["tool_calls"] = [_call(call) for call in shown["tool_calls"]]
    return shown


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = dict(call.get("function", call))
    if isinstance(function.get("arguments"), str):
        try:
            arguments = json.loads(function["arguments"])
        except json.JSONDecodeError:  # a call that the model wrote wrong: the template shows the text
            arguments = None
        if isinstance(arguments, dict):
            function["arguments"] = arguments
    return {**{name: value for name, value in call.items() if name != "arguments"}, "function": function}
