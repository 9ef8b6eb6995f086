"""The terminal tree: what is drawn, what is folded, what is said to be left out."""

import numpy as np
import pytest
from hypothesis import given, settings

from harts.formats import from_lists, read
from harts.formats.decoding import QwenDecoder
from harts.testing.trees import AWKWARD, tree_strategy
from harts.tree import PrefixTree
from harts.viz import draw_tree


def _tree(*rows: list[int]) -> PrefixTree:
    masks = [[0, *[1] * (len(row) - 1)] for row in rows]
    return PrefixTree.build(from_lists(list(rows), masks, id=[f"t{at}" for at in range(len(rows))]))


def test_a_small_tree() -> None:
    lines = [line.plain for line in draw_tree(_tree([1, 2, 3, 4], [1, 2, 5], [1, 2, 5], [1, 2, 5, 6]))]
    assert lines == [
        "2 x4 ▰▰▰▰▱▱▱▱ 1 2",
        "├─ 2 x3-1 ▰▰▰▰▰▰▰▰ 2 ends t1, t2 +1 5 6",
        "└─ 2 x1 ▰▰▰▰▰▰▰▰ t0 3 4",
    ]


def test_text_is_one_line_without_control_characters() -> None:
    rows = [{"messages": [{"role": "user", "content": "a\n\n\x1b[31mred\x07"}, {"role": "assistant", "content": "ok"}]}]
    (line,) = draw_tree(PrefixTree.build(read(rows)), decoder=QwenDecoder())
    assert "user a \ufffd[31mred\ufffd" in line.plain
    assert "\n" not in line.plain


def test_runs_are_folded_and_cuts_are_said() -> None:
    caterpillar = PrefixTree.build(AWKWARD["caterpillar"])
    lines = [line.plain for line in draw_tree(caterpillar, max_lines=10)]
    assert len(lines) == 11
    drawn = 10
    assert f"… {caterpillar.num_segments - drawn:,} more segments" in lines[-1]
    deep = [line.plain for line in draw_tree(caterpillar, max_lines=0)]
    assert "segments deeper" in deep[32]
    path = PrefixTree.build(AWKWARD["one-token segments"])
    (line,) = draw_tree(path)
    assert line.plain.startswith("99 x99-1 ")


@pytest.mark.parametrize("name", AWKWARD)
def test_every_awkward_tree_can_be_drawn(name: str) -> None:
    for line in draw_tree(PrefixTree.build(AWKWARD[name]), max_lines=0, width=60):
        assert line.cell_len <= 60 + 32 * 3


@settings(deadline=None, max_examples=40)
@given(tree_strategy(max_trajectories=6, max_length=30, vocab_size=3))
def test_drawn_tokens_are_the_trees(tree: PrefixTree) -> None:
    lines = [line.plain.lstrip("│├└─ ") for line in draw_tree(tree, max_lines=0)]
    if not any("deeper" in line for line in lines):
        assert sum(int(line.split(" ")[0].replace(",", "")) for line in lines) == tree.num_rows


def test_bad_sizes_are_refused() -> None:
    tree = _tree([1, 2])
    for sizes in ({"max_lines": -1}, {"width": 10}):
        with pytest.raises(ValueError, match="expected 0 or more"):
            draw_tree(tree, **sizes)


def test_multiplicities_of_siblings_fall() -> None:
    rng = np.random.default_rng(0)
    rows = [[1, int(kind), at] for at, kind in enumerate(rng.integers(2, 6, 40))]
    tops = [line.plain for line in draw_tree(_tree(*rows), max_lines=0)]
    counts = [int(line.split(" x")[1].split(" ")[0]) for line in tops if line.startswith(("├─", "└─"))]
    assert counts == sorted(counts, reverse=True)
