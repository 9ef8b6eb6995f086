"""Where two token sequences that differ at once become the same again.

Shape suffixes: A and B tokens of the two sequences, W windows, R runs.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["MIN_RUN", "WINDOW", "Edit", "first_edit", "window_hashes"]

WINDOW = 12
"""Tokens that have to agree for two places to be taken as the same."""

MIN_RUN = 16
"""Fewest tokens that have to agree behind a difference for it to count as one."""

_MAX_RUNS = 1500
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)

Symbols = NDArray[np.int32]
Hashes = NDArray[np.uint64]
Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class Edit:
    """Tokens 0:a of one sequence stand where tokens 0:b of the other stand; `run` tokens behind them agree."""

    a: int
    b: int
    run: int


def window_hashes(symbols: Symbols, window: int = WINDOW) -> Hashes:
    """A hash of every window of consecutive tokens, uint64 [L - window + 1]."""
    count = len(symbols) - window + 1
    if count <= 0:
        return np.zeros(0, np.uint64)
    hashes = np.zeros(count, np.uint64)
    mixed = symbols.astype(np.uint64) + np.uint64(1)
    with np.errstate(over="ignore"):
        mixed = (mixed ^ (mixed << np.uint64(21))) * _MULTIPLIER
        for at in range(window):
            hashes = hashes * _MULTIPLIER + mixed[at : at + count]
        return hashes ^ (hashes >> np.uint64(29))


def first_edit(a_A: Symbols, b_B: Symbols, sampled_A: Mask, sampled_B: Mask) -> Edit | None:
    """The difference at the start of both sequences, if a long enough identical stretch follows it.

    Where a window of tokens first occurs in each sequence is an anchor; anchors on one diagonal make runs. A difference
    can be mended if at most one side of it was sampled. A run shorter than `MIN_RUN`, or than the smaller side of the
    difference before it, says nothing (boilerplate agrees by chance). Of all chains of runs with nothing but mendable
    differences between them, the one with the most tokens is taken.

    Args:
        a_A, b_B: int32 tokens; the first ones differ.
        sampled_A, sampled_B: bool, whether each token was sampled.
    """
    start_a, start_b, length = _runs(a_A, b_B)
    if not len(length):
        return None
    count_a, count_b = (np.append(0, np.cumsum(sampled)) for sampled in (sampled_A, sampled_B))
    total = length.copy()

    def follows(stop_a: int, stop_b: int, first: int) -> NDArray[np.bool_]:
        next_a, next_b = start_a[first:], start_b[first:]
        gap_a, gap_b = np.maximum(next_a - stop_a, 0), np.maximum(next_b - stop_b, 0)
        enough = length[first:] >= np.maximum(MIN_RUN, np.minimum(gap_a, gap_b))
        unsampled_a = count_a[next_a] == count_a[np.minimum(stop_a, next_a)]
        unsampled_b = count_b[next_b] == count_b[np.minimum(stop_b, next_b)]
        return np.asarray(enough & (unsampled_a | unsampled_b))

    for at in range(len(length) - 2, -1, -1):
        stop_a, stop_b = int(start_a[at] + length[at]), int(start_b[at] + length[at])
        behind = (start_a[at + 1 :] > start_a[at]) & (start_b[at + 1 :] > start_b[at])
        # Grown to both sides, two runs may overlap by the few tokens that fit both.
        behind &= (start_a[at + 1 :] + WINDOW >= stop_a) & (start_b[at + 1 :] + WINDOW >= stop_b)
        behind &= follows(stop_a, stop_b, at + 1)
        if behind.any():
            total[at] += int(total[at + 1 :][behind].max())
    starts = np.flatnonzero(follows(0, 0, 0))
    if not len(starts):
        return None
    best = int(starts[total[starts].argmax()])
    return Edit(int(start_a[best]), int(start_b[best]), int(length[best]))


def _runs(a_A: Symbols, b_B: Symbols) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Maximal runs of equal tokens around anchors: starts in a and in b, and lengths, in the order of a."""
    none = np.zeros(0, np.int64)
    values_a, where_a = np.unique(window_hashes(a_A), return_index=True)
    values_b, where_b = np.unique(window_hashes(b_B), return_index=True)
    common, at_a, at_b = np.intersect1d(values_a, values_b, assume_unique=True, return_indices=True)
    if not len(common):
        return none, none, none
    at_a, at_b = where_a[at_a], where_b[at_b]
    order = np.lexsort((at_a, at_a - at_b))
    at_a, at_b = at_a[order], at_b[order]
    new = np.append(True, (np.diff(at_a - at_b) != 0) | (np.diff(at_a) > WINDOW))
    starts_a, starts_b = at_a[new], at_b[new]
    stops_a = at_a[np.append(np.flatnonzero(new)[1:] - 1, len(at_a) - 1)] + WINDOW
    runs = []
    for first_a, first_b, stop_a in zip(starts_a.tolist(), starts_b.tolist(), stops_a.tolist(), strict=True):
        back = _agreeing(a_A[:first_a][::-1], b_B[:first_b][::-1])
        on = _agreeing(a_A[stop_a:], b_B[first_b + stop_a - first_a :])
        runs.append((first_a - back, first_b - back, stop_a - first_a + back + on))
    longest = sorted(sorted(set(runs), key=lambda run: -run[2])[:_MAX_RUNS])
    start_a, start_b, length = np.array(longest, np.int64).T
    return start_a, start_b, length


def _agreeing(a_A: Symbols, b_B: Symbols) -> int:
    """Number of leading tokens that agree; looks at growing pieces, as it is mostly small."""
    done, piece, length = 0, 64, min(len(a_A), len(b_B))
    while done < length:
        differs = a_A[done : min(done + piece, length)] != b_B[done : min(done + piece, length)]
        first = int(differs.argmax())
        if differs[first]:
            return done + first
        done, piece = done + len(differs), piece * 4
    return length
