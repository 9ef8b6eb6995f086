"""The Triton gated delta rule against the reference op in fp64, and bit for bit against itself on separate rows.

Without a GPU the kernels run in Triton's interpreter, with small heads and fp32 inputs. Shape suffixes: T rows, H key
heads, G value heads, K, V head sizes.
"""

import dataclasses

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from kernel_law import DEVICE, assert_kernel_law, draw, run
from torch import Tensor

from harts.blocks import BLOCK, Blocks
from harts.layout import PackedTree, pack
from harts.ops import gated_delta_rule
from harts.ops.chains import Schedule, backward_order, forward_order, schedule
from harts.ops.gated_delta_rule import triton as ours
from harts.ops.gated_delta_rule.blockwise import tile_offset
from harts.testing.trees import AWKWARD, random_trajectories, tree_strategy
from harts.testing.workloads import workload
from harts.trajectory import Trajectory
from harts.tree import PrefixTree

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
interpreter = pytest.mark.skipif(torch.cuda.is_available(), reason="fp32 and small heads are for the interpreter")
# A single token has no gradient of g, which leaves nothing to compare an error with: it has a test of its own.
SHAPES = [name for name in AWKWARD if name not in ("caterpillar", "single token")]
SIZE = 16


def make_inputs(rows: int, heads: int = 1, groups: int = 1, size: int = SIZE) -> list[Tensor]:
    """A token keeps 90 to 99.9 % of the state: with a short memory no test of state passing could fail."""
    generator = torch.Generator().manual_seed(9)
    decay = 1 - torch.rand(rows, groups, generator=generator) * 0.099 - 1e-3
    return [
        *(draw(rows, heads, size, seed=1), draw(rows, heads, size, seed=2), draw(rows, groups, size, seed=3)),
        *(decay.log().bfloat16().float().to(DEVICE), draw(rows, groups, seed=4).sigmoid().bfloat16().float()),
    ]


