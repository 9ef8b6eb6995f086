"""Linear attention with every decay, with and without the delta rule: on trees, in pieces, and broken on purpose."""

import dataclasses
import importlib
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from law import law_errors, relative
from torch import Tensor

from harts.blocks import BLOCK
from harts.layout import PackedTree, pack
from harts.mixers.linear import linear_linear_attention
from harts.ops import linear_attention
from harts.ops.chains import levels
from harts.ops.linear_attention import LinearContext, linear_attention_and_states, linear_reads
from harts.testing.trees import AWKWARD, tree_strategy
from harts.tree import PrefixTree

TOLERANCE = 1e-11
HEADS, GROUPS, SIZE, VALUES = 2, 4, 6, 5
SHAPES = ["single token", "lengths 63/64/65", "prefix of another", "forest"]
"""All shapes run through the mixers that stand on the op, in tests/mixers."""


@dataclass(frozen=True)
class Kind:
    """Decays: shared by all rows "G", of each row "TG", of each row and key channel "TGK"."""

    decay: str
    delta: bool
    beta: bool

    def rows(self, count: int) -> list[Tensor]:
        """q, k, v, then g and beta where each row has its own."""
        inputs = [draw(count, HEADS, SIZE, seed=seed) / SIZE**0.5 for seed in (1, 2)]
        inputs.append(draw(count, GROUPS, VALUES, seed=3))
        if self.decay != "G":
            inputs.append(self.keep(count).log())
        if self.beta:
            inputs.append(draw(count, GROUPS, seed=4).sigmoid())
        return inputs

    def shared(self) -> list[Tensor]:
        return [self.keep(1).log()] if self.decay == "G" else []

    def keep(self, count: int) -> Tensor:
        """90-99.9 % of the state per token: with a short memory no test of state passing could fail."""
        shape = {"G": (GROUPS,), "TG": (count, GROUPS), "TGK": (count, GROUPS, SIZE)}[self.decay]
        random = torch.rand(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(9))
        return 1 - random * 0.099 - 1e-3

    def named(self, inputs: tuple[Tensor, ...]) -> list[Tensor | None]:
        """q, k, v, g, beta from `rows` and `shared` one after the other."""
        given = list(inputs)
        g = given.pop() if self.decay == "G" else given.pop(3)
        return [*given[:3], g, given[3] if self.beta else None]


KINDS = {
    "gated delta rule": Kind("TG", delta=True, beta=True),
    "kda": Kind("TGK", delta=True, beta=True),
    "ssd": Kind("TG", delta=False, beta=True),
    "lightning": Kind("G", delta=False, beta=False),
    "gated linear attention": Kind("TGK", delta=False, beta=False),
}
every_kind = pytest.mark.parametrize("name", KINDS)


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def errors(kind: Kind, packed: PackedTree, broken: PackedTree | None = None) -> dict[str, float]:
    return law_errors(
        lambda *x: linear_attention(*kind.named(x), broken or packed, delta=kind.delta),
        lambda *x: linear_linear_attention(*kind.named(x), delta=kind.delta),
        packed,
        kind.rows(packed.num_rows),
        kind.shared(),
    )


@every_kind
@pytest.mark.parametrize("shape", SHAPES)
def test_awkward_trees(name: str, shape: str) -> None:
    found = errors(KINDS[name], pack(PrefixTree.build(AWKWARD[shape])))
    assert max(found.values()) < TOLERANCE, found


@every_kind
@given(tree=tree_strategy(max_trajectories=6, max_length=150))
@settings(max_examples=8, deadline=None)
def test_random_trees(name: str, tree: PrefixTree) -> None:
    found = errors(KINDS[name], pack(tree))
    assert max(found.values()) < TOLERANCE, found


