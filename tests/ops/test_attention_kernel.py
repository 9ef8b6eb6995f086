"""Attention on paths: its calls, their sums and the backward here; the flash kernels on a GPU."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from kernel_law import DEVICE, assert_kernel_law, assert_same_bits, draw, run
from plain_attention import QUERY_COSTS, PlainKernel, check_paths, check_what_lies_behind, inputs_of, share_much
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from harts.layout import pack
from harts.ops import attention
from harts.ops.attention import default_impl
from harts.ops.attention.branches import plan_backward
from harts.ops.attention.calls import Call, forward_calls
from harts.ops.attention.fa4 import has_fa4
from harts.ops.attention.kept import keep_outputs
from harts.ops.attention.pages import key_pages
from harts.ops.attention.paths import attend_paths
from harts.testing.trees import AWKWARD, to_trajectories, tree_strategy
from harts.tree import PrefixTree

SHAPES = [name for name in AWKWARD if name != "caterpillar"]
AWKWARD_DEPTH = 600


@pytest.mark.parametrize("query_cost", QUERY_COSTS)
@pytest.mark.parametrize("key_cap", [1, 300, 100_000])
@pytest.mark.parametrize("shape", ["star", "comb", "lengths 63/64/65", "prefix of another", "forest", "duplicates"])
def test_calls_and_backward(shape: str, key_cap: int, query_cost: float, monkeypatch: pytest.MonkeyPatch) -> None:
    share_much(monkeypatch, query_cost)
    packed = pack(PrefixTree.build(AWKWARD[shape]), key_cap=key_cap, device=DEVICE)
    assert (len(forward_calls(packed)) == 1) == (key_cap == 100_000 or shape in ("duplicates", "prefix of another"))
    check_paths(packed)


@pytest.mark.parametrize("key_cap", [60, 100_000])
@given(tree=tree_strategy(max_trajectories=6, max_length=70))
@settings(max_examples=10, deadline=None)
def test_random_trees(key_cap: int, tree: PrefixTree) -> None:
    with pytest.MonkeyPatch.context() as patch:
        share_much(patch)
        check_paths(pack(tree, key_cap=key_cap, device=DEVICE))


def test_stages_add_up_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    """In bf16 the gradients of keys over many stages are as near to fp64 as those of one stage."""
    share_much(monkeypatch, query_cost=1e9)
    packed = pack(PrefixTree.build(AWKWARD["caterpillar"][-40:]), device=DEVICE)
    inputs = inputs_of(packed)
    errors = []
    for key_cap in (1, 1_000_000):
        fresh = dataclasses.replace(packed, key_cap=key_cap)
        assert (len(plan_backward(fresh).stages) > 9) == (key_cap == 1)
        op = lambda *x, fresh=fresh: attend_paths(*x, fresh, 0.3, PlainKernel(), False)  # noqa: E731
        truth = run(lambda *x: attention(*x, packed, scale=0.3), inputs, torch.float64)
        found = run(op, inputs, torch.bfloat16)
        errors.append([float((a.double() - b).norm()) for a, b in zip(found[2:], truth[2:], strict=True)])
    assert all(many <= 1.05 * one for many, one in zip(*errors, strict=True))


def test_a_forward_that_is_recomputed_can_keep_its_outputs() -> None:
    class Counts(PlainKernel):
        runs = 0

        def forward(self, q, k, v, call: Call, scale: float) -> tuple[Tensor, Tensor]:
            self.runs += 1
            return super().forward(q, k, v, call, scale)

    packed = pack(PrefixTree.build(AWKWARD["star"]), key_cap=300, device=DEVICE)
    found = []
    for context_fn in (None, keep_outputs):
        kernel = Counts()
        leaves = [x.requires_grad_() for x in inputs_of(packed)]
        how = {} if context_fn is None else {"context_fn": context_fn}
        op = lambda *x, kernel=kernel: attend_paths(*(2 * y for y in x), packed, 0.3, kernel, False).sin()  # noqa: E731
        out = checkpoint(op, *leaves, use_reentrant=False, **how)
        found.append((kernel, [out, *torch.autograd.grad(out.sum(), leaves)]))
    calls = len(forward_calls(packed))
    assert [kernel.runs for kernel, _ in found] == [2 * calls, calls]
    assert calls > 1
    assert all(torch.equal(a, b) for a, b in zip(found[0][1], found[1][1], strict=True))


@pytest.mark.parametrize("page_rows", [None, 16])
def test_law_fails_when_a_chain_sees_another_path(page_rows: int | None) -> None:
    packed = pack(PrefixTree.build(AWKWARD["star"]), device=DEVICE)
    if page_rows is None:
        (call,) = packed.layout(forward_calls)
        call.keys[-1 - call.query_lengths[-1]] = 0
    else:
        (pages,) = packed.layout(key_pages, page_rows)
        pages.first_row_CP[-1, 1] += 1
    with pytest.raises(AssertionError, match="error"):
        check_paths(packed, page_rows, truth=pack(packed.tree, device=DEVICE))


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there")
def test_flash_kernels_are_refused_without_a_gpu() -> None:
    packed = pack(PrefixTree.build(AWKWARD["single token"]))
    assert default_impl() == "reference"
    with pytest.raises(ValueError, match="impl='varlen' expected fp16 or bf16 tensors on a CUDA device"):
        attention(*inputs_of(packed), packed, scale=1.0, impl="varlen")
    with pytest.raises((ImportError, ValueError), match=r"flash-attn-4|CUDA"):
        attention(*inputs_of(packed), packed, scale=1.0, impl="fa4")


FLASH = [
    pytest.param("varlen"),
    pytest.param("fa4", marks=pytest.mark.skipif(not has_fa4(), reason="needs flash-attn-4")),
]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("size", [128, 256])
@pytest.mark.parametrize("impl", FLASH)
def test_flash_kernels_on_a_gpu(impl: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    shared, stages, gaps = 0, 0, 0
    on_hopper = impl == "fa4" and torch.cuda.get_device_capability()[0] == 9
    for shape in SHAPES:
        for key_cap, query_cost in ((700, 1e9), (700, 0.0), (100_000, 0.0)):
            share_much(monkeypatch, query_cost)
            packed = pack(PrefixTree.build(AWKWARD[shape]), key_cap=key_cap, device=DEVICE)
            plan = plan_backward(packed, gaps=on_hopper)
            calls = [call for stage in plan.stages for call in stage.calls]
            shared += sum(not call.causal for call in calls)
            gaps += sum(call.used_queries_C is not None for call in calls)
            stages = max(stages, len(plan.stages))
            op = lambda *x, packed=packed, impl=impl: attention(  # noqa: E731
                *x, packed, scale=0.1, impl=impl, deterministic=True
            )
            reference = lambda *x, packed=packed: attention(*x, packed, scale=0.1)  # noqa: E731
            inputs = inputs_of(packed, size=size, heads=8)
            assert_kernel_law(op, reference, inputs, torch.bfloat16)
            assert_same_bits(op, inputs, torch.bfloat16)
    assert shared > 0
    assert stages > 1
    assert (gaps > 0) == on_hopper


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("heads", [2, 8])
@pytest.mark.parametrize("impl", FLASH)
def test_many_chains_on_a_gpu(impl: str, heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """More sequences in a call than flash-attn-4 looks up one by one; as many key heads as query heads, or fewer."""
    rows = [[stem] * 20 + list(range(leg, leg + 5)) for stem in range(260) for leg in range(300, 306)]
    share_much(monkeypatch)
    packed = pack(PrefixTree.build(to_trajectories(np.random.default_rng(0), rows)), device=DEVICE)
    op = lambda *x: attention(*x, packed, scale=0.1, impl=impl)  # noqa: E731
    inputs = inputs_of(packed, size=128, heads=heads)
    assert_kernel_law(op, lambda *x: attention(*x, packed, scale=0.1), inputs, torch.bfloat16)
    check_what_lies_behind(packed, [x.bfloat16() for x in inputs], op)
    if impl == "fa4" and torch.cuda.get_device_capability()[0] == 9:
        chains, shared = plan_backward(packed, gaps=True).stages[0].calls
        assert len(chains.query_lengths) == len(key_pages(packed, 128)[0].first_row_CP) == 260 * 6
        assert len(shared.query_lengths) == 260
        assert shared.used_queries_C is not None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("impl", FLASH)
@pytest.mark.parametrize("size", [64, 128, 256])
@pytest.mark.parametrize("shape", SHAPES)
def test_bits_equal_those_of_separate_rows(shape: str, size: int, impl: str) -> None:
    outputs = []
    for share in ("tree", "none"):
        packed = pack(PrefixTree.build(AWKWARD[shape], share=share), key_cap=1500, device=DEVICE)
        place = packed.position_T * 64 + packed.token_ids_T  # inputs: functions of the token and its depth
        tables = [draw(AWKWARD_DEPTH * 64, heads, size, seed=heads) for heads in (16, 4, 2)]
        q, k, v = tables[0][place], tables[1][place], tables[2][place].repeat_interleave(2, 1)
        op = lambda *x, packed=packed, impl=impl: attention(*x, packed, scale=0.06, impl=impl)  # noqa: E731
        outputs.append(run(op, [q, k, v], torch.bfloat16)[0][packed.row_of_N])
    assert torch.equal(outputs[0], outputs[1])
