"""Every reference op obeys the equality law in fp64, and the law fails when something is broken on purpose."""

import dataclasses
import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from law import law_errors, magnitude, relative
from torch import Tensor

from harts.blocks import BLOCK, Blocks
from harts.layout import PackedTree, pack
from harts.mixers.linear import linear_causal_attention, linear_causal_conv1d, linear_gated_delta_rule
from harts.ops import attention, causal_conv1d, gated_delta_rule, row_logprobs
from harts.ops.attention.calls import forward_calls
from harts.ops.causal_conv1d.layout import ConvLayout, conv_layout
from harts.ops.chains import levels
from harts.testing.trees import AWKWARD, tree_strategy
from harts.trajectory import Trajectory
from harts.tree import PrefixTree

TOLERANCE = 1e-11
# The caterpillar has half a million tokens: checked on the model level and, here, through a shorter one in the comb.
SHAPES = [name for name in AWKWARD if name != "caterpillar"]


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def delta_rule_inputs(rows: int) -> list[Tensor]:
    """Keeps 90-99.9 % of the state per token: with a short memory no test of state passing could fail."""
    decay = 1 - torch.rand(rows, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(9)) * 0.099 - 1e-3
    return [
        *(draw(rows, 2, 6, seed=1), draw(rows, 2, 6, seed=2), draw(rows, 4, 5, seed=3)),
        *(decay.log(), draw(rows, 4, seed=4).sigmoid()),
    ]


def delta_rule_errors(packed: PackedTree, broken: PackedTree | None = None) -> dict[str, float]:
    return law_errors(
        lambda *x: gated_delta_rule(*x, broken or packed),
        linear_gated_delta_rule,
        packed,
        delta_rule_inputs(packed.num_rows),
    )


def conv_errors(packed: PackedTree, broken: PackedTree | None = None) -> dict[str, float]:
    return law_errors(
        lambda x, weight, bias: causal_conv1d(x, weight, bias, broken or packed),
        linear_causal_conv1d,
        packed,
        [draw(packed.num_rows, 5, seed=1)],
        [draw(5, 4, seed=2), draw(5, seed=3)],
    )


def attention_errors(packed: PackedTree, broken: PackedTree | None = None) -> dict[str, float]:
    return law_errors(
        lambda *x: attention(*x, broken or packed, scale=0.3),
        lambda *x: linear_causal_attention(*x, scale=0.3),
        packed,
        [
            draw(packed.num_rows, 4, 8, seed=1),
            draw(packed.num_rows, 2, 8, seed=2),
            draw(packed.num_rows, 2, 8, seed=3),
        ],
    )


OPS = {"gated_delta_rule": delta_rule_errors, "causal_conv1d": conv_errors, "attention": attention_errors}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("op", OPS)
def test_awkward_trees(op: str, shape: str) -> None:
    packed = pack(PrefixTree.build(AWKWARD[shape]), key_cap=700)
    errors = OPS[op](packed)
    assert max(errors.values()) < TOLERANCE, errors


@pytest.mark.parametrize("op", OPS)
@given(tree=tree_strategy(max_trajectories=6, max_length=150))
@settings(max_examples=12, deadline=None)
def test_random_trees(op: str, tree: PrefixTree) -> None:
    errors = OPS[op](pack(tree, key_cap=300))
    assert max(errors.values()) < TOLERANCE, errors


@pytest.mark.parametrize("share", ["prefix", "none"])
@pytest.mark.parametrize("op", OPS)
def test_baselines_run_through_the_same_ops(op: str, share: str) -> None:
    errors = OPS[op](pack(PrefixTree.build(AWKWARD["lengths 63/64/65"], share=share)))
    assert max(errors.values()) < TOLERANCE, errors


def test_attention_runs_long_chains_in_tiles() -> None:
    row = torch.arange(1700).numpy() % 50
    mask = row > 0
    mask[0] = False
    branch = row.copy()
    branch[300:] += 50
    packed = pack(PrefixTree.build([Trajectory(token_ids=ids, loss_mask=mask) for ids in (row, branch)]))
    errors = attention_errors(packed)
    assert max(errors.values()) < TOLERANCE, errors


@pytest.mark.parametrize(("size", "holds"), [(1e-16, True), (1e-6, False)])
def test_a_gradient_that_is_zero_but_for_rounding_is_measured_by_the_ops_magnitude(size: float, holds: bool) -> None:
    """The query of a token that sees itself alone has none; machines differ in the rounding, put in by hand here."""
    packed = pack(PrefixTree.build(AWKWARD["single token"]))
    inputs = [draw(packed.num_rows, heads, 8, seed=heads) for heads in (4, 2, 2)]
    errors = law_errors(
        lambda q, k, v: attention(q, k, v, packed, scale=0.3) + size * (q - q.detach()),
        lambda *x: linear_causal_attention(*x, scale=0.3),
        packed,
        inputs,
    )
    assert (errors["grad 0"] < TOLERANCE) is holds, errors