def in_pieces(kind: Kind, pieces: list[PackedTree], inputs: list[Tensor]) -> Tensor:
    """Each piece with what it reads from outside, taken from the whole inputs and from earlier pieces."""
    needed = {row for piece in pieces for row in linear_reads(piece).state_O.tolist()}
    _, k, v, g, beta = kind.named(tuple(inputs))
    states: dict[int, Tensor] = {}
    out = []
    for piece in pieces:
        reads = linear_reads(piece)
        given = k.new_zeros(0, GROUPS, VALUES, SIZE)
        if len(reads.state_O):
            given = torch.stack([states[row] for row in reads.state_O.tolist()])
        rows = reads.replayed_R
        context = LinearContext(
            k[rows], v[rows], None if kind.decay == "G" else g[rows], None if beta is None else beta[rows], given
        )
        own = slice(piece.start, piece.start + piece.num_rows)
        number = len(kind.rows(1))
        cut = kind.named(tuple(x[own] if index < number else x for index, x in enumerate(inputs)))
        wanted = tuple(sorted(row - piece.start for row in needed if 0 <= row - piece.start < piece.num_rows))
        result, ends = linear_attention_and_states(*cut, piece, delta=kind.delta, context=context, wanted=wanted)
        states |= {piece.start + row: state for row, state in zip(wanted, ends, strict=True)}
        out.append(result)
    return torch.cat(out)


@every_kind
@given(tree=tree_strategy(max_trajectories=6, max_length=150), seed=st.integers(0, 99))
@settings(max_examples=8, deadline=None)
def test_random_pieces_with_context(name: str, tree: PrefixTree, seed: int) -> None:
    kind, packed, rng = KINDS[name], pack(tree), np.random.default_rng(seed)
    most = min(int(rng.integers(0, 6)), packed.num_rows - 1)
    cuts = rng.choice(np.arange(1, packed.num_rows), most, replace=False).tolist() if most else []
    pieces = packed.pieces([0, *sorted(cuts)])
    inputs = [*kind.rows(packed.num_rows), *kind.shared()]
    results = []
    for run in (
        lambda *x: linear_attention(*kind.named(x), packed, delta=kind.delta),
        lambda *x: in_pieces(kind, pieces, list(x)),
    ):
        leaves = [x.clone().requires_grad_() for x in inputs]
        out = run(*leaves)
        results.append([out.detach(), *torch.autograd.grad(out, leaves, draw(*out.shape, seed=8))])
    for ours, theirs in zip(*results, strict=True):
        assert relative(ours, theirs) < 1e-11


