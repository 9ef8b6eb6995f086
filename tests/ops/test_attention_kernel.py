"""Path-gathered attention: the groups, the gather and its backward here; the flash kernels on a GPU."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_law import DEVICE, assert_kernel_law, assert_same_bits, draw, run
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from harts.layout import PackedTree, pack
from harts.ops import attention
from harts.ops.attention import branches, default_impl
from harts.ops.attention.branches import plan_backward
from harts.ops.attention.calls import Call, forward_calls, take
from harts.ops.attention.fa4 import has_fa4
from harts.ops.attention.kept import keep_outputs
from harts.ops.attention.pages import KeyPages, key_pages
from harts.ops.attention.paths import attend_paths
from harts.testing.trees import AWKWARD, to_trajectories, tree_strategy
from harts.tree import PrefixTree

SHAPES = [name for name in AWKWARD if name != "caterpillar"]
AWKWARD_DEPTH = 600


class PlainPaged:
    """A forward over pages, from the definition: the pages of a path one after the other."""

    def __init__(self, page_rows: int) -> None:
        self.page_rows = page_rows

    def __call__(self, q, k_pages, v_pages, pages: KeyPages, scale: float) -> tuple[Tensor, Tensor]:
        chains = zip(q.split(list(pages.query_lengths)), pages.first_row_CP.long(), pages.key_length_C, strict=True)
        parts = [
            attend(q_path, *(x[rows].flatten(0, 1)[:n] for x in (k_pages, v_pages)), scale)
            for q_path, rows, n in chains
        ]
        return torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts], 1)


class PlainKernel:
    """What a flash kernel computes, from the definition; its backward takes sums over all keys from the forward."""

    def __init__(self, page_rows: int | None = None, *, leaves_gaps: bool = False) -> None:
        self.paged = None if page_rows is None else PlainPaged(page_rows)
        self.leaves_gaps = leaves_gaps

    def forward(self, q, k, v, call: Call, scale: float) -> tuple[Tensor, Tensor]:
        parts = [attend(*path, scale) for path in paths(q, k, v, call)]
        return torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts], 1)

    def backward(self, grad, q, k, v, out, lse, call: Call, scale: float, deterministic: bool, into) -> None:
        grads = [into[0].fill_(torch.nan), *(x.zero_() for x in into[1:])]
        repeats = q.shape[1] // k.shape[1]
        parts = zip(
            paths(q, k, v, call),
            queries_of(grad, call),
            queries_of(out, call),
            queries_of(lse.T, call),
            paths(*grads, call),
            strict=True,
        )
        for (qs, ks, vs), do, o, row_lse, (dq, dk, dv) in parts:
            ks, vs = ks.repeat_interleave(repeats, 1), vs.repeat_interleave(repeats, 1)
            p = (torch.einsum("qhd,khd->hqk", qs, ks) * scale - row_lse.T.unsqueeze(-1)).exp()
            if call.causal:
                p = p.tril(len(ks) - len(qs))
            ds = p * (torch.einsum("qhv,khv->hqk", do, vs) - (do * o).sum(-1).T.unsqueeze(-1)) * scale
            dq.copy_(torch.einsum("hqk,khd->qhd", ds, ks))
            dk += torch.einsum("hqk,qhd->khd", ds, qs).unflatten(1, (-1, repeats)).sum(2)
            dv += torch.einsum("hqk,qhv->khv", p, do).unflatten(1, (-1, repeats)).sum(2)


def attend(q_path: Tensor, k_path: Tensor, v_path: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of the last rows of a path."""
    repeats = q_path.shape[1] // k_path.shape[1]
    scores = torch.einsum("qhd,khd->hqk", q_path, k_path.repeat_interleave(repeats, 1)) * scale
    hidden = torch.ones(scores.shape[1:], dtype=torch.bool, device=scores.device).triu(1 + len(k_path) - len(q_path))
    scores = scores.masked_fill(hidden, -torch.inf)
    out = torch.einsum("hqk,khv->qhv", scores.softmax(-1), v_path.repeat_interleave(repeats, 1))
    return out, scores.logsumexp(-1)


