"""What a difference between two rows is, judged by its text and by which side was sampled, and what would avoid it."""

import json
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

__all__ = ["REMEDIES", "Difference", "Kind", "kind_of"]

Kind = Literal[
    "retokenised",
    "dropped reasoning",
    "dropped turns",
    "rewritten response",
    "elided observation",
    "summarised history",
    "reordered",
    "timestamp",
    "identifier",
    "one character",
    "whitespace",
    "letter case",
    "extra text",
    "other observation",
    "other words",
    "other text",
]

REMEDIES: Mapping[Kind, str] = MappingProxyType(
    {
        "retokenised": "keep the sampled token ids in the context; do not tokenize its text again",
        "dropped reasoning": 'keep the reasoning in later contexts (reasoning="keep"), where the model allows it',
        "dropped turns": "append to the context instead of taking turns out of its middle",
        "rewritten response": "put the response into the context as it was sampled: no strip, no serialising again",
        "elided observation": "shorten an observation when it is first shown, or many at once and rarely",
        "summarised history": "summarise rarely: what is kept behind a summary runs again",
        "reordered": "write tools, and the keys in them, in one fixed order",
        "timestamp": "leave the time out of the prompt, or put it behind what is the same",
        "identifier": "leave the id out of the prompt, or put it behind what is the same",
        "one character": "make the prompts the same byte for byte",
        "whitespace": "make the prompts the same byte for byte",
        "letter case": "make the prompts the same byte for byte",
        "extra text": "put what only some rows have behind what all have",
        "other observation": "let tools and simulated users give the same answer to the same call, where they should",
        "other words": "put what varies behind what is the same",
        "other text": "put what varies behind what is the same",
    }
)
"""What wins the rows back, by kind."""