# -- twins: the same law, broken on purpose ------------------------------------------------------------------------


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


@pytest.mark.parametrize("op", OPS)
def test_law_fails_when_a_branch_has_the_wrong_parent(op: str) -> None:
    packed = branching()
    assert max(OPS[op](packed, other_parent(packed)).values()) > 1e-6


def broken_levels(packed: PackedTree, **changes: Tensor) -> PackedTree:
    broken = dataclasses.replace(packed)
    broken._layouts[levels, BLOCK, ()] = dataclasses.replace(packed.layout(levels, BLOCK, ()), **changes)
    return broken


def test_law_fails_without_the_right_initial_state() -> None:
    packed = branching()
    broken = broken_levels(packed, parent_E=torch.zeros_like(packed.layout(levels, BLOCK, ()).parent_E))
    assert max(delta_rule_errors(packed, broken).values()) > 1e-4


def test_law_fails_without_replayed_rows() -> None:
    packed = branching()
    layout = packed.layout(levels, BLOCK, ())
    flat = layout.row_EK.flatten()
    owned = torch.zeros_like(flat, dtype=torch.bool)
    owned[layout.slot_T] = True
    rows = torch.where(owned, flat, packed.num_rows).view_as(layout.row_EK)
    assert Blocks.of(packed.chains).replayed_rows > 0
    assert max(delta_rule_errors(packed, broken_levels(packed, row_EK=rows)).values()) > 1e-4


def test_law_fails_with_row_order_for_ancestors() -> None:
    packed = branching()
    rows = torch.arange(packed.num_rows)
    before = torch.stack([torch.where(rows >= n, rows - n, packed.num_rows) for n in (1, 2, 3)])
    broken = dataclasses.replace(packed)
    broken._layouts[conv_layout, 4] = ConvLayout(before, 0)
    assert max(conv_errors(packed, broken).values()) > 1e-4


def test_law_fails_when_a_chain_sees_another_path() -> None:
    packed, broken = branching(), branching()
    (call,) = broken.layout(forward_calls)
    assert isinstance(call.keys, Tensor)
    call.keys[-1 - call.query_lengths[-1]] = 0
    assert max(attention_errors(packed, broken).values()) > 1e-6


# -- log-probs -----------------------------------------------------------------------------------------------------


def with_temperatures(name: str) -> list[Trajectory]:
    """Siblings sampled at different temperatures share the rows that predict them."""
    return [
        dataclasses.replace(trajectory, temperature=(0.7, 1.0)[index % 2])
        for index, trajectory in enumerate(AWKWARD[name])
    ]


@pytest.mark.parametrize("impl", ["chunked", "reference"])
@pytest.mark.parametrize("shape", ["star", "duplicates", "prefix of another", "one-token branches", "empty response"])
def test_logprobs_and_entropies_equal_those_of_each_trajectory(shape: str, impl: str) -> None:
    trajectories = with_temperatures(shape)
    packed = pack(PrefixTree.build(trajectories))
    hidden, weight, bias = draw(packed.num_rows, 7, seed=1), draw(64, 7, seed=2), draw(64, seed=3)
    inputs = [x.clone().requires_grad_() for x in (hidden, weight, bias)]
    logprobs_M, entropy_M = row_logprobs(
        inputs[0], inputs[1], packed, bias_V=inputs[2], entropy=True, chunk_rows=5, impl=impl
    )
    assert entropy_M is not None
    mask_N = packed.loss_mask_N
    ours = torch.stack([logprobs_M, entropy_M])[:, packed.target_of_N[mask_N]]

    expected_inputs = [x.clone().requires_grad_() for x in (hidden, weight, bias)]
    parts = []
    for trajectory, row_L in zip(trajectories, packed.split(packed.row_of_N), strict=True):
        logits = expected_inputs[0][row_L[:-1]] @ expected_inputs[1].mT + expected_inputs[2]
        logp = (logits / trajectory.temperature).log_softmax(-1)
        token = torch.tensor(trajectory.token_ids[1:], dtype=torch.int64)
        both = torch.stack([logp.gather(1, token[:, None]).squeeze(1), -(logp.exp() * logp).sum(-1)])
        parts.append(both[:, torch.tensor(trajectory.loss_mask[1:])])
    expected = torch.cat(parts, dim=1)
    assert relative(ours, expected) < TOLERANCE
    weights = draw(*expected.shape, seed=5)
    terms = float((expected * weights).detach().abs().sum(0).max())
    for grad, expected_grad, x in zip(
        torch.autograd.grad((ours * weights).sum(), inputs),
        torch.autograd.grad((expected * weights).sum(), expected_inputs),
        inputs,
        strict=True,
    ):
        assert relative(grad, expected_grad, least=magnitude(terms, x)) < TOLERANCE


