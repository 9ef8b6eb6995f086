"""Recomputation with attention's outputs kept: the same bits, attention's forward once."""

import gc
import importlib
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from harts.cost import CostModel, count
from harts.flops import flop_limit, flops
from harts.layout import PackedTree, pack
from harts.models import attach, logprobs, recompute_activations, tiny_model
from harts.models.attach import find_backbone
from harts.models.recompute import check_kept, keep_activations
from harts.ops.attention.kept import computed_once, current_phase, keep_outputs
from harts.ops.attention.reference import attention_reference
from harts.ops.kernels import Kernels
from harts.testing.trees import AWKWARD
from harts.tree import PrefixTree

PLAIN = Kernels(attention="plain")


class Once(torch.autograd.Function):
    """A function in the form of the flash kernels: keeps what it computed, and computes its gradients from that."""

    runs = 0

    @staticmethod
    def forward(ctx, phase, forward, backward, *inputs):
        def compute() -> tuple[Tensor, ...]:
            Once.runs += 1
            return (forward(*inputs),)

        (out,) = computed_once(compute, phase)
        ctx.save_for_backward(*inputs, out)
        ctx.backward_of = backward
        return out

    @staticmethod
    def backward(ctx, grad):
        *inputs, out = ctx.saved_tensors
        return (None, None, None, *ctx.backward_of(grad, out, *inputs))


def once(forward: Callable[..., Tensor], backward: Callable[..., tuple[Tensor, ...]], *inputs: Tensor) -> Tensor:
    return Once.apply(current_phase(), forward, backward, *inputs)


def plain_attention(q, k, v, packed: PackedTree, options) -> Tensor:
    """The reference's attention as such a function."""

    def forward(*x: Tensor) -> Tensor:
        return attention_reference(*x, packed, options.scale)

    def backward(grad: Tensor, out: Tensor, *x: Tensor) -> tuple[Tensor, ...]:
        with torch.enable_grad():
            leaves = [y.detach().requires_grad_() for y in x]
            return torch.autograd.grad(forward(*leaves), leaves, grad)

    return once(forward, backward, q, k, v)


def exponential(x: Tensor) -> Tensor:
    """Its gradient is made of its output."""
    return once(torch.exp, lambda grad, out, x: (grad * out,), x)


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    implementations = importlib.import_module("harts.ops.attention")._IMPLEMENTATIONS
    monkeypatch.setitem(implementations, "plain", plain_attention)
    return attach(tiny_model("tiny-qwen3.5", dtype=torch.float64, vocab_size=64))


@pytest.fixture
def packed() -> PackedTree:
    return pack(PrefixTree.build(AWKWARD["comb"]))


def step(model: nn.Module, packed: PackedTree) -> tuple[int, Tensor, list[Tensor]]:
    Once.runs = 0
    model.zero_grad()
    values = logprobs(model, packed, kernels=PLAIN)
    values.sum().backward()
    return Once.runs, values.detach(), [p.grad.clone() for p in model.parameters() if p.grad is not None]


def test_attention_runs_once_and_all_bits_are_the_same(model: nn.Module, packed: PackedTree) -> None:
    layers = find_backbone(model).config.layer_types.count("full_attention")
    found = {}
    for keep in (None, False, True):
        if keep is None:
            keep_activations(model)
        else:
            recompute_activations(model, keep_attention=keep)
        found[keep] = step(model, packed)
    assert [found[keep][0] for keep in (None, False, True)] == [layers, 2 * layers, layers]
    for keep in (False, True):
        assert torch.equal(found[keep][1], found[None][1])
        assert all(torch.equal(a, b) for a, b in zip(found[keep][2], found[None][2], strict=True))


def test_without_gradients_nothing_is_kept(model: nn.Module, packed: PackedTree) -> None:
    recompute_activations(model, keep_attention=True)
    with torch.no_grad():
        first = logprobs(model, packed, kernels=PLAIN)
        assert torch.equal(logprobs(model, packed, kernels=PLAIN), first)
    assert torch.equal(step(model, packed)[1], first)


