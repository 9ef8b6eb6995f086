"""Leaves: every count of a set of trajectories follows from path lengths and what neighbours share."""

import numpy as np

from harts.blocks import BLOCK, Blocks
from harts.plan.leaves import Leaves
from harts.testing.trees import AWKWARD, random_trajectories
from harts.tree import PrefixTree


def test_counts_of_any_subset_follow_from_leaves() -> None:
    rng = np.random.default_rng(0)
    batches = list(AWKWARD.values()) + [random_trajectories(rng, num_trajectories=12) for _ in range(40)]
    for batch in batches:
        leaves = Leaves.of(PrefixTree.build(batch))
        part_L = rng.integers(0, 3, leaves.num_leaves)
        leaf_L, shared_L = leaves.common_within(part_L)
        for part in np.unique(part_L).tolist():
            built = PrefixTree.build(
                [one for one, leaf in zip(batch, leaves.leaf_of_B, strict=True) if part_L[leaf] == part]
            )
            blocks = Blocks.of_tree(built)
            inside = part_L[leaf_L] == part
            length, shared = leaves.length_L[leaf_L[inside]], shared_L[inside]
            assert (length - shared).sum() == built.num_rows
            assert (length - shared // BLOCK * BLOCK).sum() == built.num_rows + blocks.replayed_rows
            assert length.sum() == int(blocks.chains.length_C.sum())


def test_branches_hold_every_row_once() -> None:
    for batch in AWKWARD.values():
        tree = PrefixTree.build(batch)
        leaves = Leaves.of(tree)
        own = sum(branch.depth - branch.above for branch in leaves.branches)
        own += sum(int(leaves.length_L[leaf]) - branch.depth for branch in leaves.branches for leaf in branch.leaves)
        assert own == tree.num_rows
        seen = sorted(leaf for branch in leaves.branches for leaf in branch.leaves)
        assert seen == list(range(leaves.num_leaves))
        for at, branch in enumerate(leaves.branches):
            assert all(below < at and leaves.branches[below].above == branch.depth for below in branch.branches)


def test_common_between_is_the_common_prefix() -> None:
    rng = np.random.default_rng(0)
    tree = PrefixTree.build(random_trajectories(rng, num_trajectories=25, vocab_size=3))
    leaves = Leaves.of(tree)
    of_leaf = {
        int(leaf): index
        for index, leaf in enumerate(leaves.leaf_of_B)
        if len(tree.trajectories[index]) == leaves.length_L[leaf]
    }
    for first in range(leaves.num_leaves):
        for second in range(first + 1, leaves.num_leaves):
            a, b = tree.rows_of(of_leaf[first]), tree.rows_of(of_leaf[second])
            shared = len(np.intersect1d(a, b))
            assert leaves.common_between(np.array([first]), np.array([second])).tolist() == [shared]