_TIME = re.compile(
    r"\d{4}-\d\d-\d\d|\d{1,2}:\d\d(:\d\d)?|\b1[5-9]\d{8}(\d{3})?\b|\d{1,2}[/.]\d{1,2}[/.]\d{2,4}"
    r"|\b(Mon|Tues|Wednes|Thurs|Fri|Satur|Sun)day\b|\b(Jan|Febr)uary\b|\b(March|April|June|July|August)\b"
    r"|\b(Septem|Octo|Novem|Decem)ber\b|\b\d+([.,]\d+)?\s?(ms|s|sec|seconds)\b",
)
_IDENTIFIER = re.compile(r"[0-9a-fA-F]{8}-[0-9a-fA-F-]{20,}|(?=[\w\-.:#/]*\d)[\w\-.:#/]+")
_THINKING = re.compile(r"</?think(ing)?>|<\|begin_of_thought\|>")
_SHORT = 8
_LONG = 32


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Two spans that stand at the same place, and what is around them.

    Attributes:
        a, b: text of the two spans; None where the vocabulary is not known.
        before, after: text around them, which agrees.
        tokens_a, tokens_b: their token ids.
        sampled_a, sampled_b: whether a token of theirs is trained somewhere.
        starts_sampled: whether the first token of the side that is sampled is.
        turns: sampled spans on that side.
        one_group: whether both rows are of one group.
        later: whether one row can be a later state of the other: of one group, and what agrees behind the spans was
            not sampled twice.
        in_history: whether something was sampled before the spans, so that they are no prompt.
    """

    a: str | None
    b: str | None
    before: str = ""
    after: str = ""
    tokens_a: tuple[int, ...] = ()
    tokens_b: tuple[int, ...] = ()
    sampled_a: bool = False
    sampled_b: bool = False
    starts_sampled: bool = False
    turns: int = 0
    one_group: bool = True
    later: bool = True
    in_history: bool = False


def kind_of(difference: Difference) -> Kind:
    """The first kind that fits."""
    a, b = difference.a, difference.b
    if a is not None and a == b:
        return "retokenised"
    if difference.sampled_a != difference.sampled_b and difference.later:
        kind = _kind_of_sampled(difference)
        if kind is not None:
            return kind
    short, long = sorted((len(difference.tokens_a), len(difference.tokens_b)))
    if a is not None and b is not None:
        kind = _kind_of_text(a, b, difference.before, difference.after)
        if kind is not None:
            return kind
    if short > 1 and _is_moved(difference.tokens_a, difference.tokens_b):
        return "reordered"
    answers = difference.one_group and difference.in_history
    if long >= _LONG and short * 4 <= long:
        if not answers:
            return "extra text"
        return "elided observation" if difference.later else "other observation"
    if answers:
        return "other observation"
    return "other words" if long <= _SHORT else "other text"


def _kind_of_sampled(difference: Difference) -> Kind | None:
    """One side was sampled; the other is how it appears in a later context."""
    a, b = difference.a or "", difference.b or ""
    sampled, shown = (a, b) if difference.sampled_a else (b, a)
    sampled_tokens, shown_tokens = len(difference.tokens_a), len(difference.tokens_b)
    if difference.sampled_b:
        sampled_tokens, shown_tokens = shown_tokens, sampled_tokens
    if difference.turns > 1:
        return "summarised history" if shown_tokens >= _LONG else "dropped turns"
    if not difference.starts_sampled:
        return None
    if len(_THINKING.findall(sampled)) > len(_THINKING.findall(shown)):
        return "dropped reasoning"
    if sampled_tokens < _SHORT or shown_tokens * 4 > sampled_tokens:
        return "rewritten response"
    return "dropped reasoning"


def _is_moved(a: tuple[int, ...], b: tuple[int, ...]) -> bool:
    """Whether two spans have the same tokens, in pieces that moved whole rather than one by one."""
    if Counter(a) != Counter(b):
        return False
    pieces_a, pieces_b = (Counter(zip(span, span[1:], span[2:], strict=False)) for span in (a, b))
    return (pieces_a & pieces_b).total() * 2 > pieces_a.total()


def _kind_of_text(a: str, b: str, before: str, after: str) -> Kind | None:
    words_a, words_b = _whole_words(a, before, after), _whole_words(b, before, after)
    if _differ_only_in(_TIME, words_a, words_b):
        return "timestamp"
    left, right = _trim(a, b)
    if len(left) <= 1 and len(right) <= 1:
        return "one character"
    if "".join(a.split()) == "".join(b.split()):
        return "whitespace"
    if a.casefold() == b.casefold():
        return "letter case"
    if _canonical(a, before, after) == _canonical(b, before, after):
        return "reordered"
    return "identifier" if _differ_only_in(_IDENTIFIER, words_a, words_b) else None


def _differ_only_in(pattern: re.Pattern[str], a: str, b: str) -> bool:
    return pattern.search(a) is not None and pattern.search(b) is not None and pattern.sub("", a) == pattern.sub("", b)


def _trim(a: str, b: str) -> tuple[str, str]:
    """Both texts without what they have in common at the start and at the end."""
    start = 0
    while start < min(len(a), len(b)) and a[start] == b[start]:
        start += 1
    a, b = a[start:], b[start:]
    stop = 0
    while stop < min(len(a), len(b)) and a[-1 - stop] == b[-1 - stop]:
        stop += 1
    return a[: len(a) - stop], b[: len(b) - stop]


def _canonical(text: str, before: str, after: str) -> list[str]:
    """The lines of a text in one order, JSON lines with their keys in one order."""
    whole = before.rpartition("\n")[2] + text + after.partition("\n")[0]
    lines = []
    for line in whole.splitlines():
        try:
            line = json.dumps(json.loads(line), sort_keys=True)
        except (ValueError, RecursionError):
            line = line.strip().rstrip(",")
        lines.append(line)
    return sorted(lines)


def _whole_words(text: str, before: str, after: str) -> str:
    left = re.search(r"\S*$", before)
    right = re.match(r"\S*", after)
    return (left.group() if left else "") + text + (right.group() if right else "")
