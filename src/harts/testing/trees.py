"""Random and awkward batches of trajectories, small enough for tests of models and kernels.

Everything here is a pure function of its arguments (and of the random generator passed in). Token ids are drawn from
a small vocabulary on purpose: trajectories then also share tokens by chance, as real ones do.

    trajectories = random_trajectories(np.random.default_rng(0), num_trajectories=6, max_length=100)
    tree = PrefixTree.build(AWKWARD["caterpillar"])

    @hypothesis.given(tree_strategy())
    def test_something(tree: PrefixTree) -> None: ...
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from harts.trajectory import Trajectory
from harts.tree import PrefixTree

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

__all__ = [
    "AWKWARD",
    "AWKWARD_VOCAB",
    "caterpillar",
    "random_trajectories",
    "to_trajectories",
    "trajectories_strategy",
    "tree_strategy",
]

AWKWARD_VOCAB = 64
"""All token ids in `AWKWARD` are smaller."""

_AWKWARD_LENGTHS = (0, 1, 2, 3, 62, 63, 64, 65, 127, 128, 129)

Tokens = NDArray[np.int64]


def random_trajectories(
    rng: np.random.Generator,
    *,
    num_trajectories: int = 8,
    min_length: int = 1,
    max_length: int = 200,
    vocab_size: int = 50,
    trained_share: float = 0.5,
    fresh_share: float = 0.1,
) -> list[Trajectory]:
    """Draws trajectories that branch off each other at random depths.

    Each one keeps a random prefix of an earlier one and goes on with random tokens. Exact duplicates, prefixes of
    other trajectories and a branch at every depth occur; with `fresh_share` > 0 so do several roots.

    Args:
        rng: source of randomness; the same state gives the same trajectories.
        num_trajectories: B, at least 1.
        min_length: least number of tokens of a trajectory, at least 1.
        max_length: largest number of tokens of a trajectory.
        vocab_size: token ids are in [0, vocab_size).
        trained_share: chance that a token is trained, each drawn alone (the first token never is).
        fresh_share: chance that a trajectory starts anew instead of branching off.

    Returns:
        `num_trajectories` trajectories with `id` "0", "1", ... and random advantages, log-probs and rewards.

    Raises:
        ValueError: `num_trajectories`, `vocab_size` or a length is below 1, or `min_length > max_length`.
    """
    if num_trajectories < 1 or vocab_size < 1 or not 1 <= min_length <= max_length:
        raise ValueError(
            "expected num_trajectories >= 1, vocab_size >= 1 and 1 <= min_length <= max_length, got "
            f"{num_trajectories}, {vocab_size}, {min_length} and {max_length}"
        )
    rows: list[Tokens] = []
    for _ in range(num_trajectories):
        length = int(rng.integers(min_length, max_length + 1))
        base = rows[rng.integers(len(rows))] if rows and rng.random() >= fresh_share else np.zeros(0, np.int64)
        kept = base[: rng.integers(len(base) + 1)]
        rows.append(np.concatenate([kept, rng.integers(0, vocab_size, max(length - len(kept), 0))])[:max_length])
    return to_trajectories(rng, rows, trained_share=trained_share)


def to_trajectories(
    rng: np.random.Generator, rows: Sequence[Tokens | Sequence[int]], *, trained_share: float = 0.5
) -> list[Trajectory]:
    """Wraps token ids into trajectories with random loss masks, advantages, log-probs and rewards.

    Args:
        rng: source of randomness.
        rows: token ids of each trajectory, each with at least one.
        trained_share: chance that a token is trained; 1 trains all but the first token.
    """
    trajectories = []
    for index, row in enumerate(rows):
        token_ids = np.asarray(row, np.int64)
        loss_mask = rng.random(len(token_ids)) < trained_share
        loss_mask[:1] = False
        trajectories.append(
            Trajectory(
                token_ids=token_ids.astype(np.int32),
                loss_mask=loss_mask,
                id=str(index),
                group=f"root {token_ids[0]}",
                logprobs=-rng.exponential(size=len(token_ids)),
                advantages=np.full(len(token_ids), rng.normal()),
                reward=float(rng.random()),
            )
        )
    return trajectories


def caterpillar(turns: int, *, spine: int = 1, leg: int = 1, vocab_size: int = AWKWARD_VOCAB) -> list[Tokens]:
    """Token ids of a caterpillar: one path of `turns` branch points, at each of which one leaf hangs.

    Trajectory i is the first `(i + 1) * spine` tokens of the path and `leg` tokens of its own.

    Args:
        turns: B, number of branch points and of trajectories.
        spine: tokens of the path between two branch points, at least 1.
        leg: tokens of each trajectory behind its branch point; 0 makes each a prefix of the next.
        vocab_size: at least 2; the path has ids in [0, vocab_size - 1), a leg repeats `vocab_size - 1`.
    """
    path = np.arange(turns * spine) % (vocab_size - 1)
    tail = np.full(leg, vocab_size - 1)
    return [np.concatenate([path[: (turn + 1) * spine], tail]) for turn in range(turns)]


def trajectories_strategy(
    *, max_trajectories: int = 8, max_length: int = 200, vocab_size: int = 5, trained_share: float = 0.5
) -> "SearchStrategy[list[Trajectory]]":
    """Hypothesis strategy of batches that branch off each other, preferring cuts and lengths around blocks.

    Args:
        max_trajectories: largest B.
        max_length: largest number of tokens of a trajectory.
        vocab_size: token ids are in [0, vocab_size); few ids make prefixes agree by chance too.
        trained_share: chance that a token is trained.
    """
    from hypothesis import strategies as st

    length = st.sampled_from([n for n in _AWKWARD_LENGTHS if n <= max_length]) | st.integers(0, max_length)
    kept = length | st.just(max_length)  # all of the other, too
    branch = st.tuples(st.integers(-1, max_trajectories - 1), kept, length)  # which to branch off, kept, new

    def build(recipe: tuple[list[tuple[int, int, int]], int]) -> list[Trajectory]:
        branches, seed = recipe
        rng = np.random.default_rng(seed)
        rows: list[Tokens] = []
        for base, kept, new in branches:
            prefix = rows[base % len(rows)][:kept] if rows and base >= 0 else np.zeros(0, np.int64)
            row = np.concatenate([prefix, rng.integers(0, vocab_size, new)])[:max_length]
            rows.append(row if len(row) else np.zeros(1, np.int64))
        return to_trajectories(rng, rows, trained_share=trained_share)

    recipes = st.tuples(st.lists(branch, min_size=1, max_size=max_trajectories), st.integers(0, 3))
    return recipes.map(build)


def tree_strategy(
    *, max_trajectories: int = 8, max_length: int = 200, vocab_size: int = 5, trained_share: float = 0.5
) -> "SearchStrategy[PrefixTree]":
    """Hypothesis strategy of prefix trees of `trajectories_strategy`'s batches; same arguments."""
    batches = trajectories_strategy(
        max_trajectories=max_trajectories,
        max_length=max_length,
        vocab_size=vocab_size,
        trained_share=trained_share,
    )
    return batches.map(PrefixTree.build)


