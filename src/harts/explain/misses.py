"""Near misses: rows that part over a small difference and are the same again behind it.

At every branch point of the tree, each child is compared with the one that it has most in common with further down.
Where the difference is not one of sampled text on both sides, one side is given the other's tokens, and the tree is
built again: the rows it then has less are what the difference costs. Mended rows may part again later, so this is
repeated until nothing more is found. Branch points are mended from the leaves up, so that costs add up.

Shape suffixes: L tokens of a row, T rows of the tree, S segments.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from harts.explain.branches import Branch, branches_of
from harts.explain.kinds import Difference, Kind, kind_of
from harts.explain.pairs import Pair, find_pairs
from harts.explain.rows import Row, as_trajectory, build_tree
from harts.formats.decoding import Decoder
from harts.tree import PrefixTree

__all__ = ["Example", "Miss", "find_misses"]

_MAX_ROUNDS = 24
_CONTEXT = 24
"""Tokens around a difference that its judge may read."""


@dataclass(frozen=True, kw_only=True)
class Example:
    """One of the differences of a miss: rows `a` and `b` part at `depth`; `text_a` stands where `text_b` stands.

    Texts are None where the vocabulary is not known. `run` tokens behind the difference agree.
    """

    a: str
    b: str
    depth: int
    tokens_a: int
    tokens_b: int
    before: str | None
    text_a: str | None
    text_b: str | None
    after: str | None
    run: int


@dataclass(frozen=True, kw_only=True)
class Miss:
    """Differences of one kind at one branch point.

    Attributes:
        kind: see `harts.explain.kinds`.
        rows: rows of the tree that would not be there without them.
        variants: children of the branch point that were mended.
        groups: of the rows concerned, in order.
        example: the first of the differences.
    """

    kind: Kind
    rows: int
    variants: int
    groups: tuple[str, ...]
    example: Example


def find_misses(rows: Sequence[Row], decoder: Decoder | None) -> tuple[list[Miss], list[Row]]:
    """All near misses, the costliest first, and the rows without their differences."""
    rows = list(rows)
    found: list[Miss] = []
    changed = set(range(len(rows)))
    for _ in range(_MAX_ROUNDS):
        tree = build_tree(rows)
        trained_T = tree.trained_T
        rows = [dataclasses.replace(row, sampled_L=trained_T[tree.rows_of(at)]) for at, row in enumerate(rows)]
        looked_at, changed = changed, set()
        for branch in reversed(branches_of(tree, range(len(rows)))):
            below = [at for child in branch.children for at in child]
            if looked_at.isdisjoint(below):
                continue
            misses = _mend(branch, rows, decoder)
            if misses:
                found += misses
                changed.update(below)
        if not changed:
            break
    return sorted(found, key=lambda miss: (-miss.rows, miss.kind, miss.example.depth, miss.example.a)), rows


def _mend(branch: Branch, rows: list[Row], decoder: Decoder | None) -> list[Miss]:
    """Finds what the children of one branch point differ in, and mends `rows` in place."""
    by_kind: dict[Kind, list[Pair]] = defaultdict(list)
    sources: set[int] = set()
    mended: set[int] = set()
    for pair in find_pairs(branch, rows, decoder):
        free = pair.loser not in sources and pair.loser not in mended and pair.winner not in mended
        if free:  # the others wait for the next round
            sources.add(pair.winner)
            mended.add(pair.loser)
            by_kind[kind_of(_difference(pair, branch, rows, decoder))].append(pair)
    misses = []
    for kind in sorted(by_kind):
        miss = _mend_kind(kind, by_kind[kind], branch, rows, decoder)
        if miss is not None:
            misses.append(miss)
    return misses


def _mend_kind(kind: Kind, pairs: list[Pair], branch: Branch, rows: list[Row], decoder: Decoder | None) -> Miss | None:
    example = _example(pairs[0], branch, rows, decoder)
    concerned: dict[int, None] = {}
    after: dict[int, Row] = {}
    for pair in pairs:
        concerned.update(dict.fromkeys(branch.children[pair.winner] + branch.children[pair.loser]))
        model, source = rows[pair.loser_row], rows[pair.winner_row]
        stop = branch.depth + pair.loser_tokens
        for at in branch.children[pair.loser]:
            if np.array_equal(rows[at].symbols_L[branch.depth : stop], model.symbols_L[branch.depth : stop]):
                after[at] = rows[at].replace(branch.depth, stop, source, branch.depth + pair.winner_tokens)
    saved = _rows_saved(branch.depth, list(concerned), rows, after, one_loser=len(pairs) == 1)
    if saved <= 0:
        return None
    groups = tuple(dict.fromkeys(rows[at].group for at in concerned))
    for at, row in after.items():
        rows[at] = row
    for pair in pairs:  # what is mended next may meet these rows too
        moved = [at for at in branch.children[pair.loser] if at in after]
        branch.children[pair.winner].extend(moved)
        branch.children[pair.loser][:] = [at for at in branch.children[pair.loser] if at not in after]
    return Miss(kind=kind, rows=saved, variants=len(pairs), groups=groups, example=example)


def _rows_saved(depth: int, concerned: list[int], rows: list[Row], after: dict[int, Row], *, one_loser: bool) -> int:
    """Rows of the concerned part of the tree, built before and after.

    Where one child is mended, what its rows hold deeper than any other row reaches merges with nothing new and is cut
    off on both sides.
    """
    reach = max((len(rows[at]) for at in concerned if at not in after), default=0)
    longest = max(len(row) for row in [*(rows[at] for at in concerned), *after.values()])

    def size(mended: bool) -> int:
        parts = []
        for at in concerned:
            row, stop = rows[at], longest
            if at in after:
                shift = len(after[at]) - len(row)
                stop = reach + abs(shift) - (0 if mended else shift) if one_loser else longest
                row = after[at] if mended else row
            if min(stop, len(row)) > depth:
                parts.append(as_trajectory(row.symbols_L[depth:stop], row.sampled_L[depth:stop]))
        return PrefixTree.build(parts).num_rows if parts else 0

    return size(False) - size(True)


def _difference(pair: Pair, branch: Branch, rows: list[Row], decoder: Decoder | None) -> Difference:
    """The pair with the winner as a."""
    winner, loser, depth = rows[pair.winner_row], rows[pair.loser_row], branch.depth
    span_a, span_b = slice(depth, depth + pair.winner_tokens), slice(depth, depth + pair.loser_tokens)
    sampled_a, sampled_b = winner.sampled_L[span_a], loser.sampled_L[span_b]
    sampled = sampled_a if sampled_a.any() else sampled_b
    run_a, run_b = (slice(span.stop, span.stop + pair.run) for span in (span_a, span_b))
    sampled_twice = bool(winner.sampled_L[run_a].any() and loser.sampled_L[run_b].any())
    before = loser.token_ids_L[max(0, depth - _CONTEXT) : depth]
    after = loser.token_ids_L[span_b.stop : span_b.stop + _CONTEXT]
    ids_a, ids_b = winner.token_ids_L[span_a], loser.token_ids_L[span_b]
    return Difference(
        a=None if decoder is None else decoder.text(ids_a),
        b=None if decoder is None else decoder.text(ids_b),
        before="" if decoder is None else decoder.text(before),
        after="" if decoder is None else decoder.text(after),
        tokens_a=tuple(ids_a.tolist()),
        tokens_b=tuple(ids_b.tolist()),
        sampled_a=bool(sampled_a.any()),
        sampled_b=bool(sampled_b.any()),
        starts_sampled=bool(sampled[:1].any()),
        turns=int(np.count_nonzero(sampled[1:] & ~sampled[:-1])) + int(sampled[:1].any()),
        one_group=winner.group == loser.group,
        later=winner.group == loser.group and not sampled_twice,
        in_history=bool(loser.sampled_L[:depth].any()),
    )


def _example(pair: Pair, branch: Branch, rows: list[Row], decoder: Decoder | None) -> Example:
    difference = _difference(pair, branch, rows, decoder)
    return Example(
        a=rows[pair.winner_row].id,
        b=rows[pair.loser_row].id,
        depth=branch.depth,
        tokens_a=pair.winner_tokens,
        tokens_b=pair.loser_tokens,
        before=None if decoder is None else difference.before,
        text_a=difference.a,
        text_b=difference.b,
        after=None if decoder is None else difference.after,
        run=pair.run,
    )
