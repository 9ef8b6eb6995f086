"""Recomputation with attention's outputs kept: the same bits, attention's forward once."""

import gc
import importlib
import weakref

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from harts.flops import flop_limit, flops
from harts.layout import PackedTree, pack
from harts.models import attach, logprobs, recompute_activations, tiny_model
from harts.models.attach import find_backbone
from harts.models.recompute import check_kept, keep_activations
from harts.ops.attention.kept import computed_once, keep_outputs
from harts.ops.attention.reference import attention_reference
from harts.ops.kernels import Kernels
from harts.testing.trees import AWKWARD
from harts.tree import PrefixTree

PLAIN = Kernels(attention="plain")


class Once(torch.autograd.Function):
    """Attention of the reference, in the form of the flash kernels: a function that keeps what it computed."""

    runs = 0

    @staticmethod
    def forward(ctx, q, k, v, packed, scale, deterministic):
        def compute() -> tuple[Tensor, ...]:
            Once.runs += 1
            return (attention_reference(q, k, v, packed, scale),)

        (out,) = computed_once(compute)
        ctx.save_for_backward(q, k, v, out)
        ctx.packed, ctx.scale = packed, scale
        return out

    @staticmethod
    def backward(ctx, grad):
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_() for x in ctx.saved_tensors[:3]]
            out = attention_reference(*leaves, ctx.packed, ctx.scale)
        return (*torch.autograd.grad(out, leaves, grad), None, None, None)


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    implementations = importlib.import_module("harts.ops.attention")._IMPLEMENTATIONS
    monkeypatch.setitem(implementations, "plain", Once.apply)
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


def test_a_second_backward_computes_again() -> None:
    x = torch.randn(4, dtype=torch.float64, requires_grad=True)
    runs = []

    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            def compute() -> tuple[Tensor, ...]:
                runs.append(1)
                return (2 * x,)

            (out,) = computed_once(compute)
            ctx.save_for_backward(out)
            return out

        @staticmethod
        def backward(ctx, grad):
            assert len(ctx.saved_tensors) == 1
            return 2 * grad

    out = checkpoint(lambda x: Double.apply(x.sin()).cos(), x, use_reentrant=False, context_fn=keep_outputs)
    first = torch.autograd.grad(out.sum(), x, retain_graph=True)[0]
    assert len(runs) == 1
    assert torch.equal(torch.autograd.grad(out.sum(), x)[0], first)
    assert len(runs) == 2


def test_what_is_kept_goes_with_the_graph() -> None:
    kept: list[weakref.ref[Tensor]] = []

    class Keeps(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            def compute() -> tuple[Tensor, ...]:
                out = x.clone()
                kept.append(weakref.ref(out.untyped_storage()))
                return (out,)

            return computed_once(compute)[0]

        @staticmethod
        def backward(ctx, grad):
            return grad

    gc.disable()
    try:
        x = torch.randn(4, requires_grad=True)
        out = checkpoint(lambda x: Keeps.apply(x).cos(), x, use_reentrant=False, context_fn=keep_outputs)
        del out  # a forward whose backward never comes
        assert kept[0]() is None
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


def test_the_reference_is_refused() -> None:
    check_kept(Kernels(attention="fa4"), keep_attention=True)
    check_kept(Kernels(), keep_attention=False)
    with pytest.raises(ValueError, match="keep_attention: expected attention by a flash kernel"):
        check_kept(Kernels(), keep_attention=True)