def on_tree(packed: PackedTree, impl: str = "triton"):
    def op(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        wide = torch.promote_types(g.dtype, torch.float32)
        return gated_delta_rule(q, k, v, g.to(wide), beta, packed, impl=impl)

    return op


def check(packed: PackedTree, **sizes: int) -> None:
    assert_kernel_law(on_tree(packed), on_tree(packed, "reference"), make_inputs(packed.num_rows, **sizes))


def pack_tree(trajectories: list[Trajectory], share: str = "tree") -> PackedTree:
    return pack(PrefixTree.build(trajectories, share=share), device=DEVICE)  # type: ignore[arg-type]


def small() -> list[Trajectory]:
    """Branches on branches, at blocks' ends and inside them, in 210 rows; chains nest three deep."""
    rng = np.random.default_rng(0)
    stem, branch = rng.integers(10, 40, 64), rng.integers(10, 40, 63)
    rows = [[*stem, first, *branch, second, 7, 8] for first in (1, 2) for second in (3, 4)]
    rows += [[*stem[:63], 5], [*stem, 1, *branch[:10], 6, 6], [*stem, 1, *branch, 3, 7, 9]]
    mask = [[i > 0 for i in range(len(row))] for row in rows]
    return [Trajectory(token_ids=row, loss_mask=m) for row, m in zip(rows, mask, strict=True)]


# -- the laws ----------------------------------------------------------------------------------------------------------


@interpreter
@pytest.mark.parametrize("shape", SHAPES)
def test_awkward_trees(shape: str) -> None:
    check(pack_tree(AWKWARD[shape]))


@interpreter
def test_single_token() -> None:
    packed = pack_tree(AWKWARD["single token"])
    q, k, v, g, beta = make_inputs(1)
    assert_kernel_law(
        lambda *x: on_tree(packed)(*x[:3], g, x[3]),
        lambda *x: on_tree(packed, "reference")(*x[:3], g.to(x[0]), x[3]),
        [q, k, v, beta],
    )
    assert run(on_tree(packed), [q, k, v, g, beta], torch.float32)[4].abs().max() < 1e-6


@interpreter
@pytest.mark.parametrize("seed", range(2))
def test_random_trees(seed: int) -> None:
    check(pack_tree(random_trajectories(np.random.default_rng(seed), num_trajectories=6, max_length=150)))


@interpreter
def test_three_value_heads_a_key_head_and_values_of_another_size() -> None:
    packed = pack_tree([small()[index] for index in (0, 1, 5)])
    blocks = Blocks.of(packed.chains)
    assert blocks.nesting == 2
    assert blocks.replayed_rows > 0
    q, k, _, g, beta = make_inputs(packed.num_rows, heads=2, groups=6)
    v = draw(packed.num_rows, 6, 2 * SIZE, seed=7)
    assert_kernel_law(on_tree(packed), on_tree(packed, "reference"), [q, k, v, g, beta])


@interpreter
def test_recomputation_and_another_run_give_the_same_bits() -> None:
    packed = pack_tree(small())
    assert Blocks.of(packed.chains).nesting == 3
    inputs = make_inputs(packed.num_rows)

    def op(**options: bool):
        return run(lambda *x: ours.gated_delta_rule_triton(*x, packed, **options)[0], inputs, torch.float32)

    first = op()
    for other in (op(), op(recompute=True)):
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


@interpreter
def test_rows_of_wider_tensors() -> None:
    """q, k and v as views of one tensor, as a model's projection gives them."""
    packed = pack_tree(small())
    wide = draw(packed.num_rows, 3, 4 * SIZE, seed=5)
    _, _, _, g, beta = make_inputs(packed.num_rows, groups=2)

    def op(impl: str):
        def split(x: Tensor) -> Tensor:
            q, k, v = x.flatten(1)[:, : 4 * SIZE].split([SIZE, SIZE, 2 * SIZE], dim=1)
            q, k, v = (part.unflatten(1, (-1, SIZE)) for part in (q, k, v))
            return on_tree(packed, impl)(q, k, v, g.to(x), beta.to(x))

        return split

    assert_kernel_law(op("triton"), op("reference"), [wide])


# -- twins: the same law, broken on purpose ----------------------------------------------------------------------------


@interpreter
@pytest.mark.parametrize(
    "broken",
    [
        lambda s: {"source_C": torch.full_like(s.source_C, -1)},
        lambda s: {"source_C": torch.where(s.source_C > 0, s.source_C - 1, s.source_C)},
        lambda s: {"row_S": s.own_row_S},
        lambda s: {"row_D": s.row_D[:-1], "copies_D1": s.copies_D1[:-1]},
    ],
    ids=["no initial state", "another's state", "no replay", "a copy forgotten"],
)
def test_law_fails_when_broken(broken) -> None:
    packed = pack_tree(small())
    right = packed.layout(schedule, BLOCK, ())
    packed._layouts[schedule, BLOCK, ()] = dataclasses.replace(right, **broken(right))
    with pytest.raises(AssertionError, match="error"):
        check(packed)


# -- schedule ----------------------------------------------------------------------------------------------------------


@given(tree=tree_strategy())
@settings(max_examples=60, deadline=None)
def test_schedule(tree: PrefixTree) -> None:
    packed = pack(tree)
    blocks, slots = Blocks.of(packed.chains), schedule(packed, BLOCK)
    own_S, row_S, target_S = (x.numpy() for x in (slots.own_row_S, slots.row_S, slots.target_S))
    assert sorted(own_S[own_S >= 0].tolist()) == list(range(tree.num_rows))
    assert (row_S[own_S >= 0] == own_S[own_S >= 0]).all()
    assert (row_S >= 0).sum() == tree.num_rows + blocks.replayed_rows
    assert ((target_S >= 0) == (row_S >= 0)).all()
    targets = target_S[target_S >= 0]
    assert len(set(targets.tolist())) == len(targets)
    assert targets.max() < tree.num_rows + slots.num_copies
    check_copies(slots, tree.num_rows)
    for chain in range(packed.chains.num_chains):
        boundary = int(slots.source_C[chain])
        if boundary >= 0:
            assert int(slots.boundary_E[int(blocks.source_block_C[chain])]) == boundary
            begin, end = slots.children_J1[boundary : boundary + 2].tolist()
            assert chain in slots.child_L[begin:end].tolist()
        else:
            assert blocks.source_block_C[chain] == -1


def check_copies(slots: Schedule, num_rows: int) -> None:
    """Every row is its only slot's target, or the sum of its slots' targets."""
    row_of_target = {int(t): int(r) for t, r in zip(slots.target_S, slots.row_S, strict=True) if t >= 0}
    starts = slots.copies_D1.tolist()
    for row, begin, end in zip(slots.row_D.tolist(), starts[:-1], starts[1:], strict=True):
        assert end - begin > 1
        assert {row_of_target.pop(num_rows + copy) for copy in range(begin, end)} == {row}
    assert all(target == row for target, row in row_of_target.items())


@given(tree=tree_strategy())
@settings(max_examples=60, deadline=None)
def test_a_program_waits_for_earlier_tickets_only(tree: PrefixTree) -> None:
    blocks = Blocks.of_tree(tree)
    for lanes in (1, 3):
        order = forward_order(blocks, lanes)
        place = np.argsort(order)
        assert sorted(order.tolist()) == list(range(blocks.chains.num_chains))
        assert all(place[source] < place[c] for c, source in enumerate(blocks.source_C) if source >= 0)
    place = np.argsort(backward_order(blocks))
    assert all(place[source] > place[c] for c, source in enumerate(blocks.source_C) if source >= 0)


@triton.jit
def _offset_kernel(index_ptr, out_ptr, SIZE: tl.constexpr):
    tl.store(out_ptr, tile_offset(tl.load(index_ptr), SIZE))


def test_offsets_beyond_32_bits() -> None:
    """A state tile of a block and head of 64 thousand rows and more: 2^17 blocks and heads of 2^14 elements."""
    index = torch.tensor([2**20], dtype=torch.int32, device=DEVICE)
    out = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    _offset_kernel[(1,)](index, out, SIZE=128 * 128)
    assert out.item() == 2**34


# -- bad input ---------------------------------------------------------------------------------------------------------


@interpreter
def test_unsupported_inputs_are_refused() -> None:
    packed = pack_tree(AWKWARD["single token"])
    q, k, v, g, beta = make_inputs(1)

    def refused(match: str, *inputs: Tensor) -> None:
        with pytest.raises(ValueError, match=match):
            gated_delta_rule(*inputs, packed, impl="triton")

    refused("of one dtype", q.half(), k.half(), v.half(), g, beta)
    refused("of one dtype", q, k.bfloat16(), v, g, beta)
    refused("g in float32", q, k, v, g.bfloat16(), beta)
    refused("head size K", draw(1, 1, 48, seed=1), draw(1, 1, 48, seed=1), v, g, beta)
    refused("head size V", q, k, draw(1, 1, 256, seed=1), g, beta)
    refused("contiguous heads", q, k, draw(1, SIZE, 2, seed=1)[..., :1].transpose(1, 2), g, beta)


# -- on a GPU ----------------------------------------------------------------------------------------------------------


def outputs_and_gradients(packed: PackedTree, inputs: list[Tensor], do: Tensor, impl: str) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = on_tree(packed, impl)(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, do.to(out.dtype))]


