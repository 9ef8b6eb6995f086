"""PrefixTree against a trie of dictionaries, on random and awkward batches."""

import dataclasses
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harts.testing.trees import AWKWARD, caterpillar, random_trajectories, to_trajectories, trajectories_strategy
from harts.trajectory import Trajectory
from harts.tree import PrefixTree

RNG = np.random.default_rng(0)


def of_tokens(*rows: list[int], **fields: object) -> list[Trajectory]:
    return [dataclasses.replace(one, **fields) for one in to_trajectories(np.random.default_rng(0), rows)]  # type: ignore[arg-type]


def check_against_trie(tree: PrefixTree) -> None:
    """Every prefix is one row; rows, parents, depths, segments and multiplicities are those of a plain trie."""
    prefixes: dict[tuple[int, ...], set[int]] = {}
    for index, trajectory in enumerate(tree.trajectories):
        tokens = trajectory.token_ids.tolist()
        for stop in range(1, len(tokens) + 1):
            prefixes.setdefault(tuple(tokens[:stop]), set()).add(index)
    assert tree.num_rows == len(prefixes)
    row_of: dict[tuple[int, ...], int] = {}
    for index, trajectory in enumerate(tree.trajectories):
        tokens, rows = trajectory.token_ids.tolist(), tree.rows_of(index).tolist()
        for depth, row in enumerate(rows):
            prefix = tuple(tokens[: depth + 1])
            assert row_of.setdefault(prefix, row) == row
            assert tree.depth_T[row] == depth
            assert tree.token_ids_T[row] == tokens[depth]
            assert tree.parent_T[row] == (rows[depth - 1] if depth else -1)
            assert tree.multiplicity_S[tree.segment_of_T[row]] == len(prefixes[prefix])
    assert sorted(row_of.values()) == list(range(tree.num_rows))
    # A segment is a maximal run of rows with one set of trajectories through it.
    users = {row: prefixes[prefix] for prefix, row in row_of.items()}
    starts = [
        row
        for row in range(tree.num_rows)
        if tree.parent_T[row] != row - 1 or row == 0 or users[row] != users[int(tree.parent_T[row])]
    ]
    assert tree.start_S.tolist() == starts
    for segment, parent in enumerate(tree.parent_S.tolist()):
        above = int(tree.parent_T[tree.start_S[segment]])
        assert parent == (-1 if above < 0 else int(tree.segment_of_T[above]))
    trained = {int(row) for i, t in enumerate(tree.trajectories) for row in tree.rows_of(i)[t.loss_mask]}
    assert np.flatnonzero(tree.trained_T).tolist() == sorted(trained)


@settings(deadline=None, max_examples=60)
@given(trajectories_strategy(max_trajectories=6, max_length=70, vocab_size=3))
def test_tree_equals_a_trie_of_dictionaries(trajectories: list[Trajectory]) -> None:
    check_against_trie(PrefixTree.build(trajectories))


def test_many_random_trees_equal_a_trie_of_dictionaries() -> None:
    rng = np.random.default_rng(0)
    for _ in range(30):
        check_against_trie(PrefixTree.build(random_trajectories(rng, num_trajectories=12, max_length=90)))


@pytest.mark.parametrize("name", [name for name in AWKWARD if name != "caterpillar"])
def test_awkward_trees_equal_a_trie_of_dictionaries(name: str) -> None:
    check_against_trie(PrefixTree.build(AWKWARD[name]))


@settings(deadline=None, max_examples=40)
@given(trajectories_strategy(max_trajectories=7, max_length=80, vocab_size=3), st.randoms(use_true_random=False))
def test_order_of_trajectories_does_not_matter(trajectories: list[Trajectory], chance: random.Random) -> None:
    tree = PrefixTree.build(trajectories)
    order = list(range(len(trajectories)))
    chance.shuffle(order)
    other = PrefixTree.build([trajectories[index] for index in order])
    for name in ("token_ids_T", "parent_T", "depth_T", "start_S", "parent_S", "multiplicity_S"):
        np.testing.assert_array_equal(getattr(tree, name), getattr(other, name))
    for new, old in enumerate(order):
        np.testing.assert_array_equal(tree.rows_of(old), other.rows_of(new))


def test_duplicates_and_prefixes_add_no_row_but_stay() -> None:
    tree = PrefixTree.build(of_tokens([1, 2, 3, 4], [1, 2], [1, 2, 3, 4], [1, 2, 5]))
    assert tree.num_trajectories == 4
    assert tree.num_rows == 5
    assert tree.num_tokens == 13
    assert tree.length_S.tolist() == [2, 2, 1]
    assert tree.multiplicity_S.tolist() == [4, 2, 1]
    assert tree.end_segment_B.tolist() == [1, 0, 1, 2]


def test_forest_has_one_root_per_distinct_start() -> None:
    tree = PrefixTree.build(of_tokens([1, 2], [3, 2], [1, 4], [5]))
    assert np.count_nonzero(tree.parent_T < 0) == 3
    assert tree.depth_T[tree.parent_T < 0].tolist() == [0, 0, 0]


