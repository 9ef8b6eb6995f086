"""Trees in pieces: log-probs, extras and gradients are those of the whole tree, whatever is kept."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import harts
from harts.chains import row_order
from harts.models import PRESETS, RouterConfig, tiny_model
from harts.models.cuts import done_after, kept_in_one_sweep, kept_in_two_sweeps, piece_starts, subtree_starts
from harts.models.scorer import Scorer
from harts.models.streaming import Stream, in_one_sweep, in_two_sweeps
from harts.testing.fp64 import all_fp64
from harts.testing.judging import gradient_sizes
from harts.testing.trees import AWKWARD, random_trajectories, tree_strategy
from harts.trajectory import Trajectory
from harts.tree import PrefixTree

HYBRID = "tiny-qwen3.5"
Result = tuple[Tensor, dict[str, Tensor]]


def loss_of(logprobs: Tensor, entropy: Tensor | None, weights: Tensor) -> Tensor:
    loss = (logprobs * weights).sum()
    return loss if entropy is None else loss + (entropy * weights.flip(0)).sum()


def weights_of(packed: harts.PackedTree) -> Tensor:
    return torch.randn(packed.num_tokens, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


def take_gradients(model: nn.Module) -> dict[str, Tensor]:
    named = list(model.named_parameters())
    found = {name: torch.zeros_like(each) if each.grad is None else each.grad.clone() for name, each in named}
    model.zero_grad()
    return found


def whole(model: nn.Module, packed: harts.PackedTree) -> Result:
    scores = harts.logprobs(model, packed, entropy=True)
    loss_of(scores.logprobs_N, scores.entropy_N, weights_of(packed)).backward()
    return torch.stack([scores.logprobs_N, scores.entropy_N]).detach(), take_gradients(model)


def two_sweeps(model: nn.Module, packed: harts.PackedTree, starts: Sequence[int], keep: set[int]) -> Result:
    scores = in_two_sweeps(Stream(Scorer(model, packed, None, {"entropy": True}), packed, starts), keep)
    loss_of(scores.logprobs_N, scores.entropy_N, weights_of(packed)).backward()
    return torch.stack([scores.logprobs_N, scores.entropy_N]).detach(), take_gradients(model)


def one_sweep(model: nn.Module, packed: harts.PackedTree, starts: Sequence[int], keep: set[int]) -> Result:
    weights, flipped = packed.split(weights_of(packed)), packed.split(weights_of(packed).flip(0))
    seen: list[int] = []

    def loss(trajectories: Sequence[int], scores: harts.Scores) -> Tensor:
        seen.extend(trajectories)
        direct = torch.cat([weights[index] for index in trajectories])
        back = torch.cat([flipped[index] for index in trajectories])
        return (scores.logprobs_N * direct).sum() + (scores.entropy_N * back).sum()

    stream = Stream(Scorer(model, packed, None, {"entropy": True}), packed, starts)
    _, scores = in_one_sweep(stream, loss, keep)
    assert sorted(seen) == list(range(packed.tree.num_trajectories))
    assert not stream._alive
    assert not any(store._values or store._grads for store in stream._stores)
    return torch.stack([scores.logprobs_N, scores.entropy_N]), take_gradients(model)


def assert_equal(ours: Result, theirs: Result) -> None:
    assert float((ours[0] - theirs[0]).abs().max()) < 1e-10
    sizes = gradient_sizes(theirs[1])
    assert (
        max(float((ours[1][name] - theirs[1][name]).norm()) / max(size, 1e-30) for name, size in sizes.items()) < 1e-8
    )


@pytest.fixture(scope="module")
def hybrid() -> nn.Module:
    with all_fp64():
        return harts.attach(tiny_model(HYBRID, dtype=torch.float64))


@pytest.fixture(autouse=True)
def without_gradients(hybrid: nn.Module) -> None:
    hybrid.zero_grad()


@pytest.mark.parametrize("shape", [name for name in AWKWARD if name != "caterpillar"])
def test_awkward_trees_in_random_pieces(hybrid: nn.Module, shape: str) -> None:
    rng = np.random.default_rng(1)
    packed = harts.pack(PrefixTree.build(AWKWARD[shape]))
    starts = sorted({0, *rng.integers(0, packed.num_rows, 3).tolist()})
    keep = set(np.flatnonzero(rng.random(len(starts)) < 0.5).tolist())
    with all_fp64():
        expected = whole(hybrid, packed)
        assert_equal(two_sweeps(hybrid, packed, starts, keep), expected)
        assert_equal(one_sweep(hybrid, packed, starts, keep), expected)


@given(tree=tree_strategy(max_trajectories=5, max_length=100), seed=st.integers(0, 99))
@settings(max_examples=5, deadline=None)
def test_random_trees_in_random_pieces(hybrid: nn.Module, tree: PrefixTree, seed: int) -> None:
    rng = np.random.default_rng(seed)
    packed = harts.pack(tree)
    starts = sorted({0, *rng.integers(0, packed.num_rows, int(rng.integers(0, 5))).tolist()})
    keep = set(np.flatnonzero(rng.random(len(starts)) < 0.5).tolist())
    with all_fp64():
        expected = whole(hybrid, packed)
        assert_equal(two_sweeps(hybrid, packed, starts, keep), expected)
        assert_equal(one_sweep(hybrid, packed, starts, keep), expected)


@pytest.mark.parametrize("name", list(PRESETS))
@pytest.mark.parametrize("recompute", [False, True])
def test_every_family_with_a_token_budget(name: str, recompute: bool) -> None:
    trajectories = random_trajectories(np.random.default_rng(5), max_length=100)
    with all_fp64():
        model = harts.attach(tiny_model(name, dtype=torch.float64))
        if recompute:
            harts.models.recompute_activations(model)
        packed = harts.pack(PrefixTree.build(trajectories))
        expected = whole(model, packed)
        budget = packed.num_rows // 4
        assert_equal(two_sweeps(model, packed, piece_starts(packed.tree, budget), set()), expected)
        starts = subtree_starts(packed.tree, budget)
        assert len(starts) > 3
        pieces = packed.pieces(starts)
        keep = kept_in_one_sweep([piece.num_rows for piece in pieces], done_after(pieces), budget)
        assert_equal(one_sweep(model, packed, starts, keep), expected)


@pytest.mark.parametrize("targets", [["q_proj", "in_proj_qkv"], ["down_proj"]])
def test_adapters_on_a_frozen_model(targets: list[str]) -> None:
    peft = pytest.importorskip("peft")
    with all_fp64():
        model = tiny_model(HYBRID, dtype=torch.float64)
        # a random B, as gradients of A are 0 otherwise; the first layers alone, so that the last ones are frozen
        config = peft.LoraConfig(target_modules=targets, layers_to_transform=[1, 2], init_lora_weights=False)
        model = harts.attach(peft.get_peft_model(model, config)).double()
        packed = harts.pack(PrefixTree.build(AWKWARD["comb"][:5]))
        expected = whole(model, packed)
        assert any(float(each.abs().max()) > 0 for each in expected[1].values())
        starts = piece_starts(packed.tree, 150)
        assert_equal(two_sweeps(model, packed, starts, {1}), expected)
        assert_equal(one_sweep(model, packed, starts, {1}), expected)


def test_a_frozen_model_gives_no_gradient(hybrid: nn.Module) -> None:
    try:
        hybrid.requires_grad_(False)
        with all_fp64():
            assert not harts.logprobs(hybrid, AWKWARD["star"], token_budget=150).requires_grad
    finally:
        hybrid.requires_grad_(True)


def test_public_calls_take_trajectories(hybrid: nn.Module) -> None:
    trajectories = AWKWARD["branches at 63/64/65 inside branches"]
    with all_fp64():
        tree = PrefixTree.build(trajectories)
        expected = harts.logprobs(hybrid, harts.pack(tree))
        expected.square().sum().backward()
        grads = take_gradients(hybrid)
        for batch in (trajectories, tree, harts.pack(tree)):
            ours = harts.logprobs(hybrid, batch, token_budget=300)
            ours.square().sum().backward()
            assert_equal((ours.detach(), take_gradients(hybrid)), (expected.detach(), grads))
            total, scores = harts.backward(
                hybrid, batch, lambda _, scores: scores.logprobs_N.square().sum(), token_budget=300
            )
            assert_equal((scores.logprobs_N, take_gradients(hybrid)), (expected.detach(), grads))
            assert abs(float(total - expected.square().sum())) < 1e-10
        with torch.no_grad():
            assert float((harts.logprobs(hybrid, trajectories, token_budget=300) - expected).abs().max()) < 1e-10


@pytest.mark.parametrize("scope", ["trajectory", "microbatch"])
def test_hidden_states_likely_tokens_and_routers(scope: str) -> None:
    config = RouterConfig(scope=scope, balance_coefficient=0.1, z_coefficient=0.01, routes=True)  # type: ignore[arg-type]
    with all_fp64():
        model = harts.attach(tiny_model("tiny-qwen3.5-moe", dtype=torch.float64))
        packed = harts.pack(PrefixTree.build(AWKWARD["comb"][:6]))
        results = []
        for budget in (None, 200):
            scores = harts.logprobs(model, packed, token_budget=budget, hidden=True, top_k=3, router=config)
            loss = scores.logprobs_N.sum() + scores.hidden_N.square().sum() + scores.top_logprobs_NK.sum()
            (loss + scores.router.aux_loss()).backward()
            given = torch.cat([scores.logprobs_N[:, None], scores.hidden_N, scores.top_logprobs_NK], 1).detach()
            results.append(((given, take_gradients(model)), scores))
    assert_equal(results[1][0], results[0][0])
    ours, theirs = results[1][1], results[0][1]
    assert torch.equal(ours.top_ids_NK, theirs.top_ids_NK)
    assert torch.equal(ours.router.routes_YTK, theirs.router.routes_YTK)
    assert torch.equal(ours.router.statistics.load_UYE, theirs.router.statistics.load_UYE)


# -- cuts --------------------------------------------------------------------------------------------------------------


@given(tree=tree_strategy(max_trajectories=8, max_length=120), most=st.integers(1, 300))
@settings(max_examples=40, deadline=None)
def test_pieces_have_at_most_so_many_rows(tree: PrefixTree, most: int) -> None:
    tree = tree.reordered(row_order(tree))
    for starts in (piece_starts(tree, most), subtree_starts(tree, most)):
        rows = np.diff([*starts, tree.num_rows])
        assert starts[0] == 0
        assert rows.min() > 0
        assert rows.max() <= most


@given(tree=tree_strategy(max_trajectories=8, max_length=120), live=st.integers(1, 300))
@settings(max_examples=40, deadline=None)
def test_graphs_that_are_kept_fit(tree: PrefixTree, live: int) -> None:
    packed = harts.pack(tree)
    pieces = packed.pieces(subtree_starts(packed.tree, live))
    rows, done = [piece.num_rows for piece in pieces], done_after(pieces)
    keep = kept_in_one_sweep(rows, done, live)
    for at in range(len(rows)):
        alive = [index for index in keep if index < at <= done[index]]
        assert sum(rows[index] for index in alive) + rows[at] <= live
        again = [index for index in set(range(at + 1)) - keep if done[index] == at]
        for index in again:  # runs once more, when only what lies before it is alive
            assert sum(rows[other] for other in keep if other < index and done[other] >= at) + rows[index] <= live
    assert sum(rows[index] for index in kept_in_two_sweeps(rows, live)) <= live


def test_a_trunk_and_its_subtrees_are_pieces() -> None:
    trunk = np.arange(100)
    branches = [np.concatenate([trunk, np.full(60, 200 + index)]) for index in range(4)]
    trajectories = [harts.Trajectory(token_ids=ids, loss_mask=ids >= 200, id=str(ids[-1])) for ids in branches]
    packed = harts.pack(PrefixTree.build(trajectories))
    pieces = packed.pieces(subtree_starts(packed.tree, 170))
    rows, done = [piece.num_rows for piece in pieces], done_after(pieces)
    assert rows == [100, 60, 60, 60, 60]
    assert done == [4, 1, 2, 3, 4]
    assert kept_in_one_sweep(rows, done, 170) == {0, 1, 2, 3, 4}
    assert kept_in_one_sweep(rows, done, 159) == {1, 2, 3, 4}
    assert kept_in_two_sweeps(rows, 170) == {3, 4}
    assert np.diff([*piece_starts(packed.tree, 170), 340]).tolist() == [160, 120, 60]


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_a_piece_that_gives_other_bits_the_second_time(hybrid: nn.Module) -> None:
    layer, calls = hybrid.model.layers[1].mlp, []

    def creep(module: nn.Module, arguments: object, output: Tensor) -> Tensor:
        calls.append(1)
        return output * (1 + 1e-9 * len(calls))

    handle = layer.register_forward_hook(creep)
    try:
        with all_fp64():
            values = harts.logprobs(hybrid, AWKWARD["star"], token_budget=150)
            with pytest.raises(ValueError, match=r"the same bits whenever rows .* got others from (layer 2|the head)"):
                values.sum().backward()
    finally:
        handle.remove()


def test_a_second_backward(hybrid: nn.Module) -> None:
    with all_fp64():
        values = harts.logprobs(hybrid, AWKWARD["star"], token_budget=150)
        values.sum().backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="expected one backward"):
            values.sum().backward()


@pytest.mark.parametrize("budget", [0, -1, 2.5, True, "60"])
def test_token_budgets_that_are_none(hybrid: nn.Module, budget: object) -> None:
    with pytest.raises(ValueError, match="token_budget: expected a positive number of rows, got"):
        harts.logprobs(hybrid, AWKWARD["star"], token_budget=budget)  # type: ignore[call-overload]


def test_batches_that_are_none(hybrid: nn.Module) -> None:
    packed = harts.pack(PrefixTree.build(AWKWARD["star"]))
    with pytest.raises(ValueError, match="expected a whole tree, got a piece"):
        harts.logprobs(hybrid, packed.pieces([0, 5])[1])
    with pytest.raises(ValueError, match="expected trajectories, a PrefixTree or a PackedTree, got str"):
        harts.logprobs(hybrid, "file.jsonl")  # type: ignore[call-overload]
    with pytest.raises(ValueError, match="trajectories: expected at least one"):
        harts.logprobs(hybrid, [])


def test_one_sweep_refuses(hybrid: nn.Module) -> None:
    batch: list[Trajectory] = AWKWARD["star"]
    with pytest.raises(ValueError, match="expected one number that depends on the scores, got 3"):
        harts.backward(hybrid, batch, lambda *_: 3.0, token_budget=150)  # type: ignore[arg-type, return-value]
    with torch.no_grad(), pytest.raises(ValueError, match="expected gradients to be on"):
        harts.backward(hybrid, batch, lambda _, scores: scores.logprobs_N.sum(), token_budget=150)
    router = RouterConfig(scope="step", balance_coefficient=0.1)
    with pytest.raises(ValueError, match="router: expected coefficients of 0"):
        harts.backward(hybrid, batch, lambda _, scores: scores.logprobs_N.sum(), token_budget=150, router=router)