def against_separate_rows(trajectories: list[Trajectory], low: torch.dtype, **sizes: int) -> None:
    """Tree and separate rows in a low precision: the same bits out, and gradients equally far from the truth.

    The gradient of a row's output is given to its first copy alone, so that both have the same sum exactly; and the
    gradients of the copies are added up in fp64.
    """
    tree, rows = pack_tree(trajectories), pack_tree(trajectories, share="none")
    row_of_T = torch.empty(rows.num_rows, dtype=torch.int64)
    row_of_T[rows.row_of_N.cpu()] = tree.row_of_N.cpu()
    first_T = torch.zeros(rows.num_rows, dtype=torch.bool)
    first_T[np.unique(row_of_T.numpy(), return_index=True)[1]] = True
    row_of_T, first_T = row_of_T.to(DEVICE), first_T.to(DEVICE)
    inputs = [x.to(low) for x in make_inputs(tree.num_rows, **sizes)]
    do = torch.randn(inputs[2].shape, generator=torch.Generator(DEVICE).manual_seed(8), device=DEVICE).to(low)

    on_branches = outputs_and_gradients(tree, inputs, do, "triton")
    again = outputs_and_gradients(tree, inputs, do, "triton")
    assert [torch.equal(a, b) for a, b in zip(on_branches, again, strict=True)] == [True] * 6, "two runs differ"
    do_rows = torch.where(first_T[:, None, None], do[row_of_T], 0)
    out, *grads = outputs_and_gradients(rows, [x[row_of_T] for x in inputs], do_rows, "triton")
    assert torch.equal(out, on_branches[0][row_of_T]), "outputs differ from those of separate rows"
    separate = [on_branches[0].double()]
    for grad in grads:
        total = torch.zeros(tree.num_rows, *grad.shape[1:], dtype=torch.float64, device=DEVICE)
        separate.append(total.index_add_(0, row_of_T, grad.double()))
    truth = outputs_and_gradients(tree, [x.double() for x in inputs], do, "reference")
    for index, (a, b, c) in enumerate(zip(on_branches, separate, truth, strict=True)):
        error, other = float((a.double() - c).norm() / c.norm()), float((b - c).norm() / c.norm())
        assert error <= 1.25 * other, f"tensor {index}: error {error:.2e}, on separate rows {other:.2e}"
        assert error <= 2 * torch.finfo(low).eps, f"tensor {index}: error {error:.2e}"


