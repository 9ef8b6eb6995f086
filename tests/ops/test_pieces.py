"""A tree in pieces, with what each piece reads from outside handed in, equals the tree in one piece."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from law import relative
from plain_attention import PlainKernel, share_much
from torch import Tensor

from harts.layout import PackedTree, pack
from harts.ops import attention, causal_conv1d, gated_delta_rule, row_logprobs
from harts.ops.attention.paths import attend_paths
from harts.ops.causal_conv1d.layout import outside_rows
from harts.ops.gated_delta_rule import gated_delta_rule_and_states
from harts.ops.linear_attention import LinearContext, linear_reads
from harts.testing.trees import AWKWARD, tree_strategy
from harts.tree import PrefixTree

Op = Callable[..., Tensor]
SHAPES = [name for name in AWKWARD if name not in ("caterpillar", "single token")]


def draw(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def own(x: Tensor, piece: PackedTree) -> Tensor:
    return x[piece.start : piece.start + piece.num_rows]


def attention_in_pieces(pieces: list[PackedTree], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out = []
    for piece in pieces:
        context = (k[piece.outside_D], v[piece.outside_D])
        out.append(attention(*(own(x, piece) for x in (q, k, v)), piece, scale=0.3, context=context))
    return torch.cat(out)


def flash_in_pieces(page_rows: int | None, pieces: list[PackedTree], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Through calls, pages and sums of the flash kernels."""
    out, kernel = [], PlainKernel(page_rows, leaves_gaps=page_rows is not None)
    for piece in pieces:
        context = (k[piece.outside_D], v[piece.outside_D])
        out.append(attend_paths(*(own(x, piece) for x in (q, k, v)), piece, 0.3, kernel, False, context))
    return torch.cat(out)