def paths(q: Tensor, k: Tensor, v: Tensor, call: Call):
    """Views of the sequences of a call."""
    keys = list(call.key_lengths)
    return zip(queries_of(q, call), k.split(keys), v.split(keys), strict=True)


def queries_of(x: Tensor, call: Call) -> list[Tensor]:
    """Views of the queries of each sequence."""
    starts = call.cu_queries_C1[:-1].tolist()
    return [x[start : start + length] for start, length in zip(starts, call.query_lengths, strict=True)]


def inputs_of(packed: PackedTree, size: int = 8, heads: int = 4) -> list[Tensor]:
    rows = packed.num_rows
    return [draw(rows, heads, size, seed=1), draw(rows, 2, size, seed=2), draw(rows, 2, size, seed=3)]


def check_paths(packed: PackedTree, page_rows: int | None = None, *, truth: PackedTree | None = None) -> None:
    """Outputs and gradients, by branches or by paths, whichever the layout takes."""
    for leaves_gaps in (False, True):
        kernel = PlainKernel(page_rows, leaves_gaps=leaves_gaps)
        assert_kernel_law(
            lambda *x, kernel=kernel: attend_paths(*x, packed, 0.3, kernel, False),
            lambda *x: attention(*x, truth or packed, scale=0.3),
            inputs_of(packed),
        )


def share_much(patch: pytest.MonkeyPatch, query_cost: float = 0.0) -> None:
    """Small trees share keys in the backward."""
    patch.setattr(branches, "QUERY_COST", query_cost)
    patch.setattr(branches, "PART_COST", 0)


QUERY_COSTS = [0.0, 0.3, 1.0, 1e9]
"""All keys that two chains have in common are shared, most are, some, none."""


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


@pytest.mark.parametrize("page_rows", [1, 3, 16, 80, 1000])
@pytest.mark.parametrize("shape", AWKWARD)
def test_pages_hold_every_path(shape: str, page_rows: int) -> None:
    packed = pack(PrefixTree.build(AWKWARD[shape]))
    check_pages(packed, page_rows)


@given(tree=tree_strategy(max_trajectories=8, max_length=70), page_rows=st.integers(1, 40))
@settings(max_examples=30, deadline=None)
def test_pages_of_random_trees(tree: PrefixTree, page_rows: int) -> None:
    check_pages(pack(tree), page_rows)
    check_paths(pack(tree), page_rows)


