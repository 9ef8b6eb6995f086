"""What attention with a window reads of the rows outside a piece."""

import importlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_mixer_laws import difference, in_pieces, on_tree, random_starts

from harts.layout import PackedTree, pack
from harts.mixers import SlidingAttention
from harts.mixers import attention as module
from harts.ops.attention.context import window_reads
from harts.testing.trees import AWKWARD, tree_strategy
from harts.tree import PrefixTree


def seen_one_by_one(piece: PackedTree, window: int) -> list[int]:
    """Rows of the tree outside a piece that its rows see, by walking up from each."""
    parent_T, seen = piece.tree.parent_T, set()
    for row in range(piece.start, piece.start + piece.num_rows):
        for _ in range(window):
            if row < piece.start:
                seen.add(row)
            row = int(parent_T[row])
            if row < 0:
                break
    return sorted(seen)


@given(tree=tree_strategy(max_trajectories=6, max_length=120), seed=st.integers(0, 99), window=st.integers(1, 130))
@settings(max_examples=30, deadline=None)
def test_a_piece_reads_what_its_rows_see_and_no_more(tree: PrefixTree, seed: int, window: int) -> None:
    packed = pack(tree)
    for piece in packed.pieces(random_starts(packed.num_rows, seed)):
        read = SlidingAttention(scale=1.0, window=window).outside(piece)
        assert read["keys"].tolist() == read["values"].tolist() == seen_one_by_one(piece, window)


@pytest.mark.parametrize("window", [1, 63, 64, 65, 1000])
def test_windows_at_block_boundaries_and_longer_than_every_path(window: int) -> None:
    packed = pack(PrefixTree.build(AWKWARD["branches at 63/64/65 inside branches"]))
    mixer = SlidingAttention(scale=0.3, window=window)
    for seed in range(3):
        assert (
            difference(in_pieces(mixer, packed, random_starts(packed.num_rows, seed)), on_tree(mixer, packed)) < 1e-10
        )


@pytest.mark.parametrize("lost", [0, -1], ids=["first", "last"])
def test_law_fails_where_a_row_of_the_window_is_not_read(lost: int, monkeypatch: pytest.MonkeyPatch) -> None:
    packed, mixer = pack(PrefixTree.build(AWKWARD["path"])), SlidingAttention(scale=0.3, window=20)
    starts = [0, packed.num_rows // 2]
    right = in_pieces(mixer, packed, starts)

    def fewer(piece: PackedTree, window: int) -> np.ndarray:
        return np.delete(window_reads(piece, window), [lost] if piece.num_outside else [])

    monkeypatch.setattr(module, "window_reads", fewer)
    monkeypatch.setattr(importlib.import_module("harts.ops.attention.context"), "window_reads", fewer)
    assert difference(in_pieces(mixer, pack(PrefixTree.build(AWKWARD["path"])), starts), right) > 1e-5