@every_kind
def test_strong_decay_stays_finite_and_right(name: str) -> None:
    """Logarithms of many thousands: no factor may overflow, and what is left of the state is nothing."""
    kind, packed = KINDS[name], pack(PrefixTree.build(AWKWARD["lengths 63/64/65"]))
    inputs = [*kind.rows(packed.num_rows), *kind.shared()]
    at = len(inputs) - 1 if kind.decay == "G" else 3
    inputs[at] = inputs[at] * 1e5
    leaves = [x.clone().requires_grad_() for x in inputs]
    out = linear_attention(*kind.named(tuple(leaves)), packed, delta=kind.delta)
    grads = torch.autograd.grad(out.sum(), leaves)
    assert all(grad.isfinite().all() for grad in grads)
    q, k, v, _, beta = kind.named(tuple(inputs))
    scores = (q * k).sum(-1).repeat_interleave(GROUPS // HEADS, 1) * (1 if beta is None else beta)
    assert relative(out, scores.unsqueeze(-1) * v) < 1e-6


@every_kind
@pytest.mark.parametrize("most", [1, 3 * 64 * 64 * 8])
def test_heads_in_groups_give_the_same_and_keep_less(name: str, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    reference = importlib.import_module("harts.ops.linear_attention.reference")
    kind, packed = KINDS[name], pack(PrefixTree.build(AWKWARD["forest"]))
    inputs = [*kind.rows(packed.num_rows), *kind.shared()]
    kept: list[int] = []

    def keep(x: Tensor) -> Tensor:
        kept[-1] += x.numel()
        return x

    def run() -> list[Tensor]:
        kept.append(0)
        leaves = [x.clone().requires_grad_() for x in inputs]
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            out = linear_attention(*kind.named(tuple(leaves)), packed, delta=kind.delta)
        return [out.detach(), *torch.autograd.grad(out, leaves, draw(*out.shape, seed=8))]

    whole = run()
    monkeypatch.setattr(reference, "_MOST", most)
    calls: list[int] = []
    run_heads = reference._run_heads
    monkeypatch.setattr(reference, "_run_heads", lambda *x: calls.append(x[2].shape[1]) or run_heads(*x))
    for ours, theirs in zip(run(), whole, strict=True):
        assert relative(ours, theirs) < 1e-13
    assert sum(calls) == 2 * GROUPS  # forward, and again in the backward
    assert kept[1] < 0.5 * kept[0]


# -- twins: the same law, broken on purpose ------------------------------------------------------------------------


def branching() -> PackedTree:
    return pack(PrefixTree.build(AWKWARD["branches at 63/64/65 inside branches"][:4]))


def broken_levels(packed: PackedTree, parent_E: Tensor) -> PackedTree:
    broken = dataclasses.replace(packed)
    broken._layouts[levels, BLOCK, ()] = dataclasses.replace(packed.layout(levels, BLOCK, ()), parent_E=parent_E)
    return broken


@every_kind
def test_law_fails_with_a_zero_state_at_a_branch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reference = importlib.import_module("harts.ops.linear_attention.reference")
    packed = branching()
    cut = reference._recur

    def forgetful(u, w, k_end, end_decay, layout, states):
        starts, ends, written = cut(u, w, k_end, end_decay, layout, states)
        kept = torch.ones(len(starts), dtype=torch.bool)
        kept[-1] = False  # the last block of the last level
        return starts * kept[:, None, None, None], ends, written

    monkeypatch.setattr(reference, "_recur", forgetful)
    assert max(errors(KINDS[name], packed).values()) > 1e-4


@every_kind
def test_law_fails_with_the_state_of_another_parent(name: str) -> None:
    packed = branching()
    layout = packed.layout(levels, BLOCK, ())
    parent_E, first = layout.parent_E.clone(), 0
    for before, size in zip((1, *layout.level_sizes), layout.level_sizes, strict=False):
        parent_E[first : first + size] = (parent_E[first : first + size] + 1) % before
        first += size
    assert not torch.equal(parent_E, layout.parent_E)
    assert max(errors(KINDS[name], packed, broken_levels(packed, parent_E)).values()) > 1e-4


@every_kind
def test_law_fails_where_the_state_decays_behind_the_write(name: str) -> None:
    kind, packed = KINDS[name], branching()

    def late(*x: Tensor) -> Tensor:
        q, k, v, g, beta = kind.named(x)
        q, k = (each.repeat_interleave(GROUPS // HEADS, 1) for each in (q, k))
        keep = g.exp().expand(len(q), GROUPS)[..., None] if g.ndim < 3 else g.exp()
        state, out = v.new_zeros(GROUPS, SIZE, VALUES), []
        for row in range(len(q)):
            held = torch.einsum("gkv,gk->gv", state, k[row]) if kind.delta else 0
            strength = 1 if beta is None else beta[row, :, None]
            state = state + k[row, :, :, None] * (strength * (v[row] - held))[:, None]
            state = state * keep[row, :, :, None]
            out.append(torch.einsum("gkv,gk->gv", state, q[row]))
        return torch.stack(out)

    found = law_errors(
        lambda *x: linear_attention(*kind.named(x), packed, delta=kind.delta),
        late,
        packed,
        kind.rows(packed.num_rows),
        kind.shared(),
    )
    assert max(found.values()) > 1e-4


# -- bad input -----------------------------------------------------------------------------------------------------


def test_shapes_and_contexts_are_checked() -> None:
    packed = pack(PrefixTree.build(AWKWARD["star"]))
    rows = packed.num_rows
    q, v, g = draw(rows, 2, 6, seed=1), draw(rows, 4, 5, seed=2), -draw(rows, 4, seed=3).abs()
    with pytest.raises(ValueError, match="rows in all inputs"):
        linear_attention(q[1:], q[1:], v, g, None, packed, delta=True)
    with pytest.raises(ValueError, match=r"g of shape \[4\], \[\d+, 4\] or \[\d+, 4, 6\], got \[\d+, 2\]"):
        linear_attention(q, q, v, g[:, :2], None, packed, delta=True)
    with pytest.raises(ValueError, match="multiple of the 2 key heads"):
        linear_attention(q, q, v[:, :3], g[:, :3], None, packed, delta=False)
    with pytest.raises(ValueError, match="impl='triton' is not available; expected one of 'reference'"):
        linear_attention(q, q, v, g, None, packed, delta=False, impl="triton")
    piece = packed.pieces([0, 70])[1]
    own = slice(70, rows)
    with pytest.raises(ValueError, match="linear_attention: expected the context of 6 rows"):
        linear_attention(q[own], q[own], v[own], g[own], None, piece, delta=False)
