"""Differences that an alignment does not show as one: other tokens for the same text, and the same lines in another
order. Both need the text of tokens; the second also works on token ids alone.

Shape suffixes: A and B tokens of the two sequences.
"""

import json
from collections import Counter
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from harts.explain.align import MIN_RUN, Edit
from harts.formats.decoding import Decoder

__all__ = ["reordered_edit", "retokenised_edit"]

_FAR = 4096
"""Tokens looked at on each side."""
_SHORTEST = 6
"""Fewest tokens that are called reordered."""

Ids = NDArray[np.int32]


def retokenised_edit(
    a_A: Ids, b_B: Ids, sampled_A: NDArray[np.bool_], sampled_B: NDArray[np.bool_], decoder: Decoder
) -> Edit | None:
    """The longest start of both sequences that has one text, if any, in which not both sides were sampled."""
    pieces_a, pieces_b = decoder.pieces(a_A[:_FAR]), decoder.pieces(b_B[:_FAR])
    common = _common_bytes(b"".join(pieces_a), b"".join(pieces_b))
    ends_a = {end: at for at, end in enumerate(accumulate(map(len, pieces_a)), 1) if end <= common}
    best = None
    for at, end in enumerate(accumulate(map(len, pieces_b)), 1):
        if end in ends_a:
            if sampled_A[: ends_a[end]].any() and sampled_B[:at].any():
                break
            best = (ends_a[end], at)
    if best is None:
        return None
    run = _common_tokens(a_A[best[0] :], b_B[best[1] :])
    return Edit(*best, run)


def reordered_edit(a_A: Ids, b_B: Ids, before: bytes, decoder: Decoder | None) -> Edit | None:
    """The shortest start of both sequences that has the same lines, or the same tokens, in another order.

    Args:
        a_A, b_B: tokens behind the point where the sequences part.
        before: text of the line that the sequences part in, up to there.
        decoder: None compares token ids.
    """
    length = _reordered_lines(a_A, b_B, before, decoder) if decoder is not None else None
    length = length or _reordered_tokens(a_A, b_B)
    if length is None:
        return None
    a, b = length
    run = _common_tokens(a_A[a:], b_B[b:])
    return Edit(a, b, run) if run >= MIN_RUN else None


def _reordered_tokens(a_A: Ids, b_B: Ids) -> tuple[int, int] | None:
    balance: Counter[int] = Counter()
    open_ids = 0
    for at, (a, b) in enumerate(zip(a_A[:_FAR].tolist(), b_B[:_FAR].tolist(), strict=False), 1):
        for token, step in ((a, 1), (b, -1)):
            open_ids -= balance[token] != 0
            balance[token] += step
            open_ids += balance[token] != 0
        if open_ids == 0 and at >= _SHORTEST:
            return at, at
    return None


def _reordered_lines(a_A: Ids, b_B: Ids, before: bytes, decoder: Decoder) -> tuple[int, int] | None:
    pieces_a, pieces_b = decoder.pieces(a_A[:_FAR]), decoder.pieces(b_B[:_FAR])
    lines_a, lines_b = ((before + b"".join(pieces)).split(b"\n") for pieces in (pieces_a, pieces_b))
    balance: Counter[str] = Counter()
    open_lines = read_a = read_b = 0
    for line_a, line_b in zip(lines_a[:-1], lines_b[:-1], strict=False):
        for line, step in ((line_a, 1), (line_b, -1)):
            key = _canonical(line)
            open_lines -= balance[key] != 0
            balance[key] += step
            open_lines += balance[key] != 0
        read_a, read_b = read_a + len(line_a), read_b + len(line_b)
        if open_lines == 0 and read_a == read_b:
            return _first_boundary(pieces_a, pieces_b, read_a - len(before))
        read_a, read_b = read_a + 1, read_b + 1
    return None


def _first_boundary(pieces_a: list[bytes], pieces_b: list[bytes], start: int) -> tuple[int, int] | None:
    """Tokens on both sides up to the first place at or behind `start` bytes that ends a token on both."""
    ends_a = {end: at for at, end in enumerate(accumulate(map(len, pieces_a)), 1)}
    for at, end in enumerate(accumulate(map(len, pieces_b)), 1):
        if end >= start and end in ends_a:
            return ends_a[end], at
    return None


def _canonical(line: bytes) -> str:
    """A line of JSON with its keys in one order; any other line as it is, but for a comma at its end."""
    text = line.decode("utf-8", "replace").rstrip(",")
    if text.lstrip()[:1] in ("{", "["):
        try:
            return json.dumps(json.loads(text), sort_keys=True)
        except (ValueError, RecursionError):
            return text
    return text


def _common_bytes(a: bytes, b: bytes) -> int:
    length = min(len(a), len(b))
    differs = np.frombuffer(a, np.uint8, length) != np.frombuffer(b, np.uint8, length)
    return int(differs.argmax()) if differs.any() else length


def _common_tokens(a_A: Ids, b_B: Ids) -> int:
    length = min(len(a_A), len(b_B))
    differs = a_A[:length] != b_B[:length]
    return int(differs.argmax()) if differs.any() else length