def _awkward_rows(rng: np.random.Generator) -> dict[str, list[Tokens]]:
    def draw(length: int) -> Tokens:
        return rng.integers(0, AWKWARD_VOCAB, length)

    def own(index: int, length: int) -> Tokens:  # starts with a token of its own, so that siblings differ at once
        return np.concatenate([[index], draw(length - 1)]).astype(np.int64)

    stem, path, spine = draw(100), draw(200), draw(12 * 40)
    caterpillar_rows = caterpillar(1000)
    deep = draw(130)
    return {
        "single token": [draw(1)],
        "path": [path],
        "star": [np.concatenate([stem, own(i, 30 + 20 * i)]) for i in range(8)],
        "comb": [np.concatenate([spine[: 40 * (i + 1)], own(i, 90)]) for i in range(12)],
        "caterpillar": caterpillar_rows,
        "one-token segments": [path[:length] for length in range(1, 100)],
        "one-token branches": [np.array([i >> 4 & 1, i >> 3 & 1, i >> 2 & 1, i >> 1 & 1, i & 1]) for i in range(32)],
        "lengths 63/64/65": [
            np.concatenate([path[:at], own(i + 3 * j, length)])
            for i, at in enumerate((63, 64, 65))
            for j, length in enumerate((63, 64, 65))
        ],
        "branches at 63/64/65 inside branches": [
            np.concatenate([deep[:at], own(20 + i, 64), own(40 + j, 1 + 62 * j)])
            for i, at in enumerate((63, 64, 65, 127, 128, 129))
            for j in range(3)
        ],
        "duplicates": [path, path[:64], path, path[:64], np.append(path, 1), path],
        "prefix of another": [path[:n] for n in (1, 200, 63, 64, 65, 128, 199)],
        "forest": [np.concatenate([own(i % 5, 70), own(i, 5 + 30 * i)]) for i in range(10)],
        "empty response": [stem, stem, np.concatenate([stem, own(0, 40)])],
    }


def _awkward() -> dict[str, list[Trajectory]]:
    rng = np.random.default_rng(0)
    awkward = {name: to_trajectories(rng, rows) for name, rows in _awkward_rows(rng).items()}
    prompt, same, longer = awkward["empty response"]
    awkward["empty response"] = [  # nothing after the prompt, so nothing is trained
        Trajectory(token_ids=t.token_ids, loss_mask=np.zeros(len(t), np.bool_), id=t.id, advantages=t.advantages)
        for t in (prompt, same)
    ] + [longer]
    return awkward


AWKWARD: dict[str, list[Trajectory]] = _awkward()
"""Shapes that broke an implementation before, by name. The caterpillar has 1,000 branch points in 2,000 rows (but
half a million tokens); each other one has at most 2,500 rows."""