def check_pages(packed: PackedTree, page_rows: int) -> None:
    """The pages of a chain are its path, as `forward_calls` gathers it, and no page but one of each chain is copied."""
    rows = torch.arange(packed.num_rows)
    pages = key_pages(packed, page_rows)
    paged = pages.view(rows.view(-1, 1, 1).double()).flatten(1)
    want = torch.cat([take(rows, call.keys) for call in forward_calls(packed)]).split(packed.blocks.length_C.tolist())
    for path, first_row, length in zip(want, pages.first_row_CP.long(), pages.key_length_C.tolist(), strict=True):
        used = -(-length // page_rows)
        assert torch.equal(paged[first_row[:used]].flatten()[:length].long(), path)
        assert not first_row[used:].any()
    assert len(pages.copied_X) <= page_rows * int((packed.blocks.parent_C >= 0).sum())
    assert page_rows > 1 or len(pages.copied_X) == 0


@pytest.mark.parametrize("shape", ["star", "lengths 63/64/65", "prefix of another", "forest", "duplicates", "comb"])
def test_attention_over_pages(shape: str) -> None:
    check_paths(pack(PrefixTree.build(AWKWARD[shape]), device=DEVICE), page_rows=16)


def test_what_lies_behind_a_path_is_never_seen() -> None:
    """Rows of other chains fill up the last page of a path; whatever is in them, outputs stay as they are."""
    packed = pack(PrefixTree.build(AWKWARD["star"]), device=DEVICE)
    q, k, v = inputs_of(packed)
    out = attend_paths(q, k, v, packed, 0.3, PlainKernel(16), False)
    first = packed.blocks.length_C[0]
    k[first:], v[first:] = 1e6, -1e6
    assert torch.equal(attend_paths(q, k, v, packed, 0.3, PlainKernel(16), False)[:first], out[:first])


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
        (call,) = forward_calls(packed)
        call.keys[-1 - call.query_lengths[-1]] = 0
    else:
        pages = key_pages(packed, page_rows)
        pages.first_row_CP[-1, 1] += 1
    with pytest.raises(AssertionError, match="error"):
        check_paths(packed, page_rows, truth=pack(packed.tree, device=DEVICE))


@pytest.mark.parametrize("gaps", [False, True])
@pytest.mark.parametrize("query_cost", QUERY_COSTS)
@pytest.mark.parametrize("key_cap", [1, 40, 100_000])
@pytest.mark.parametrize("shape", AWKWARD)
def test_backward_covers_every_visible_pair_once(
    shape: str, key_cap: int, query_cost: float, gaps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    share_much(monkeypatch, query_cost)
    packed = pack(PrefixTree.build(AWKWARD[shape]), key_cap=key_cap)
    plan = plan_backward(packed, gaps=gaps)
    calls = [call for stage in plan.stages for call in stage.calls]
    pairs = 0
    for call in calls:
        lengths = list(zip(call.query_lengths, call.key_lengths, strict=True))
        pairs += sum(q * k - (q * (q - 1) // 2 if call.causal else 0) for q, k in lengths)
        assert len(call.key_lengths) == 1 or sum(call.key_lengths) <= key_cap
    assert pairs == int((packed.position_T + 1).sum())
    rows = torch.arange(packed.num_rows)
    used = [torch.cat(queries_of(rows[call.queries], call)) for call in calls]
    for call, queries in zip(calls, used, strict=True):
        assert len(queries.unique()) == sum(call.query_lengths)  # no query twice in a call
        assert sum(call.query_lengths) <= call.num_queries <= (1 + gaps) * sum(call.query_lengths)
    planned = rows[plan.queries] if isinstance(plan.queries, slice) else plan.queries
    assert len(planned) == sum(call.num_queries for call in calls)
    assert torch.equal(planned[planned < packed.num_rows], torch.cat(used))
    queries = sum(sum(call.query_lengths) for call in calls)
    for stage in plan.stages:
        keys = sum(sum(call.key_lengths) for call in stage.calls)
        assert len(rows[stage.keys]) == keys
        assert len(stage.calls) == 1 or keys <= key_cap + 2 * packed.num_rows
    if query_cost == 1e9:
        assert queries == packed.num_rows
        assert sum(sum(call.key_lengths) for call in calls) == packed.blocks.gathered_keys


def plan_of(rows: list[list[int]], monkeypatch: pytest.MonkeyPatch, query_cost: float = 2.4) -> list[Call]:
    share_much(monkeypatch, query_cost)
    packed = pack(PrefixTree.build(to_trajectories(np.random.default_rng(0), rows)))
    return [call for stage in plan_backward(packed).stages for call in stage.calls]


def test_queries_with_gaps_are_a_view(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows below two stems: what lies between them is left out, where it is no more than what is used."""
    stems = [[1] * 300, [2] * 300]
    for legs, is_view in ((120, True), (6, False)):
        rows = [[*stem, *range(10 + leg, 15 + leg)] for stem in stems for leg in range(legs)]
        share_much(monkeypatch, 2.4)
        packed = pack(PrefixTree.build(to_trajectories(np.random.default_rng(0), rows)))
        *_, shared = (call for stage in plan_backward(packed, gaps=True).stages for call in stage.calls)
        assert len(shared.query_lengths) == 2
        assert isinstance(shared.queries, slice) == is_view
        assert (shared.used_queries_C is not None) == is_view
        check_paths(packed)


def test_backward_shares_a_stem(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seven rows read their long stem once; the key that one of them has in common with an eighth is gathered."""
    stem = [1] * 300
    rows = [[*stem, 2, 3], [*stem, 2, 4]] + [[*stem, 5 + i] for i in range(6)]
    chains, shared = plan_of(rows, monkeypatch)
    assert (chains.causal, shared.causal) == (True, False)
    assert sorted(chains.key_lengths) == [1] * 6 + [2, 302]
    assert (shared.query_lengths, shared.key_lengths) == ((7,), (300,))


def test_backward_shares_the_trunk_of_a_comb_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight turns, each with thinking that the next does not see: halves of the trunk, halves of halves."""
    trunk = list(range(1000, 1800))
    rows = [[*trunk[: 100 * turn], turn, *range(39)] for turn in range(1, 9)]
    chains, *shared = plan_of(rows, monkeypatch)
    keys = sum(chains.key_lengths) + sum(sum(call.key_lengths) for call in shared)
    (whole,) = plan_of(rows, monkeypatch, query_cost=1e9)
    assert keys < 0.6 * sum(whole.key_lengths)
    assert [call.causal for call in shared] == [False, False]
    first, second = (list(zip(call.query_lengths, call.key_lengths, strict=True)) for call in shared)
    assert first == [(160, 400), (80, 200)]  # four of seven branches (the eighth turn is the chain), two others
    assert second == [(80, 200)]  # the deeper two of the four


def test_a_part_pays_for_its_call_and_for_queries_of_chains_below(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chain and another one below it have three rows, and share a stem of 100 keys."""
    stem = [1] * 100
    rows = [[*stem, 4, 5, 6, 7], [*stem, 2, 3], [*stem, 2, 9]]
    for part_cost, is_shared in ((93, True), (94, False)):  # 100 keys less 2 for each of three queries
        share_much(monkeypatch, 2.0)
        monkeypatch.setattr(branches, "PART_COST", part_cost)
        packed = pack(PrefixTree.build(to_trajectories(np.random.default_rng(0), rows)))
        calls = [call for stage in plan_backward(packed).stages for call in stage.calls]
        assert (len(calls) == 2) == is_shared
        assert [call.key_lengths for call in calls[1:]] == [(100,)] * is_shared
        assert [call.query_lengths for call in calls[1:]] == [(3,)] * is_shared


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
    for shape in SHAPES:
        for key_cap, query_cost in ((700, 1e9), (700, 0.0), (100_000, 0.0)):
            share_much(monkeypatch, query_cost)
            packed = pack(PrefixTree.build(AWKWARD[shape]), key_cap=key_cap, device=DEVICE)
            plan = plan_backward(packed, gaps=impl == "fa4")
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
    assert (gaps > 0) == (impl == "fa4")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("impl", FLASH)
@pytest.mark.parametrize("shape", SHAPES)
def test_bits_equal_those_of_separate_rows(shape: str, impl: str) -> None:
    outputs = []
    for share in ("tree", "none"):
        packed = pack(PrefixTree.build(AWKWARD[shape], share=share), key_cap=1500, device=DEVICE)
        place = packed.position_T * 64 + packed.token_ids_T  # inputs: functions of the token and its depth
        tables = [draw(AWKWARD_DEPTH * 64, heads, 256, seed=heads) for heads in (16, 4, 2)]
        q, k, v = tables[0][place], tables[1][place], tables[2][place].repeat_interleave(2, 1)
        op = lambda *x, packed=packed, impl=impl: attention(*x, packed, scale=0.06, impl=impl)  # noqa: E731
        outputs.append(run(op, [q, k, v], torch.bfloat16)[0][packed.row_of_N])
    assert torch.equal(outputs[0], outputs[1])