@interpreter
def test_bits_and_gradients_of_separate_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ours, "DTYPES", (torch.float16,))  # the interpreter cannot multiply bfloat16
    against_separate_rows(small(), torch.float16)


@gpu
@pytest.mark.gpu
@pytest.mark.parametrize(("name", "scale"), [("star3", 0.2), ("think", 0.05), ("swe", 0.05)])
def test_large_trees_in_bf16(name: str, scale: float) -> None:
    against_separate_rows(workload(name, scale=scale), torch.bfloat16, heads=16, groups=32, size=128)


@gpu
@pytest.mark.gpu
def test_no_further_from_the_truth_than_fla() -> None:
    fla = pytest.importorskip("fla.ops.gated_delta_rule")
    packed = pack_tree(workload("flat", scale=0.3)[:1])
    inputs = make_inputs(packed.num_rows, heads=16, groups=32, size=128)
    ends = torch.tensor([0, packed.num_rows], dtype=torch.int32, device=DEVICE)

    def linear(*x: Tensor) -> Tensor:
        q, k, v, g, beta = (part.unsqueeze(0) for part in x)
        options = {"use_qk_l2norm_in_kernel": True, "cu_seqlens": ends}
        return fla.chunk_gated_delta_rule(q, k, v, g.float(), beta, **options)[0][0]

    truth = run(on_tree(packed, "reference"), inputs, torch.float64)
    mine, theirs = run(on_tree(packed), inputs, torch.bfloat16), run(linear, inputs, torch.bfloat16)
    for a, b, c in zip(mine, theirs, truth, strict=True):
        assert (a - c).norm() <= 1.25 * (b - c).norm()


@gpu
@pytest.mark.gpu
def test_more_than_2_to_the_31_elements() -> None:
    """The last of 140 rows of 2,048 tokens gives the same bits as alone; its states lie behind 2^31 elements."""
    rows = [np.random.default_rng(seed).integers(0, 9, 2048) for seed in range(140)]
    trajectories = [Trajectory(token_ids=row, loss_mask=np.arange(2048) > 0) for row in rows]
    packed, alone = pack_tree(trajectories, share="none"), pack_tree(trajectories[-1:])
    assert Blocks.of(packed.chains).num_blocks * 32 * 128 * 128 > 2**31
    last = slice(packed.num_rows - 2048, None)
    inputs = [x.bfloat16() if x.dim() == 3 else x for x in make_inputs(packed.num_rows, 16, 32, 128)]
    leaves = [x.requires_grad_() for x in inputs]
    out = gated_delta_rule(*leaves, packed, impl="triton")
    grads = torch.autograd.grad(out[last].float().sum(), leaves)
    single = [x[last].detach().requires_grad_() for x in inputs]
    expected = gated_delta_rule(*single, alone, impl="triton")
    assert torch.equal(out[last], expected)
    for grad, other in zip(grads, torch.autograd.grad(expected.float().sum(), single), strict=True):
        assert torch.equal(grad[last], other)
