"""Chains and blocks: least nesting against all decompositions, chains contiguous, counts against a naive block trie."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings

from harts.blocks import BLOCK, Blocks
from harts.chains import row_order
from harts.cost import count
from harts.testing.trees import AWKWARD, caterpillar, random_trajectories, to_trajectories, tree_strategy
from harts.tree import PrefixTree

Block = tuple[int, ...]


def naive_blocks(tree: PrefixTree) -> dict[Block, Block | None]:
    """Blocks as token prefixes (which end with the block), each with the block above it."""
    paths = [tuple(trajectory.token_ids.tolist()) for trajectory in tree.trajectories]
    cut = {path[: first + BLOCK] for path in paths for first in range(0, len(path), BLOCK)}

    def is_contained(one: Block) -> bool:  # a partial block, when a longer one of the same depths continues it
        if len(one) % BLOCK == 0:
            return False
        same = (other for other in cut if (len(other) - 1) // BLOCK == (len(one) - 1) // BLOCK)
        return any(other != one and other[: len(one)] == one for other in same)

    blocks = {one for one in cut if not is_contained(one)}
    return {one: one[: (len(one) - 1) // BLOCK * BLOCK] or None for one in blocks}


def least_nesting(parents: dict[Block, Block | None]) -> int:
    """Tries every decomposition into chains: each block goes on in any one of its children, or in none."""
    children: dict[Block | None, list[Block]] = {}
    for block, parent in parents.items():
        children.setdefault(parent, []).append(block)
    inner = [block for block in parents if block in children]
    best = len(parents)
    for choice in product(*[[None, *children[block]] for block in inner]):
        goes_on = dict(zip(inner, choice, strict=True))
        depth_of: dict[Block, int] = {}
        for block in sorted(parents, key=len):
            above = parents[block]
            if above is None:
                depth_of[block] = 1
            else:
                depth_of[block] = depth_of[above] + (goes_on[above] != block)
        best = min(best, max(depth_of.values()))
    return best


def random_block_tree(rng: np.random.Generator, blocks: int) -> PrefixTree:
    """A tree whose block tree has at most so many blocks; tokens of a block are alike, partial blocks occur."""
    paths: list[np.ndarray] = []
    for name in range(blocks):
        above = paths[rng.integers(len(paths))] if paths and rng.random() < 0.9 else np.zeros(0, np.int64)
        above = above[: len(above) // BLOCK * BLOCK]
        length = BLOCK if rng.random() < 0.8 else int(rng.integers(1, BLOCK))
        paths.append(np.concatenate([above, np.full(length, name)]))
    return PrefixTree.build(to_trajectories(rng, paths))


def test_chains_nest_least_of_all_decompositions() -> None:
    rng = np.random.default_rng(0)
    seen = set()
    for _ in range(150):
        tree = random_block_tree(rng, int(rng.integers(1, 10)))
        nesting = Blocks.of_tree(tree).nesting
        assert nesting == least_nesting(naive_blocks(tree))
        seen.add(nesting)
    assert {1, 2, 3} <= seen


def check_layout(tree: PrefixTree, blocks: Blocks) -> None:
    """Row order, chains and sources fit together; nothing is taken from the implementation but its arrays."""
    ordered = tree.reordered(row_order(tree))
    assert (ordered.token_ids_T[ordered.row_of_N] == tree.token_ids_T[tree.row_of_N]).all()
    assert (ordered.depth_T[ordered.row_of_N] == tree.depth_T[tree.row_of_N]).all()
    assert sorted(set(ordered.row_of_N.tolist())) == list(range(tree.num_rows))
    chains, parent_T, depth_T = blocks.chains, ordered.parent_T, ordered.depth_T
    assert (chains.parent_T == parent_T).all()
    for chain in range(chains.num_chains):
        first, stop = chains.start_C1[chain], chains.start_C1[chain + 1]
        assert parent_T[first] == chains.parent_row_C[chain]
        assert (parent_T[first + 1 : stop] == np.arange(first, stop - 1)).all()  # contiguous
        assert depth_T[first] == chains.depth_C[chain]
        assert depth_T[stop - 1] + 1 == chains.length_C[chain]
        number = blocks.first_block_C1[chain + 1] - blocks.first_block_C1[chain]
        assert number == -(-(chains.length_C[chain] - blocks.top_C[chain]) // BLOCK)
        source = blocks.source_C[chain]
        assert not blocks.is_outside_C[chain]
        if blocks.top_C[chain] == 0:
            assert source == -1
            assert blocks.nesting_C[chain] == 0
            continue
        assert blocks.nesting_C[chain] == blocks.nesting_C[source] + 1
        # The source chain holds the row above the chain's first block, at the end of the block it starts from.
        row = first
        while depth_T[row] >= blocks.top_C[chain]:
            row = parent_T[row]
        assert chains.start_C1[source] <= row < chains.start_C1[source + 1]
        inside = blocks.source_block_C[chain] - blocks.first_block_C1[source]
        assert blocks.top_C[source] + (inside + 1) * BLOCK == depth_T[row] + 1


def check_counts(tree: PrefixTree, blocks: Blocks) -> None:
    naive = naive_blocks(tree)
    rows = sum((len(block) - 1) % BLOCK + 1 for block in naive)
    assert blocks.num_blocks == len(naive)
    assert blocks.replayed_rows == count(tree).replayed_rows == rows - tree.num_rows
    leaves = set(naive) - set(naive.values())
    assert blocks.chains.num_chains == len(leaves)
    assert blocks.chains.length_C.sum() == sum(map(len, leaves))
    assert blocks.longest_path == max(-(-len(block) // BLOCK) for block in naive)


@settings(deadline=None, max_examples=80)
@given(tree_strategy(max_trajectories=9, max_length=260, vocab_size=2))
def test_layout_of_random_trees(tree: PrefixTree) -> None:
    blocks = Blocks.of_tree(tree)
    check_layout(tree, blocks)
    check_counts(tree, blocks)


def test_layout_of_many_random_trees() -> None:
    rng = np.random.default_rng(0)
    nestings = set()
    for _ in range(60):
        tree = PrefixTree.build(random_trajectories(rng, num_trajectories=15, max_length=400, vocab_size=9))
        blocks = Blocks.of_tree(tree)
        check_layout(tree, blocks)
        check_counts(tree, blocks)
        nestings.add(blocks.nesting)
    assert {2, 3} <= nestings


@pytest.mark.parametrize("name", [name for name in AWKWARD if name != "caterpillar"])
def test_layout_of_awkward_trees(name: str) -> None:
    tree = PrefixTree.build(AWKWARD[name])
    blocks = Blocks.of_tree(tree)
    check_layout(tree, blocks)
    check_counts(tree, blocks)


def test_caterpillar_of_a_thousand_turns_nests_two_deep() -> None:
    tree = PrefixTree.build(AWKWARD["caterpillar"])
    blocks = Blocks.of_tree(tree)
    check_layout(tree, blocks)
    assert blocks.nesting == 2
    long = PrefixTree.build(to_trajectories(np.random.default_rng(0), caterpillar(1000, spine=64, leg=70)))
    assert Blocks.of_tree(long).nesting == 2


@pytest.mark.parametrize(("length", "blocks", "last"), [(63, 1, 63), (64, 1, 64), (65, 2, 1), (128, 2, 64)])
def test_a_path_is_one_chain(length: int, blocks: int, last: int) -> None:
    rng = np.random.default_rng(0)
    tree = PrefixTree.build(to_trajectories(rng, [rng.integers(0, 9, length)]))
    built = Blocks.of_tree(tree)
    assert (built.chains.num_chains, built.num_blocks, built.nesting, built.replayed_rows) == (1, blocks, 1, 0)
    assert (built.chains.length_C[0] - 1) % BLOCK + 1 == last


@pytest.mark.parametrize(("shared", "replayed"), [(63, 63), (64, 0), (65, 1), (127, 63), (128, 0)])
def test_a_branch_replays_its_block_up_to_the_branch(shared: int, replayed: int) -> None:
    rng = np.random.default_rng(0)
    stem = rng.integers(0, 9, shared)
    tree = PrefixTree.build(to_trajectories(rng, [[*stem, 10, 11, 12], [*stem, 20, 21]]))
    blocks = Blocks.of_tree(tree)
    assert blocks.replayed_rows == replayed
    assert blocks.nesting == (2 if shared >= BLOCK else 1)  # within the first block both are roots


def test_complete_binary_tree_nests_once_a_level() -> None:
    rng = np.random.default_rng(0)
    levels = 5
    words = [list(f"{leaf:0{levels}b}") for leaf in range(2**levels)]
    rows = [np.concatenate([np.zeros(BLOCK), *[np.full(BLOCK, int(bit)) for bit in word]]) for word in words]
    blocks = Blocks.of_tree(PrefixTree.build(to_trajectories(rng, [row.astype(np.int64) for row in rows])))
    assert blocks.nesting == levels + 1
