"""Time to build trees and layouts, against the goals: one JSON line a case.

    python benchmarks/tree_and_layout.py

tree    10 million tokens in 2,000 rows; 5,000 nested prefixes;
        a caterpillar of depth 5,000                                 goal 0.5 s each
layout  100,000 rows in 1,000 segments; a long session               goal 0.1 s + 30 ns a gathered key
"""

import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from harts.layout import pack
from harts.testing.trees import caterpillar
from harts.trajectory import Trajectory
from harts.tree import PrefixTree
from record import provenance

Tokens = NDArray[np.int64]
RUNS = 7


def wrap(rows: Sequence[Tokens]) -> list[Trajectory]:
    masks = [np.arange(len(row)) > 0 for row in rows]
    return [Trajectory(token_ids=row.astype(np.int32), loss_mask=mask) for row, mask in zip(rows, masks, strict=True)]


def seconds(run: Callable[[], object]) -> dict[str, float]:
    times = []
    for _ in range(RUNS):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return {"first_s": times[0], "median_s": statistics.median(times), "max_s": max(times)}


def branching(rng: np.random.Generator, rows: int, segments: int) -> list[Tokens]:
    """Rows that branch off random earlier ones: about `segments` segments over about `rows` distinct tokens."""
    piece = rows // segments
    found = [rng.integers(0, 150_000, 3 * piece)]
    for _ in range(segments // 2 - 1):
        base = found[rng.integers(len(found))]
        found.append(np.concatenate([base[: rng.integers(1, len(base))], rng.integers(0, 150_000, 2 * piece)]))
    return found


def cases() -> Iterator[dict[str, object]]:
    rng = np.random.default_rng(0)
    base = rng.integers(0, 150_000, 5_000)
    cuts = rng.integers(0, 5_000, 2_000)
    tokens = [np.concatenate([base[:cut], rng.integers(0, 150_000, 5_000 - cut)]) for cut in cuts]
    trees = {
        "tree: 10M tokens in 2,000 rows": tokens,
        "tree: 5,000 nested prefixes": [base[: length + 1] for length in range(5_000)],
        "tree: caterpillar of depth 5,000": caterpillar(5_000),
    }
    for name, rows in trees.items():
        batch = wrap(rows)
        tree = PrefixTree.build(batch)
        sizes = {"tokens": tree.num_tokens, "rows": tree.num_rows, "segments": tree.num_segments}
        yield {"case": name, **sizes, **seconds(lambda batch=batch: PrefixTree.build(batch)), "goal_s": 0.5}
    session = [base[:1000]]
    for _ in range(400):  # one row a model call
        session.append(np.concatenate([session[-1], rng.integers(0, 150_000, 250)]))
    layouts = {
        "layout: 100k rows in 1,000 segments": branching(rng, 100_000, 1_000),
        "layout: a session of 400 calls, each with thinking dropped after it": [
            np.concatenate([row, rng.integers(0, 150_000, 50)]) for row in session
        ],
    }
    for name, rows in layouts.items():
        tree = PrefixTree.build(wrap(rows))
        keys = int(pack(tree).chains.length_C.sum())
        sizes = {"rows": tree.num_rows, "segments": tree.num_segments, "gathered_keys": keys}
        yield {"case": name, **sizes, **seconds(lambda tree=tree: pack(tree)), "goal_s": 0.1 + 30e-9 * keys}


def main() -> None:
    for case in cases():
        print(json.dumps({"benchmark": "tree_and_layout", **case, **provenance()}), flush=True)


if __name__ == "__main__":
    main()
