"""The generators of trees are what they say: reproducible, within their ranges, and awkward."""

import numpy as np
import pytest

from harts.testing.trees import AWKWARD, AWKWARD_VOCAB, caterpillar, random_trajectories
from harts.tree import PrefixTree


def test_random_trajectories_are_a_function_of_the_generator() -> None:
    first, second = (random_trajectories(np.random.default_rng(3), num_trajectories=5) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        np.testing.assert_array_equal(one.token_ids, other.token_ids)
        np.testing.assert_array_equal(one.loss_mask, other.loss_mask)
        assert (one.reward, one.id) == (other.reward, other.id)


def test_random_trajectories_keep_their_ranges() -> None:
    batch = random_trajectories(
        np.random.default_rng(0), num_trajectories=200, min_length=3, max_length=40, vocab_size=7, trained_share=1.0
    )
    assert len(batch) == 200
    assert {len(one) for one in batch} <= set(range(3, 41))
    assert max(int(one.token_ids.max()) for one in batch) < 7
    assert all(one.num_trained == len(one) - 1 for one in batch)
    tree = PrefixTree.build(batch)
    assert tree.num_rows < tree.num_tokens
    assert len(set(tree.end_segment_B.tolist())) < 200 or tree.num_segments > 200


def test_awkward_batches_are_small_and_have_what_they_are_named_for() -> None:
    assert max(int(one.token_ids.max()) for batch in AWKWARD.values() for one in batch) < AWKWARD_VOCAB
    sizes = {name: PrefixTree.build(batch).num_rows for name, batch in AWKWARD.items()}
    assert max(sizes.values()) <= 2500
    assert {63, 64, 65} <= {len(one) for one in AWKWARD["prefix of another"]}
    assert AWKWARD["empty response"][0].num_trained == 0
    assert np.count_nonzero(PrefixTree.build(AWKWARD["forest"]).parent_T < 0) == 5
    assert len({one.token_ids.tobytes() for one in AWKWARD["duplicates"]}) == 3


def test_caterpillar_without_legs_is_nested_prefixes() -> None:
    rows = caterpillar(4, spine=2, leg=0)
    assert [len(row) for row in rows] == [2, 4, 6, 8]
    assert all((rows[-1][: len(row)] == row).all() for row in rows)


def test_bad_ranges_are_refused() -> None:
    with pytest.raises(ValueError, match="min_length"):
        random_trajectories(np.random.default_rng(0), min_length=9, max_length=3)