def conv_in_pieces(impl: str, pieces: list[PackedTree], x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.cat(
        [
            causal_conv1d(own(x, piece), weight, bias, piece, impl=impl, context_AD=x[outside_rows(piece, 4)])
            for piece in pieces
        ]
    )


def delta_in_pieces(impl: str, pieces: list[PackedTree], *inputs: Tensor) -> Tensor:
    needed = {row for piece in pieces for row in linear_reads(piece).state_O.tolist()}
    states: dict[int, Tensor] = {}
    out = []
    for piece in pieces:
        reads = linear_reads(piece)
        groups, key_size, value_size = inputs[2].shape[1], inputs[0].shape[2], inputs[2].shape[2]
        given = inputs[0].new_zeros(0, groups, value_size, key_size)
        if len(reads.state_O):
            given = torch.stack([states[row] for row in reads.state_O.tolist()])
        context = LinearContext(*(x[reads.replayed_R] for x in inputs[1:]), given)
        wanted = tuple(sorted(row - piece.start for row in needed if 0 <= row - piece.start < piece.num_rows))
        result, ends = gated_delta_rule_and_states(
            *(own(x, piece) for x in inputs), piece, impl=impl, context=context, wanted=wanted
        )
        states |= {piece.start + row: state for row, state in zip(wanted, ends, strict=True)}
        out.append(result)
    return torch.cat(out)


def delta_inputs(rows: int, dtype: torch.dtype, size: int, value_size: int) -> list[Tensor]:
    """Keeps 90-99.9 % of the state per token: with a short memory no test of state passing could fail."""
    decay = 1 - torch.rand(rows, 2, dtype=dtype, generator=torch.Generator().manual_seed(9)) * 0.099 - 1e-3
    q, k = (draw(rows, 1, size, seed=seed, dtype=dtype) for seed in (1, 2))
    return [
        q,
        k,
        draw(rows, 2, value_size, seed=3, dtype=dtype),
        decay.log(),
        draw(rows, 2, seed=4).sigmoid().to(dtype),
    ]


def run(op: Op, inputs: list[Tensor]) -> list[Tensor]:
    leaves = [x.clone().requires_grad_() for x in inputs]
    out = op(*leaves)
    weights = draw(*out.shape, seed=8, dtype=out.dtype)
    return [out.detach(), *torch.autograd.grad(out, leaves, weights)]


def check(whole: Op, parts: Op, inputs: list[Tensor], tolerance: float) -> None:
    for index, (ours, theirs) in enumerate(zip(run(parts, inputs), run(whole, inputs), strict=True)):
        assert relative(ours, theirs) < tolerance, index


def check_reference(packed: PackedTree, pieces: list[PackedTree]) -> None:
    rows = packed.num_rows
    qkv = [draw(rows, heads, 8, seed=heads) for heads in (4, 2, 2)]
    check(lambda *x: attention(*x, packed, scale=0.3), lambda *x: attention_in_pieces(pieces, *x), qkv, 1e-11)
    conv = [draw(rows, 5, seed=1), draw(5, 4, seed=2), draw(5, seed=3)]
    check(lambda *x: causal_conv1d(*x, packed), lambda *x: conv_in_pieces("reference", pieces, *x), conv, 1e-11)
    delta = delta_inputs(rows, torch.float64, 6, 5)
    check(lambda *x: gated_delta_rule(*x, packed), lambda *x: delta_in_pieces("reference", pieces, *x), delta, 1e-11)


def cut(packed: PackedTree, rng: np.random.Generator, most: int = 6) -> list[PackedTree]:
    rows = packed.num_rows
    cuts = rng.choice(np.arange(1, rows), min(int(rng.integers(0, most)), rows - 1), replace=False) if rows > 1 else []
    return packed.pieces([0, *sorted(int(row) for row in cuts)])


@given(tree=tree_strategy(max_trajectories=6, max_length=150), seed=st.integers(0, 99))
@settings(max_examples=15, deadline=None)
def test_random_trees_in_random_pieces(tree: PrefixTree, seed: int) -> None:
    packed = pack(tree, key_cap=300)
    check_reference(packed, cut(packed, np.random.default_rng(seed)))


@pytest.mark.parametrize("shape", SHAPES)
def test_awkward_trees_in_pieces(shape: str) -> None:
    packed = pack(PrefixTree.build(AWKWARD[shape]))
    check_reference(packed, cut(packed, np.random.default_rng(0)))


@pytest.mark.parametrize("rows", [1, 63, 64, 65])
def test_pieces_of_equal_size(rows: int) -> None:
    packed = pack(PrefixTree.build(AWKWARD["branches at 63/64/65 inside branches"][:3]))
    check_reference(packed, packed.pieces(range(0, packed.num_rows, rows)))


@pytest.mark.skipif(torch.cuda.is_available(), reason="fp32 and small heads are for the interpreter")
@pytest.mark.parametrize("shape", ["lengths 63/64/65", "prefix of another", "forest"])
def test_kernels_in_pieces(shape: str) -> None:
    packed = pack(PrefixTree.build(AWKWARD[shape]))
    pieces = cut(packed, np.random.default_rng(2))
    rows, low = packed.num_rows, torch.float32
    conv = [draw(rows, 5, seed=1, dtype=low), draw(5, 4, seed=2, dtype=low), draw(5, seed=3, dtype=low)]
    check(
        lambda *x: causal_conv1d(*x, packed, impl="triton"), lambda *x: conv_in_pieces("triton", pieces, *x), conv, 1e-5
    )
    delta = delta_inputs(rows, low, 16, 16)
    whole = run(lambda *x: gated_delta_rule(*x, packed, impl="triton"), delta)
    parts = run(lambda *x: delta_in_pieces("triton", pieces, *x), delta)
    assert torch.equal(whole[0], parts[0])  # in every bit
    for ours, theirs in zip(parts, whole, strict=True):
        assert relative(ours, theirs) < 1e-4


@pytest.mark.parametrize("page_rows", [None, 16])
def test_calls_and_pages_in_pieces(page_rows: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    share_much(monkeypatch, 0.3)
    packed = pack(PrefixTree.build(AWKWARD["branches at 63/64/65 inside branches"]))
    qkv = [draw(packed.num_rows, heads, 8, seed=heads) for heads in (4, 2, 2)]
    for seed in range(3):
        pieces = cut(packed, np.random.default_rng(seed))
        check(
            lambda *x: attention(*x, packed, scale=0.3),
            lambda *x, pieces=pieces: flash_in_pieces(page_rows, pieces, *x),
            qkv,
            1e-11,
        )


def test_a_target_belongs_to_the_piece_that_predicts_it() -> None:
    packed = pack(PrefixTree.build(AWKWARD["star"]))
    hidden, weight = draw(packed.num_rows, 7, seed=1), draw(64, 7, seed=2)
    whole, _ = row_logprobs(hidden, weight, packed)
    total_M, seen_M = torch.zeros(len(packed.token_M)).double(), torch.zeros(len(packed.token_M))
    row_M = packed.head_row_U[packed.head_of_M]
    for piece in cut(packed, np.random.default_rng(0)):
        part_M, _ = row_logprobs(own(hidden, piece), weight, piece)
        here_M = (row_M >= piece.start) & (row_M < piece.start + piece.num_rows)
        assert torch.equal(piece.token_M, packed.token_M[here_M])
        total_M[here_M] = part_M
        seen_M += here_M
    assert (seen_M == 1).all()
    # a product's last bit depends on its number of rows on some processors
    torch.testing.assert_close(total_M, whole, rtol=0, atol=1e-12)


def test_a_missing_or_wrong_context_is_refused() -> None:
    packed = pack(PrefixTree.build(AWKWARD["star"]))
    piece = packed.pieces([0, 70])[1]
    x = draw(piece.num_rows, 2, 4, seed=1)
    with pytest.raises(ValueError, match="attention: expected the context of 70 rows"):
        attention(x, x, x, piece, scale=1.0)
    with pytest.raises(ValueError, match="expected a context of 70 values from outside this piece of a tree, got 3"):
        attention(x, x, x, piece, scale=1.0, context=(draw(70, 2, 4, seed=1), draw(3, 2, 4, seed=1)))
    with pytest.raises(ValueError, match="causal_conv1d: expected the context of 3 rows"):
        causal_conv1d(x[:, 0], draw(4, 4, seed=1), None, piece)
    with pytest.raises(ValueError, match="gated_delta_rule: expected the context of 6 rows"):
        gated_delta_rule(x, x, x, x[..., 0], x[..., 0], piece)
    with pytest.raises(ValueError, match="expected ascending rows"):
        packed.pieces([0, 5, 5])
    with pytest.raises(ValueError, match="expected a whole tree"):
        piece.pieces([0])
