"""Every registered mixer obeys its laws in fp64; nothing here names one."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from harts.layout import PackedTree, pack
from harts.mixers import MIXERS, Exchange, Mixer, Store
from harts.ops.kernels import Kernels
from harts.testing.trees import AWKWARD, tree_strategy
from harts.tree import PrefixTree

TOLERANCE = 1e-10
SHAPES = [name for name in AWKWARD if name != "caterpillar"]
every_mixer = pytest.mark.parametrize("kind", MIXERS, ids=lambda kind: kind.__name__)
Results = dict[str, Tensor]


def example(mixer: Mixer, rows: int) -> tuple[list[Tensor], list[Tensor]]:
    return mixer.example(rows, torch.Generator().manual_seed(1), torch.float64)


def loss_weights(out: Tensor) -> Tensor:
    return torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(2))


def named(out: Tensor, inputs: list[Tensor]) -> Results:
    return {"output": out.detach(), **{f"grad {i}": x.grad.clone() for i, x in enumerate(inputs) if x.grad is not None}}


def alone(mixer: Mixer, packed: PackedTree) -> Results:
    """Each trajectory by itself, from the definition; every token's output counts once a trajectory."""
    rows, shared = example(mixer, packed.num_rows)
    inputs = [x.requires_grad_() for x in (*rows, *shared)]
    parts = [mixer.linear(*(x[row_L] for x in rows), *shared) for row_L in packed.split(packed.row_of_N)]
    out_N = torch.cat(parts)
    (out_N * loss_weights(out_N)).sum().backward()
    return named(out_N, inputs)


def on_tree(mixer: Mixer, packed: PackedTree, broken: PackedTree | None = None) -> Results:
    rows, shared = example(mixer, packed.num_rows)
    inputs = [x.requires_grad_() for x in (*rows, *shared)]
    out_N = mixer.forward(broken or packed, Kernels(), None, *inputs)[packed.row_of_N]
    (out_N * loss_weights(out_N)).sum().backward()
    return named(out_N, inputs)


def in_pieces(mixer: Mixer, packed: PackedTree, starts: list[int]) -> Results:
    """A forward sweep over pieces without gradients, then a backward sweep in which each runs again."""
    pieces = packed.pieces(starts)
    store = Store(Exchange((mixer,), pieces))
    rows, shared = example(mixer, packed.num_rows)
    inputs = [x.requires_grad_() for x in (*rows, *shared)]

    def run(index: int) -> tuple[Tensor, object]:
        piece, context = pieces[index], store.context(index)
        own = slice(piece.start, piece.start + piece.num_rows)
        return mixer.forward(piece, Kernels(), context, *(x[own] for x in rows), *shared), context

    parts = []
    with torch.no_grad():
        for index in range(len(pieces)):
            part, context = run(index)
            store.keep(index, context)
            parts.append(part)
    out_T = torch.cat(parts).requires_grad_()
    out_N = out_T[packed.row_of_N]
    (out_N * loss_weights(out_N)).sum().backward()
    for index in reversed(range(len(pieces))):
        part, context = run(index)
        own = slice(pieces[index].start, pieces[index].start + pieces[index].num_rows)
        roots = [(part, out_T.grad[own]), *store.roots(index, context)]
        torch.autograd.backward(*zip(*roots, strict=True))
        store.collect(index, context)
    return named(out_N, inputs)


def difference(ours: Results, theirs: Results) -> float:
    """Largest difference over the largest magnitude, of outputs and of each gradient.

    A gradient that is zero but for rounding is compared with the largest one.
    """
    assert ours.keys() == theirs.keys()
    most = max(float(x.abs().max()) for x in theirs.values())
    worst = 0.0
    for name, x in ours.items():
        scale = max(float(theirs[name].abs().max()), 1e-3 * most)
        gap = float((x - theirs[name]).abs().max()) / scale
        worst = max(worst, gap if np.isfinite(gap) else np.inf)
    return worst


def random_starts(rows: int, seed: int) -> list[int]:
    rng = np.random.default_rng(seed)
    most = min(int(rng.integers(0, 6)), rows - 1)
    return [0, *sorted(int(row) for row in rng.choice(np.arange(1, rows), most, replace=False))] if most else [0]


@every_mixer
@pytest.mark.parametrize("shape", SHAPES)
def test_awkward_trees(kind: type[Mixer], shape: str) -> None:
    mixer, packed = kind.small(), pack(PrefixTree.build(AWKWARD[shape]), key_cap=700)
    truth = alone(mixer, packed)
    assert difference(on_tree(mixer, packed), truth) < TOLERANCE
    assert difference(in_pieces(mixer, packed, random_starts(packed.num_rows, 0)), truth) < TOLERANCE


