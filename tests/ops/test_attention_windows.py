"""Attention to the last rows of a path, with sinks and soft-capped scores: reference, and the calls of the kernels."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_law import assert_kernel_law, assert_same_bits
from kernel_law import draw as kernel_draw
from law import law_errors
from plain_attention import PlainKernel, inputs_of
from torch import Tensor

from harts.layout import PackedTree, pack
from harts.mixers.linear import linear_causal_attention
from harts.ops import attention
from harts.ops.attention import paths
from harts.ops.attention.branches import plan_backward
from harts.ops.attention.calls import Call, forward_calls
from harts.ops.attention.fa4 import has_fa4
from harts.ops.attention.paths import attend_paths
from harts.testing.trees import AWKWARD, to_trajectories, tree_strategy
from harts.tree import PrefixTree

TOLERANCE = 1e-11
SHAPES = [name for name in AWKWARD if name not in ("caterpillar", "comb")]
WINDOWS = [1, 63, 64, 65, 1000]
Op = Callable[..., Tensor]


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def qkv(rows: int) -> list[Tensor]:
    return [draw(rows, 4, 8, seed=1), draw(rows, 2, 8, seed=2), draw(rows, 2, 6, seed=3)]


def errors(
    op: Op, packed: PackedTree, window: int | None, *, sinks: bool = False, softcap: float | None = None
) -> dict[str, float]:
    """Of an op of q, k, v and sinks on the tree, against the definition on each trajectory."""
    shared = [draw(4, seed=4)] if sinks else []
    return law_errors(
        op,
        lambda *x: linear_causal_attention(*x, scale=0.3, window=window, softcap=softcap),
        packed,
        qkv(packed.num_rows),
        shared,
    )


def reference(packed: PackedTree, window: int | None, softcap: float | None = None) -> Op:
    def op(q: Tensor, k: Tensor, v: Tensor, sinks_H: Tensor | None = None) -> Tensor:
        return attention(q, k, v, packed, scale=0.3, window=window, softcap=softcap, sinks_H=sinks_H)

    return op


def by_calls(packed: PackedTree, window: int | None, page_rows: int | None = None, key_tile: int = 1) -> Op:
    """Calls, pages and sums of the flash kernels, around a kernel from the definition."""
    kernel = PlainKernel(page_rows, leaves_gaps=page_rows is not None, key_tile=key_tile)

    def op(q: Tensor, k: Tensor, v: Tensor, sinks_H: Tensor | None = None) -> Tensor:
        return attend_paths(q, k, v, packed, 0.3, kernel, False, window=window, sinks_H=sinks_H)

    return op


def in_pieces(
    pieces: list[PackedTree], window: int | None, kernel: PlainKernel | None = None, softcap: float | None = None
) -> Op:
    def op(q: Tensor, k: Tensor, v: Tensor, sinks_H: Tensor | None = None) -> Tensor:
        out = []
        for piece in pieces:
            own = [x[piece.start : piece.start + piece.num_rows] for x in (q, k, v)]
            context = (k[piece.outside_D], v[piece.outside_D])
            if kernel is None:
                options = {"window": window, "softcap": softcap, "sinks_H": sinks_H}
                out.append(attention(*own, piece, scale=0.3, context=context, **options))
            else:
                out.append(attend_paths(*own, piece, 0.3, kernel, False, context, window=window, sinks_H=sinks_H))
        return torch.cat(out)

    return op


def cut(packed: PackedTree, seed: int) -> list[PackedTree]:
    rng = np.random.default_rng(seed)
    most = min(int(rng.integers(0, 6)), packed.num_rows - 1)
    cuts = rng.choice(np.arange(1, packed.num_rows), most, replace=False) if most else []
    return packed.pieces([0, *sorted(int(row) for row in cuts)])


def branching(key_cap: int | None = None) -> PackedTree:
    return pack(PrefixTree.build(AWKWARD["branches at 63/64/65 inside branches"]), key_cap=key_cap)


# -- laws ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("shape", SHAPES)
def test_awkward_trees(shape: str, window: int) -> None:
    packed = pack(PrefixTree.build(AWKWARD[shape]), key_cap=700)
    for op in (reference(packed, window), by_calls(packed, window), by_calls(packed, window, page_rows=16)):
        found = errors(op, packed, window, sinks=True)
        assert max(found.values()) < TOLERANCE, found


@given(
    tree=tree_strategy(max_trajectories=6, max_length=150),
    window=st.one_of(st.none(), st.integers(1, 160)),
    sinks=st.booleans(),
    softcap=st.sampled_from([None, 0.7]),
    seed=st.integers(0, 99),
)
@settings(max_examples=25, deadline=None)
def test_random_trees_whole_and_in_random_pieces(
    tree: PrefixTree, window: int | None, sinks: bool, softcap: float | None, seed: int
) -> None:
    packed = pack(tree, key_cap=300)
    pieces = cut(packed, seed)
    ops = [reference(packed, window, softcap), in_pieces(pieces, window, softcap=softcap)]
    if softcap is None:
        ops.append(by_calls(packed, window, key_tile=16))
        ops.append(by_calls(packed, window, page_rows=16))
        ops.append(in_pieces(pieces, window, PlainKernel(None, key_tile=16)))
        ops.append(in_pieces(pieces, window, PlainKernel(16, leaves_gaps=True)))
    for op in ops:
        found = errors(op, packed, window, sinks=sinks, softcap=softcap)
        assert max(found.values()) < TOLERANCE, found


def test_a_window_that_ends_at_a_branch() -> None:
    """Rows below a branch whose window starts right at it, one row above it, and one row below."""
    stem = list(range(1, 41))
    rows = [[*stem, *range(first, first + 30)] for first in (100, 200)]
    packed = pack(PrefixTree.build(to_trajectories(np.random.default_rng(0), rows)))
    for window in (9, 10, 11, 29, 30, 31):
        for op in (reference(packed, window), by_calls(packed, window), in_pieces(packed.pieces([0, 40, 70]), window)):
            found = errors(op, packed, window, sinks=True)
            assert max(found.values()) < TOLERANCE, found


def test_long_chains_in_tiles() -> None:
    row = [value % 50 for value in range(700)]
    branch = [*row[:300], *(value + 50 for value in row[300:])]
    packed = pack(PrefixTree.build(to_trajectories(np.random.default_rng(0), [row, branch])))
    for window in (100, 550):
        found = errors(reference(packed, window), packed, window)
        assert max(found.values()) < TOLERANCE, found


def test_log_sum_exps_with_sinks() -> None:
    packed, window = branching(), 65
    q, k, v = qkv(packed.num_rows)
    sinks = draw(4, seed=4)
    results = paths._forward(q, (k,), (v,), packed, 0.3, PlainKernel(16), window)
    _, lse_HT = paths._with_sinks(*results, sinks_H=sinks)
    for row_L in packed.split(packed.row_of_N):
        scores = torch.einsum("qhd,khd->hqk", q[row_L], k[row_L].repeat_interleave(2, 1)) * 0.3
        back = torch.arange(len(row_L))[:, None] - torch.arange(len(row_L))
        scores = scores.masked_fill((back < 0) | (back >= window), -torch.inf)
        with_sinks = torch.cat([scores, sinks[:, None, None].expand(-1, len(row_L), 1)], -1)
        assert torch.allclose(lse_HT[:, row_L], with_sinks.logsumexp(-1), rtol=0, atol=1e-12)


# -- what is read ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key_cap", [1, 40, 100_000])
@pytest.mark.parametrize("window", [1, 9, 64])
def test_the_backward_covers_every_visible_pair_once_and_gathers_less_than_a_window_above_a_chain(
    window: int, key_cap: int
) -> None:
    packed = branching(key_cap)
    pairs = keys = 0
    for stage in plan_backward(packed, window=window).stages:
        for call in stage.calls:
            assert call.window == window
            pairs += _pairs(call)
            for queries, seen in zip(call.query_lengths, call.key_lengths, strict=True):
                assert seen <= queries + window - 1
                keys += seen
    assert pairs == int((packed.position_T + 1).clamp_max(window).sum())
    assert keys == sum(call.num_keys for call in forward_calls(packed, window))


def _pairs(call: Call) -> int:
    total = 0
    for queries, keys in zip(call.query_lengths, call.key_lengths, strict=True):
        depth = torch.arange(keys - queries, keys)
        total += int((depth + 1).clamp_max(call.window or keys).sum())
    return total


def test_whole_tiles_of_keys_are_left_out_counted_from_the_root() -> None:
    """So a kernel meets the keys that a row sees in the same tiles as on the whole path."""
    packed, window, tile = branching(), 30, 16
    whole = [length for call in forward_calls(packed) for length in call.key_lengths]
    lengths = [length for call in forward_calls(packed, window, tile) for length in call.key_lengths]
    for all_keys, keys, own in zip(whole, lengths, packed.chains.rows_C.tolist(), strict=True):
        assert (all_keys - keys) % tile == 0
        assert all_keys - keys == max(all_keys - own + 1 - window, 0) // tile * tile
    assert sum(lengths) < sum(whole)


@pytest.mark.parametrize("options", [{"softcap": 0.7}, {"sinks_H": draw(4, seed=4)}], ids=["softcap", "sinks"])
def test_scores_are_not_kept_for_the_backward(options: dict[str, Any]) -> None:
    packed = pack(PrefixTree.build(to_trajectories(np.random.default_rng(0), [list(range(700))])))
    kept: list[int] = []

    def pack_hook(x: Tensor) -> Tensor:
        kept.append(x.numel())
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack_hook, lambda x: x):
        out = attention(*(x.requires_grad_() for x in qkv(700)), packed, scale=0.3, **options)
    assert max(kept) <= 4 * 700 * 8  # queries; of the scores of 4 heads there are 50 times as many
    out.sum().backward()


@pytest.mark.parametrize("softcap", [None, 5.0])
def test_scores_in_bf16_are_as_exact_as_sdpa(softcap: float | None) -> None:
    """Against fp64: no further off than attention without sinks and caps, which PyTorch accumulates in fp32."""
    packed = branching()
    exact = [x.bfloat16().double() for x in qkv(packed.num_rows)]
    sinks_H = draw(4, seed=4).bfloat16()

    def error(**options: Any) -> float:
        low = {name: x.bfloat16() if isinstance(x, Tensor) else x for name, x in options.items()}
        ours = attention(*(x.bfloat16() for x in exact), packed, scale=0.3, **low)
        return float((ours - attention(*exact, packed, scale=0.3, **options)).norm() / exact[2].norm())

    assert error(sinks_H=sinks_H.double(), softcap=softcap) < 1.1 * error()


# -- twins: what must fail ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("off", [-1, 1])
@pytest.mark.parametrize("window", [7, 64])
def test_law_fails_with_a_window_of_another_length(window: int, off: int) -> None:
    packed = branching()
    for make in (reference, by_calls):
        assert max(errors(make(packed, window + off), packed, window).values()) > 1e-4


def test_law_fails_with_a_window_in_row_order() -> None:
    """The last rows of the layout in place of the last rows of the path."""
    packed, broken, window = branching(), branching(), 20
    for call in broken.layout(forward_calls, window):
        assert isinstance(call.keys, Tensor)
        call.keys[-call.key_lengths[-1] :] = torch.arange(packed.num_rows - call.key_lengths[-1], packed.num_rows)
    last = int(packed.chains.parent_row_C[-1])
    assert last != packed.num_rows - int(packed.chains.rows_C[-1]) - 1  # the row before is another path's
    found = errors(reference(broken, window), packed, window)
    assert max(found.values()) > 1e-4


def test_law_fails_without_the_gradient_of_the_sink(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = branching()
    monkeypatch.setattr(paths, "_sink_gradient", lambda sinks_H, *_: torch.zeros_like(sinks_H))
    found = errors(by_calls(packed, 20), packed, 20, sinks=True)
    assert found.pop("grad 3") > 1e-4
    assert max(found.values()) < TOLERANCE


def test_law_fails_where_the_backward_takes_log_sum_exps_without_sinks(monkeypatch: pytest.MonkeyPatch) -> None:
    packed, with_sinks = branching(), paths._with_sinks

    def forgotten(out: Tensor, *lses: Tensor, sinks_H: Tensor) -> tuple[Tensor, Tensor]:
        return with_sinks(out, *lses, sinks_H=sinks_H)[0], torch.cat(lses, 1)

    monkeypatch.setattr(paths, "_with_sinks", forgotten)
    found = errors(by_calls(packed, 20), packed, 20, sinks=True)
    assert found.pop("output") < TOLERANCE
    assert min(found.values()) > 1e-4


def test_law_fails_where_the_backward_has_no_window() -> None:
    packed, broken = branching(), branching()
    broken._layouts[plan_backward, False, 20] = plan_backward(packed)
    found = errors(by_calls(broken, 20), packed, 20)
    assert found.pop("output") < TOLERANCE
    assert min(found.values()) > 1e-4


# -- on a GPU --------------------------------------------------------------------------------------------------------

FLASH = [
    pytest.param("varlen"),
    pytest.param("fa4", marks=pytest.mark.skipif(not has_fa4(), reason="needs flash-attn-4")),
]
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("window", [1, 64, 65, 1000])
@pytest.mark.parametrize("impl", FLASH)
def test_flash_kernels_with_windows_and_sinks(impl: str, window: int, size: int) -> None:
    """What has to pass before `harts.models.kernel_choice` may take these kernels for such models."""
    for shape in ("comb", "star", "lengths 63/64/65", "branches at 63/64/65 inside branches"):
        packed = pack(PrefixTree.build(AWKWARD[shape]), key_cap=700, device="cuda")
        inputs = [*inputs_of(packed, size=size, heads=8), kernel_draw(8, seed=4)]
        ops = [
            lambda q, k, v, sinks, impl=impl, packed=packed: attention(
                q, k, v, packed, scale=0.1, impl=impl, deterministic=True, window=window, sinks_H=sinks
            )
            for impl in (impl, "reference")
        ]
        assert_kernel_law(*ops, inputs, torch.bfloat16)
        assert_same_bits(ops[0], inputs, torch.bfloat16)


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("window", [64, 100])
@pytest.mark.parametrize("impl", FLASH)
def test_bits_with_windows_equal_those_of_separate_rows(impl: str, window: int) -> None:
    outputs = []
    for share in ("tree", "none"):
        tree = PrefixTree.build(AWKWARD["branches at 63/64/65 inside branches"], share=share)
        packed = pack(tree, key_cap=1500, device="cuda")
        place = packed.position_T * 64 + packed.token_ids_T  # inputs: functions of the token and its depth
        tables = [kernel_draw(400 * 64, heads, 128, seed=heads).bfloat16() for heads in (16, 4, 2)]
        q, k, v = tables[0][place], tables[1][place], tables[2][place].repeat_interleave(2, 1)
        outputs.append(attention(q, k, v, packed, scale=0.06, impl=impl, window=window)[packed.row_of_N])
    assert torch.equal(outputs[0], outputs[1])


# -- bad input ---------------------------------------------------------------------------------------------------------


def test_options_are_checked() -> None:
    packed = branching()
    q, k, v = qkv(packed.num_rows)
    for window in (0, -3, 2.0, True):
        with pytest.raises(ValueError, match=r"attention: window: expected a number of rows of at least 1 or None"):
            attention(q, k, v, packed, scale=1.0, window=window)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"attention: softcap: expected a number above 0 or None, got 0\.0"):
        attention(q, k, v, packed, scale=1.0, softcap=0.0)
    with pytest.raises(ValueError, match=r"one score for each of 4 query heads, got \[2\]"):
        attention(q, k, v, packed, scale=1.0, sinks_H=draw(2, seed=1))
    for impl in ("varlen", "fa4"):
        with pytest.raises(ValueError, match=r"not soft-capped, got softcap=2\.0; choose impl='reference'"):
            attention(q, k, v, packed, scale=1.0, softcap=2.0, impl=impl)


def test_a_layout_without_a_window_is_the_one_it_was() -> None:
    packed = branching()
    attention(*qkv(packed.num_rows), packed, scale=0.3)
    assert list(packed._layouts) == [(forward_calls,)]
    whole, limited = forward_calls(packed)[0], forward_calls(packed, 10)[0]
    assert (whole.window, limited.window) == (None, 10)
    assert dataclasses.replace(limited, window=None).causal
