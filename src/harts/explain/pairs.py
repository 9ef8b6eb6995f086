"""Which children of a branch point are nearly the same, and over which tokens.

Shape suffixes: L tokens of a row.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from harts.explain.align import Edit, first_edit, window_hashes
from harts.explain.branches import Branch
from harts.explain.reorder import reordered_edit, retokenised_edit
from harts.explain.rows import Row
from harts.formats.decoding import Decoder

__all__ = ["Pair", "find_pairs"]

_FAR = 1 << 19
"""Tokens behind a branch point that are looked at."""
_ONE_IN = np.uint64(8)
"""Share of windows that stand for a child when there are many."""
_LINE = 256
"""Tokens before a branch point in which the start of its line is looked for."""
_FIRST = 24
"""Tokens by whose text children are put side by side."""


@dataclass(frozen=True)
class Pair:
    """Two children that differ in a span at their start and agree behind it.

    Attributes:
        winner, loser: numbers of the children; the loser is to be given the winner's span.
        winner_row, loser_row: the rows that were compared.
        winner_tokens, loser_tokens: lengths of the spans.
        run: tokens behind the spans that agree.
    """

    winner: int
    loser: int
    winner_row: int
    loser_row: int
    winner_tokens: int
    loser_tokens: int
    run: int


class _Child:
    def __init__(self, number: int, names: list[int], depth: int, rows: Sequence[Row]) -> None:
        self.number = number
        self.row = max(names, key=lambda at: (len(rows[at]), -at))
        self.weight = sum(rows[at].weight for at in names)
        row, tail = rows[self.row], slice(depth, depth + _FAR)
        self.symbols_L: NDArray[np.int32] = row.symbols_L[tail]
        self.token_ids_L: NDArray[np.int32] = row.token_ids_L[tail]
        self.sampled_L: NDArray[np.bool_] = row.sampled_L[tail]


def find_pairs(branch: Branch, rows: Sequence[Row], decoder: Decoder | None) -> Iterator[Pair]:
    """Pairs of children worth mending; the one that more trajectories go through comes first, and wins."""
    children = [_Child(number, names, branch.depth, rows) for number, names in enumerate(branch.children)]
    if all(child.sampled_L[0] for child in children):
        return
    children.sort(key=lambda child: (-child.weight, child.number))
    before = rows[children[0].row].token_ids_L[max(0, branch.depth - _LINE) : branch.depth]
    line = b"" if decoder is None else b"".join(decoder.pieces(before)).rpartition(b"\n")[2]
    for first, second in _candidates(children, decoder):
        if first.sampled_L[0] and second.sampled_L[0]:
            continue
        if first.token_ids_L[0] == second.token_ids_L[0]:  # they part by their merge keys, on purpose
            continue
        edit = _edit(first, second, line, decoder)
        if edit is not None:
            pair = _directed(first, second, edit)
            if pair is not None:
                yield pair


def _candidates(children: list[_Child], decoder: Decoder | None) -> list[tuple[_Child, _Child]]:
    if len(children) == 2:
        return [(children[0], children[1])]
    pairs: dict[tuple[int, int], None] = {}
    holder: dict[int, int] = {}  # window -> the first child that has it
    for number, child in enumerate(children):
        hashes = np.unique(window_hashes(child.symbols_L))
        votes: Counter[int] = Counter()
        for value in hashes[hashes % _ONE_IN == 0].tolist():
            first = holder.setdefault(value, number)
            if first != number:
                votes[first] += 1
        if votes:
            pairs[max(votes, key=lambda first: (votes[first], -first)), number] = None
    if decoder is not None:
        texts = [b"".join(decoder.pieces(child.token_ids_L[:_FIRST])) for child in children]
        order = sorted(range(len(children)), key=texts.__getitem__)
        for one, other in pairwise(order):
            if texts[one][:2] == texts[other][:2]:
                pairs[min(one, other), max(one, other)] = None
    return [(children[first], children[second]) for first, second in pairs]


def _edit(first: _Child, second: _Child, line: bytes, decoder: Decoder | None) -> Edit | None:
    if decoder is not None:
        edit = retokenised_edit(first.token_ids_L, second.token_ids_L, first.sampled_L, second.sampled_L, decoder)
        if edit is not None:
            return edit
    if not (first.sampled_L[0] or second.sampled_L[0]):
        edit = reordered_edit(first.token_ids_L, second.token_ids_L, line, decoder)
        if edit is not None:
            return edit
    return first_edit(first.symbols_L, second.symbols_L, first.sampled_L, second.sampled_L)


def _directed(first: _Child, second: _Child, edit: Edit) -> Pair | None:
    """Who is given whose tokens: sampled ones stay, then the longer of an elision, then those of the larger child."""
    sampled_first, sampled_second = first.sampled_L[: edit.a].any(), second.sampled_L[: edit.b].any()
    if sampled_first and sampled_second:
        return None
    second_wins = bool(sampled_second) or (not sampled_first and edit.b >= 32 and edit.b >= 4 * edit.a)
    if second_wins:
        return Pair(second.number, first.number, second.row, first.row, edit.b, edit.a, edit.run)
    return Pair(first.number, second.number, first.row, second.row, edit.a, edit.b, edit.run)