def test_five_thousand_nested_prefixes_need_no_recursion() -> None:
    path = RNG.integers(0, 50, 5000)
    tree = PrefixTree.build(of_tokens(*[path[:length] for length in range(1, 5001)]))
    assert (tree.num_rows, tree.num_segments) == (5000, 5000)
    assert tree.multiplicity_S.tolist() == list(range(5000, 0, -1))
    assert tree.parent_S.tolist() == list(range(-1, 4999))


def test_caterpillar_of_a_thousand_turns() -> None:
    tree = PrefixTree.build(AWKWARD["caterpillar"])
    assert (tree.num_rows, tree.num_segments) == (2000, 1999)
    assert [len(row) for row in caterpillar(3, spine=5, leg=2)] == [7, 12, 17]


def test_tokens_merge_only_where_merge_keys_agree() -> None:
    plain, zeros, other = of_tokens([1, 2, 3], [1, 2, 3], [1, 2, 3])
    zeros = dataclasses.replace(zeros, merge_keys=np.zeros(3, np.int64))
    other = dataclasses.replace(other, merge_keys=np.array([0, 7, 0]))
    tree = PrefixTree.build([plain, zeros, other])
    assert tree.num_rows == 5
    assert tree.rows_of(0).tolist() == tree.rows_of(1).tolist()
    assert tree.rows_of(2)[0] == tree.rows_of(0)[0]
    assert tree.rows_of(2)[1] != tree.rows_of(0)[1]


def test_baselines_share_prefixes_or_nothing() -> None:
    rows = of_tokens([1, 2, 3], [1, 2], [1, 2, 4], [1, 2, 3])
    assert PrefixTree.build(rows, share="none").num_rows == 11
    by_prefix = PrefixTree.build(rows, share="prefix")  # [1, 2] goes into one that continues it, duplicates merge
    assert by_prefix.num_rows == 6
    assert PrefixTree.build(rows).num_rows == 4
    check_lengths = [len(by_prefix.rows_of(index)) for index in range(4)]
    assert check_lengths == [3, 2, 3, 3]


@settings(deadline=None, max_examples=40)
@given(trajectories_strategy(max_trajectories=7, max_length=80, vocab_size=3), st.randoms(use_true_random=False))
def test_a_subset_is_the_tree_of_its_trajectories(trajectories: list[Trajectory], chance: random.Random) -> None:
    chosen = chance.sample(range(len(trajectories)), chance.randint(1, len(trajectories)))
    some = [trajectories[index] for index in chosen]
    for share in ("tree", "none"):
        tree = PrefixTree.build(trajectories, share=share)  # type: ignore[arg-type]
        subset, built = tree.subset(chosen), PrefixTree.build(some, share=share)  # type: ignore[arg-type]
        assert subset.share == tree.share == share
        assert all(one is other for one, other in zip(subset.trajectories, some, strict=True))
        for name in ("offset_B1", "row_of_N", "token_ids_T", "parent_T", "depth_T", "start_S", "parent_S"):
            one, other = getattr(subset, name), getattr(built, name)
            if share == "none" and name in ("row_of_N", "token_ids_T", "depth_T", "parent_T"):
                continue  # equal trajectories, which are not merged, may stand in another order
            np.testing.assert_array_equal(one, other)
            assert one.dtype == other.dtype, name
        if share == "tree":
            check_against_trie(subset)


def test_a_subset_keeps_what_the_whole_tree_merged() -> None:
    """[1] is a prefix of both others; under "prefix" it runs within the first, in a subset without it by itself."""
    tree = PrefixTree.build(of_tokens([1], [1, 2], [1, 3]), share="prefix")
    assert tree.num_rows == 4
    assert tree.subset([0, 2]).num_rows == 3
    assert tree.subset([1, 0]).num_rows == 2
    large = PrefixTree.build(of_tokens(*[[1, 2, 3, index] for index in range(200)]))
    few = large.subset([150, 7])  # far fewer tokens than rows: another way to the same tree
    check_against_trie(few)
    assert [one.id for one in few.trajectories] == ["150", "7"]


@pytest.mark.parametrize(
    ("indices", "message"), [([], "at least one"), ([0, 2], "got 2"), ([-1], "got -1"), ([1, 1], "twice")]
)
def test_subsets_of_what_is_not_there_are_refused(indices: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PrefixTree.build(of_tokens([1], [2])).subset(indices)


def test_sum_over_subtrees_adds_what_hangs_below() -> None:
    tree = PrefixTree.build(AWKWARD["one-token branches"])
    value_S = RNG.integers(0, 9, tree.num_segments)
    total = value_S.copy()
    for segment in range(tree.num_segments - 1, -1, -1):
        if tree.parent_S[segment] >= 0:
            total[tree.parent_S[segment]] += total[segment]
    np.testing.assert_array_equal(tree.sum_over_subtrees(value_S), total)


def test_bad_input_is_named() -> None:
    with pytest.raises(ValueError, match="at least one"):
        PrefixTree.build([])
    with pytest.raises(ValueError, match="'tree', 'prefix' or 'none'"):
        PrefixTree.build(of_tokens([1]), share="some")  # type: ignore[arg-type]