@every_mixer
@given(tree=tree_strategy(max_trajectories=6, max_length=150), seed=st.integers(0, 99))
@settings(max_examples=10, deadline=None)
def test_random_trees_in_random_pieces(kind: type[Mixer], tree: PrefixTree, seed: int) -> None:
    mixer, packed = kind.small(), pack(tree, key_cap=300)
    truth = alone(mixer, packed)
    assert difference(on_tree(mixer, packed), truth) < TOLERANCE
    assert difference(in_pieces(mixer, packed, random_starts(packed.num_rows, seed)), truth) < TOLERANCE


@every_mixer
@pytest.mark.parametrize("rows", [1, 63, 64, 65])
def test_pieces_of_equal_size(kind: type[Mixer], rows: int) -> None:
    mixer, packed = kind.small(), pack(PrefixTree.build(AWKWARD["branches at 63/64/65 inside branches"][:3]))
    starts = list(range(0, packed.num_rows, rows))
    assert difference(in_pieces(mixer, packed, starts), on_tree(mixer, packed)) < TOLERANCE


@every_mixer
def test_buffers_that_hold_no_numbers_change_nothing(kind: type[Mixer]) -> None:
    """What an op allocates and does not write is never read."""
    mixer, packed = kind.small(), pack(PrefixTree.build(AWKWARD["lengths 63/64/65"]))
    starts = random_starts(packed.num_rows, 3)
    before = in_pieces(mixer, packed, starts)
    with FilledWithNan():
        after = in_pieces(mixer, packed, starts)
    assert difference(after, before) < 1e-12


class FilledWithNan:
    """Fresh memory holds NaN: what `torch.empty` gives with deterministic algorithms."""

    def __enter__(self) -> None:
        self.before = torch.are_deterministic_algorithms_enabled()
        torch.use_deterministic_algorithms(True)
        assert torch.utils.deterministic.fill_uninitialized_memory
        assert torch.empty(3).isnan().all()

    def __exit__(self, *_: object) -> None:
        torch.use_deterministic_algorithms(self.before)


# -- twins: the same laws, with the tree broken on purpose -------------------------------------------------------------


def branching() -> PackedTree:
    return pack(PrefixTree.build(AWKWARD["branches at 63/64/65 inside branches"]))


def other_parent(packed: PackedTree) -> PackedTree:
    """The same rows, but one chain continues another path: its parent is a row of the same depth elsewhere."""
    chains, tree = packed.chains, packed.tree
    for chain in range(chains.num_chains - 1, 0, -1):
        parent = int(chains.parent_row_C[chain])
        others = np.flatnonzero(tree.depth_T[: chains.start_C1[chain]] == tree.depth_T[parent])
        others = others[others != parent]
        if parent >= 0 and len(others):
            parent_row_C = chains.parent_row_C.copy()
            parent_row_C[chain] = others[0]
            return dataclasses.replace(packed, chains=dataclasses.replace(chains, parent_row_C=parent_row_C))
    raise AssertionError("the tree has no two rows of one depth")


def no_parent(packed: PackedTree) -> PackedTree:
    """The last chain starts anew, as a root would: from no state, with nothing above it."""
    chains = packed.chains
    parent_row_C, depth_C = chains.parent_row_C.copy(), chains.depth_C.copy()
    assert parent_row_C[-1] >= 0
    parent_row_C[-1], depth_C[-1] = -1, 0
    return dataclasses.replace(packed, chains=dataclasses.replace(chains, parent_row_C=parent_row_C, depth_C=depth_C))


@every_mixer
@pytest.mark.parametrize("breaks", [other_parent, no_parent], ids=["another's parent", "no parent"])
def test_laws_fail_on_a_broken_tree(kind: type[Mixer], breaks) -> None:
    mixer, packed = kind.small(), branching()
    assert difference(on_tree(mixer, packed, breaks(packed)), on_tree(mixer, packed)) > 1e-5


@every_mixer
def test_laws_fail_where_a_piece_takes_something_else(kind: type[Mixer]) -> None:
    mixer, packed = kind.small(), branching()
    starts = [0, packed.num_rows // 2]
    right, take = in_pieces(mixer, packed, starts), Store.context

    def wrong(self: Store, piece: int) -> object:
        context = take(self, piece)
        return dataclasses.replace(context, taken={name: x.detach() * 0.5 for name, x in context.taken.items()})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Store, "context", wrong)
        assert difference(in_pieces(mixer, packed, starts), right) > 1e-5


@every_mixer
def test_laws_fail_where_gradients_of_the_context_are_dropped(kind: type[Mixer]) -> None:
    mixer, packed = kind.small(), branching()
    starts = [0, packed.num_rows // 2]
    right = in_pieces(mixer, packed, starts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Store, "collect", lambda *_: None)
        assert difference(in_pieces(mixer, packed, starts), right) > 1e-5
