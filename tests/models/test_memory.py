"""Trees in a given memory: the peak is never above what was asked, and near what was predicted."""

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn

import harts
from harts.models import RouterConfig, recompute_activations, tiny_model
from harts.models.memory import Choice, choose_one_sweep, choose_two_sweeps, format_bytes, parse_memory
from harts.models.memory.meter import Meter, parameter_bytes
from harts.models.scorer import Scorer
from harts.models.streaming import in_one_sweep, in_two_sweeps
from harts.testing.trees import AWKWARD, random_trajectories, tree_strategy
from harts.tree import PrefixTree

CPU = torch.device("cpu")


def attached(name: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    return harts.attach(tiny_model(name, dtype=dtype))


@pytest.fixture(scope="module")
def hybrid() -> nn.Module:
    return attached("tiny-qwen3.5")


def peak_of(model: nn.Module, run: Callable[[], object]) -> int:
    """Bytes at the peak: what the model takes, and what lives beside it."""
    model.zero_grad()
    resident = parameter_bytes(model)
    with Meter(CPU) as meter:
        run()
    return resident + meter.peak


def run_two(choice: Choice) -> None:
    in_two_sweeps(choice.stream, choice.keep).logprobs_N.sum().backward()


def run_one(choice: Choice) -> None:
    in_one_sweep(choice.stream, lambda _, scores: scores.logprobs_N.sum(), choice.keep)


def check_memory(model: nn.Module, packed: harts.PackedTree, share: float, least: float) -> list[Choice]:
    """Asks for a share of what the whole tree takes; `least`: peak over prediction."""
    whole = peak_of(model, lambda: harts.logprobs(model, packed).sum().backward())
    model.zero_grad()
    resident = parameter_bytes(model)
    memory = resident + int(share * (whole - resident))
    chosen = []
    for choose, run in ((choose_two_sweeps, run_two), (choose_one_sweep, run_one)):
        model.zero_grad()
        choice = choose(Scorer(model, packed, None, {}), packed, memory, None)
        peak = peak_of(model, lambda choice=choice, run=run: run(choice))
        assert peak <= choice.peak_bytes <= memory
        assert peak >= least * choice.peak_bytes
        chosen.append(choice)
    return chosen


@pytest.mark.parametrize(
    ("name", "recompute"),
    [("tiny-qwen3.5", True), ("tiny-qwen3", False), ("tiny-lfm2", True), ("tiny-qwen3.5-moe", False)],
)
def test_the_peak_of_families(name: str, recompute: bool) -> None:
    model = attached(name)
    if recompute:
        recompute_activations(model)
    packed = harts.pack(PrefixTree.build(random_trajectories(np.random.default_rng(3), max_length=400)))
    for choice in check_memory(model, packed, 0.5, 0.75):
        assert len(choice.stream.pieces) > 1


@given(tree=tree_strategy(max_trajectories=6, max_length=400), share=st.floats(0.6, 1.5))
@settings(max_examples=4, deadline=None)
def test_the_peak_of_random_trees(hybrid: nn.Module, tree: PrefixTree, share: float) -> None:
    assume(tree.num_rows > 200)  # less can hardly be cut
    check_memory(hybrid, harts.pack(tree), share, 0.6)


def test_values_and_gradients_are_those_of_the_whole_tree(hybrid: nn.Module) -> None:
    packed = harts.pack(PrefixTree.build(AWKWARD["comb"]))

    def gradients() -> list[torch.Tensor]:
        return [each.grad.clone() for each in hybrid.parameters() if each.grad is not None]

    hybrid.zero_grad()
    whole = harts.logprobs(hybrid, packed)
    whole.sum().backward()
    expected = gradients()
    scale = max(float(each.abs().max()) for each in expected)
    taken = peak_of(hybrid, lambda: harts.logprobs(hybrid, packed).sum().backward())
    memory = parameter_bytes(hybrid) + (taken - parameter_bytes(hybrid)) // 2
    hybrid.zero_grad()
    ours = harts.logprobs(hybrid, packed, memory=memory)
    ours.sum().backward()
    assert float((ours - whole).detach().abs().max()) < 1e-5
    assert max(float((a - b).abs().max()) for a, b in zip(gradients(), expected, strict=True)) < 1e-5 * scale
    hybrid.zero_grad()
    _, scores = harts.backward(hybrid, packed, lambda _, s: s.logprobs_N.sum(), memory=memory)
    assert float((scores.logprobs_N - whole).detach().abs().max()) < 1e-5
    assert max(float((a - b).abs().max()) for a, b in zip(gradients(), expected, strict=True)) < 1e-5 * scale


def test_much_memory_runs_a_tree_whole(hybrid: nn.Module) -> None:
    values = harts.logprobs(hybrid, AWKWARD["star"], memory="1GiB", entropy=True).logprobs_N
    assert torch.autograd.grad(values.sum(), hybrid.lm_head.weight)  # an ordinary graph, as of a whole tree
    assert harts.logprobs(hybrid, AWKWARD["star"], memory="auto").requires_grad


def test_a_token_budget_bounds_pieces_too(hybrid: nn.Module) -> None:
    packed = harts.pack(PrefixTree.build(AWKWARD["comb"]))
    choice = choose_two_sweeps(Scorer(hybrid, packed, None, {}), packed, "1GiB", 100)
    assert max(piece.num_rows for piece in choice.stream.pieces) <= 100
    assert choice.keep == set(range(len(choice.stream.pieces)))
    assert choice.rows_again == 0


def test_without_gradients_pieces_are_larger(hybrid: nn.Module) -> None:
    packed = harts.pack(PrefixTree.build(AWKWARD["comb"]))
    taken = peak_of(hybrid, lambda: harts.logprobs(hybrid, packed).sum().backward())
    hybrid.zero_grad()
    memory = parameter_bytes(hybrid) + (taken - parameter_bytes(hybrid)) // 2
    with torch.no_grad():
        choice = choose_two_sweeps(Scorer(hybrid, packed, None, {}), packed, memory, None)
    assert len(choice.stream.pieces) == 1


def test_probes_leave_nothing_behind(hybrid: nn.Module) -> None:
    vars(hybrid.model).pop("_harts_footprints", None)
    fired: list[int] = []
    handle = hybrid.lm_head.weight.register_post_accumulate_grad_hook(lambda _: fired.append(1))
    try:
        hybrid.zero_grad()
        hybrid.lm_head.weight.grad = torch.ones_like(hybrid.lm_head.weight)
        state = torch.get_rng_state()
        packed = harts.pack(PrefixTree.build(AWKWARD["star"]))
        choose_two_sweeps(Scorer(hybrid, packed, None, {}), packed, "1GiB", None)
        assert (hybrid.lm_head.weight.grad == 1).all()
        assert all(each.grad is None for each in hybrid.model.layers.parameters())
        assert torch.equal(torch.get_rng_state(), state)
        assert not fired
    finally:
        handle.remove()
        hybrid.zero_grad()


def test_measured_again_where_the_model_is_set_otherwise(hybrid: nn.Module) -> None:
    model, packed = attached("tiny-qwen3"), harts.pack(PrefixTree.build(AWKWARD["comb"]))
    before = choose_two_sweeps(Scorer(model, packed, None, {}), packed, "1GiB", None)
    recompute_activations(model)
    after = choose_two_sweeps(Scorer(model, packed, None, {}), packed, "1GiB", None)
    assert after.peak_bytes < 0.9 * before.peak_bytes


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("memory", [0, -1, True, 2.5, "", "60", "GiB", "-3GiB", "60 parsec", None])
def test_sizes_that_are_none(memory: object) -> None:
    with pytest.raises(ValueError, match="memory: expected a positive number of bytes, a number with a unit"):
        parse_memory(memory, CPU, 0)  # type: ignore[arg-type]


def test_sizes() -> None:
    sizes: Sequence[tuple[int | str, int]] = [(7, 7), ("7 b", 7), ("1.5KiB", 1536), ("2kb", 2000), ("1GiB", 2**30)]
    for given_, expected in sizes:
        assert parse_memory(given_, CPU, 0) == expected
    assert format_bytes(1536) == "1.5 KiB"
    assert format_bytes(3 * 2**40) == "3.0 TiB"
    assert parse_memory("auto", CPU, 5) > 5


def test_more_than_the_device_has(hybrid: nn.Module) -> None:
    with pytest.raises(ValueError, match=r"memory: expected at most the .* of cpu, got '900TiB'"):
        harts.logprobs(hybrid, AWKWARD["star"], memory="900TiB")


def test_too_little_names_the_least(hybrid: nn.Module) -> None:
    with pytest.raises(ValueError, match=r"memory: expected at least \d+\.\d MiB, which the batch takes in its small"):
        harts.logprobs(hybrid, AWKWARD["star"], memory=parameter_bytes(hybrid) + 1000)


def test_neither_budget_nor_memory(hybrid: nn.Module) -> None:
    with pytest.raises(ValueError, match="backward: expected a token_budget"):
        harts.backward(hybrid, AWKWARD["star"], lambda _, scores: scores.logprobs_N.sum())


def test_reentrant_checkpointing() -> None:
    model = attached("tiny-qwen3").train()
    model.gradient_checkpointing_enable({"use_reentrant": True})
    with pytest.raises(ValueError, match="memory: expected layers that do not recompute by reentrant checkpointing"):
        harts.logprobs(model, AWKWARD["star"], memory="1GiB")


def test_routers_are_probed_too() -> None:
    model = attached("tiny-qwen3.5-moe")
    router = RouterConfig(scope="trajectory", balance_coefficient=0.1)
    scores = harts.logprobs(model, AWKWARD["star"], memory="1GiB", token_budget=100, router=router)
    (scores.logprobs_N.sum() + scores.router.aux_loss()).backward()
    assert any(each.grad is not None for each in model.parameters())