def test_one_head_row_per_distinct_row_and_temperature() -> None:
    mask = [0, 0, 1, 1]
    rows = [([1, 2, 3, 4], 1.0), ([1, 2, 5, 6], 1.0), ([1, 2, 3, 7], 0.7), ([1, 2, 3, 4], 1.0)]
    trajectories = [Trajectory(token_ids=ids, loss_mask=mask, temperature=t) for ids, t in rows]
    packed = pack(PrefixTree.build(trajectories))
    # parents of trained tokens: (2, 1.0) for 3 and 5, (2, 0.7) for 3, (3, 1.0) for 4, (3, 0.7) for 7, (5, 1.0) for 6
    assert len(packed.head_row_U) == 5
    assert len(packed.token_M) == 6
    assert packed.target_of_N[2] == packed.target_of_N[14]


def test_a_temperature_for_each_trajectory_takes_no_memory_for_every_pair() -> None:
    ids = np.random.default_rng(0).integers(0, 1000, (300, 40))
    rows = [
        Trajectory(token_ids=np.append(7, row), loss_mask=np.arange(41) > 0, temperature=0.5 + 0.001 * index)
        for index, row in enumerate(ids)
    ]
    tree = PrefixTree.build(rows)
    tracemalloc.start()
    packed = pack(tree)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1000 * tree.num_rows  # bytes; 300 temperatures times rows would take 5,200
    assert len(packed.head_row_U) == len(packed.token_M) == 300 * 40
    picked = packed.token_M[packed.target_of_N[packed.loss_mask_N]]
    assert torch.equal(picked, torch.from_numpy(ids.flatten()))


def test_never_more_logit_rows_than_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    import harts.ops.logprobs.chunked as chunked

    seen: list[int] = []
    plain = chunked._logits

    def watched(hidden_RD: Tensor, *rest: Tensor) -> Tensor:
        seen.append(len(hidden_RD))
        return plain(hidden_RD, *rest)

    monkeypatch.setattr(chunked, "_logits", watched)
    packed = pack(PrefixTree.build(AWKWARD["star"]))
    hidden = draw(packed.num_rows, 3, seed=1).requires_grad_()
    logprobs, _ = row_logprobs(hidden, draw(64, 3, seed=2), packed, chunk_rows=17)
    logprobs.sum().backward()
    assert max(seen) == 17
    assert sum(seen) == 2 * len(packed.head_row_U)


# -- bad input -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", [gated_delta_rule, causal_conv1d, attention, row_logprobs])
def test_unknown_implementation_names_the_valid_ones(op: object) -> None:
    packed = pack(PrefixTree.build(AWKWARD["single token"]))
    rows = draw(1, 2, 4, seed=1)
    arguments = {
        gated_delta_rule: ((rows, rows, rows, rows[..., 0], rows[..., 0], packed), {}),
        causal_conv1d: ((rows[:, 0], rows[0, 0, :, None], None, packed), {}),
        attention: ((rows, rows, rows, packed), {"scale": 1.0}),
        row_logprobs: ((rows[:, 0], rows[:, 0], packed), {}),
    }[op]
    with pytest.raises(ValueError, match=r"impl=.cuda. is not available; expected one of .*.reference."):
        op(*arguments[0], **arguments[1], impl="cuda")  # type: ignore[operator]


def test_shapes_are_checked() -> None:
    packed = branching()
    q = draw(packed.num_rows - 1, 2, 4, seed=1)
    with pytest.raises(ValueError, match="rows"):
        attention(q, q, q, packed, scale=1.0)
    with pytest.raises(ValueError, match="rows in all inputs"):
        gated_delta_rule(q, q, q, q[..., 0], q[..., 0], packed)
    with pytest.raises(ValueError, match="taps"):
        causal_conv1d(draw(packed.num_rows, 3, seed=1), draw(3, 5, seed=1), None, packed)
    with pytest.raises(ValueError, match="chunk_rows"):
        row_logprobs(draw(packed.num_rows, 3, seed=1), draw(9, 3, seed=1), packed, chunk_rows=0)