def checkpointed(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    Once.runs = 0
    return checkpoint(function, x, use_reentrant=False, context_fn=keep_outputs)


@pytest.fixture
def x() -> Tensor:
    return torch.linspace(-1, 1, 5, dtype=torch.float64).requires_grad_()


def test_a_second_backward_computes_again(x: Tensor) -> None:
    out = checkpointed(lambda x: exponential(x.sin()).cos(), x)
    expected = torch.autograd.grad(x.sin().exp().cos().sum(), x)[0]
    for runs in (1, 2):
        assert torch.allclose(torch.autograd.grad(out.sum(), x, retain_graph=True)[0], expected, rtol=0, atol=1e-15)
        assert Once.runs == runs


def test_outputs_that_are_not_taken_shift_no_others(x: Tensor) -> None:
    """The recomputation ends once it has all that the backward needs, which the last call here is not part of."""

    def function(x: Tensor) -> Tensor:
        out = exponential(x.sin()).cos()
        with torch.no_grad():
            exponential(x)
        exponential(x.cos())
        return out

    out = checkpointed(function, x)
    expected = torch.autograd.grad(x.sin().exp().cos().sum(), x)[0]
    for _ in range(3):
        assert torch.allclose(torch.autograd.grad(out.sum(), x, retain_graph=True)[0], expected, rtol=0, atol=1e-15)


def test_a_recomputation_that_failed_can_be_tried_again(x: Tensor) -> None:
    fails = [False, True, False]

    def function(x: Tensor) -> Tensor:
        first = exponential(x.sin())
        if fails.pop(0):
            raise RuntimeError("between two calls")
        return exponential(first.cos()).sin()

    out = checkpointed(function, x)
    with pytest.raises(RuntimeError, match="between two calls"):
        torch.autograd.grad(out.sum(), x, retain_graph=True)
    assert current_phase() is None
    expected = torch.autograd.grad(x.sin().exp().cos().exp().sin().sum(), x)[0]
    assert torch.allclose(torch.autograd.grad(out.sum(), x)[0], expected, rtol=0, atol=1e-15)


def test_a_forward_that_failed_ends_its_phase(x: Tensor) -> None:
    def function(x: Tensor) -> Tensor:
        raise RuntimeError("in the forward")

    with pytest.raises(RuntimeError, match="in the forward") as held:
        checkpointed(function, x)
    assert held.value is not None
    assert current_phase() is None


def test_what_is_kept_goes_with_the_graph(x: Tensor) -> None:
    made: list[weakref.ref[object]] = []

    def forward(x: Tensor) -> Tensor:
        out = x.exp()
        made.append(weakref.ref(out.untyped_storage()))
        return out

    gc.disable()
    try:
        out = checkpointed(lambda x: once(forward, lambda grad, out, x: (grad * out,), x).cos(), x)
        del out  # a forward whose backward never comes
        assert made[0]() is None
    finally:
        gc.enable()


def test_flops_leave_out_what_is_kept(model: nn.Module) -> None:
    config = find_backbone(model).config
    tree, rows = (PrefixTree.build(AWKWARD["comb"], share=share) for share in ("tree", "none"))
    whole, kept = (flops(config, tree, recompute=True, keep_attention=keep) for keep in (False, True))
    assert flops(config, tree) < kept < whole
    assert flops(config, tree, keep_attention=True) == flops(config, tree)
    assert flop_limit(config, rows, tree, recompute=True) == pytest.approx(flop_limit(config, rows, tree))
    assert flop_limit(config, rows, tree, recompute=True, keep_attention=True) > flop_limit(config, rows, tree)
    price = CostModel.from_config(config, recompute=True, keep_attention=True)
    expected = flops(config, tree, recompute=True, keep_attention=True, replayed=True)
    assert price.time.of(count(tree)) == pytest.approx(expected)


def test_where_it_would_do_nothing_it_is_refused() -> None:
    check_kept(Kernels(attention="fa4"), recompute=True, keep_attention=True)
    check_kept(Kernels(), recompute=False, keep_attention=False)
    with pytest.raises(ValueError, match="keep_attention: expected attention by a flash kernel"):
        check_kept(Kernels(), recompute=True, keep_attention=True)
    with pytest.raises(ValueError, match="keep_attention: expected recomputation, got none"):
        check_kept(Kernels(attention="fa4"), recompute=False, keep_attention=True)
