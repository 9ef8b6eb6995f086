"""Keys of a path as pages: what they hold, and attention over them."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_law import DEVICE
from plain_attention import PlainKernel, check_paths, check_what_lies_behind, inputs_of

from harts.layout import PackedTree, pack
from harts.ops import attention
from harts.ops.attention.branches import plan_backward
from harts.ops.attention.calls import forward_calls, take
from harts.ops.attention.pages import key_pages
from harts.ops.attention.paths import attend_paths
from harts.ops.causal_conv1d.layout import conv_layout
from harts.ops.rows import RowIndex
from harts.testing.trees import AWKWARD, to_trajectories, tree_strategy
from harts.tree import PrefixTree


@pytest.mark.parametrize("page_rows", [1, 3, 16, 80, 1000])
@pytest.mark.parametrize("shape", AWKWARD)
def test_pages_hold_every_path(shape: str, page_rows: int) -> None:
    packed = pack(PrefixTree.build(AWKWARD[shape]))
    check_pages(packed, page_rows)


@given(
    tree=tree_strategy(max_trajectories=8, max_length=70),
    page_rows=st.integers(1, 40),
    key_cap=st.sampled_from([1, 50, 100_000]),
)
@settings(max_examples=30, deadline=None)
def test_pages_of_random_trees(tree: PrefixTree, page_rows: int, key_cap: int) -> None:
    packed = pack(tree, key_cap=key_cap)
    check_pages(packed, page_rows)
    check_paths(packed, page_rows)


def check_pages(packed: PackedTree, page_rows: int) -> None:
    """The pages of a chain are its path, as `forward_calls` gathers it, and each chain copies one page at most."""
    rows = torch.arange(packed.num_rows)
    paths = iter(
        torch.cat([take(rows, call.keys) for call in forward_calls(packed)]).split(packed.chains.length_C.tolist())
    )
    parts = key_pages(packed, page_rows)
    assert [part.queries.start for part in parts[1:]] == [part.queries.stop for part in parts[:-1]]
    for part in parts:
        paged = part.view(rows.view(-1, 1, 1).double()).flatten(1)
        for first_row, length in zip(part.first_row_CP.long(), part.key_length_C.tolist(), strict=True):
            used = -(-length // page_rows)
            assert torch.equal(paged[first_row[:used]].flatten()[:length].long(), next(paths))
            assert not first_row[used:].any()
        own = max(packed.key_cap, page_rows)  # a part's own tiles; and those of chains above its first one
        assert len(part.copied_X) <= own + int(packed.chains.length_C.max()) + page_rows
    assert next(paths, None) is None
    copied = sum(len(part.copied_X) for part in parts)
    assert len(parts) > 1 or copied <= page_rows * int((packed.chains.parent_C >= 0).sum())
    assert page_rows > 1 or copied == 0


def test_copied_pages_keep_to_the_cap() -> None:
    """Many short leaves behind branches of a stem: a copied page each, of which only few exist at a time."""
    rows = [[1] * 130 + [branch] * 100 + [leaf, leaf] for branch in (2, 3, 4) for leaf in range(10, 50)]
    packed = pack(PrefixTree.build(to_trajectories(np.random.default_rng(0), rows)), key_cap=1000, device=DEVICE)
    parts = key_pages(packed, 80)
    assert len(parts) > 5
    lengths = [len(part.copied_X) for part in parts]
    assert max(lengths) == 13 * 80  # 12 of its own chains, and a branch's, which an earlier part copied too
    check_pages(packed, 80)
    check_paths(packed, 80)


def test_a_layout_first_used_without_gradients_is_trained_later() -> None:
    with torch.inference_mode():
        packed = pack(PrefixTree.build(AWKWARD["star"]), device=DEVICE)
        attention(*inputs_of(packed), packed, scale=0.3)
        (call,), (pages,) = packed.layout(forward_calls), packed.layout(key_pages, 16)
        plan = packed.layout(plan_backward, True)
        conv = packed.layout(conv_layout, 4)
        made = [packed.row_of_N, packed.loss_mask_N, conv.ancestor_WT, packed.to(DEVICE).head_row_U, call.keys]
        made += [conv.across.row_P, RowIndex(packed.target_of_N, len(packed.token_M)).groups.order_K]
        made += [call.cu_keys_C1, pages.copied_X, pages.first_row_CP, plan.stages[0].calls[0].cu_keys_C1]
    assert not any(tensor.is_inference() for tensor in made)
    check_paths(packed, 16)


@pytest.mark.parametrize("shape", ["star", "lengths 63/64/65", "prefix of another", "forest", "duplicates", "comb"])
def test_attention_over_pages(shape: str) -> None:
    check_paths(pack(PrefixTree.build(AWKWARD[shape]), device=DEVICE), page_rows=16)


def test_what_lies_behind_a_path_is_never_seen() -> None:
    """Rows of other chains fill up the last page of a path; whatever is in them, outputs stay as they are."""
    packed = pack(PrefixTree.build(AWKWARD["star"]), device=DEVICE)
    check_what_lies_behind(packed, inputs_of(packed), lambda *x: attend_paths(*x, packed, 0.3, PlainKernel(16), False))
