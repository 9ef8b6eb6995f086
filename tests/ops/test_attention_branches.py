"""The calls of attention's backward: which keys are shared, which gathered, which queries left out."""

import dataclasses

import numpy as np
import pytest
import torch
from plain_attention import QUERY_COSTS, check_paths, queries_of, share_much

from harts.layout import pack
from harts.ops.attention import branches
from harts.ops.attention.branches import plan_backward
from harts.ops.attention.calls import Call
from harts.testing.trees import AWKWARD, to_trajectories
from harts.tree import PrefixTree


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
    planned = rows if plan.queries is None else plan.queries.index_K
    assert len(planned) == sum(call.num_queries for call in calls)
    assert torch.equal(planned[planned < packed.num_rows], torch.cat(used))
    queries = sum(sum(call.query_lengths) for call in calls)
    for stage in plan.stages:
        keys = sum(sum(call.key_lengths) for call in stage.calls)
        assert (packed.num_rows if stage.keys is None else len(stage.keys)) == keys
        assert len(stage.calls) == 1 or keys <= key_cap + 2 * packed.num_rows
    if query_cost == 1e9:
        assert queries == packed.num_rows
        assert sum(sum(call.key_lengths) for call in calls) == int(packed.chains.length_C.sum())


def test_keys_of_several_calls_are_added_up_at_once_where_they_are_few() -> None:
    """Up to twice the rows beyond what one call may have; then call by call."""
    packed = pack(PrefixTree.build(AWKWARD["comb"]), key_cap=1)
    keys, rows = int(packed.chains.length_C.sum()), packed.num_rows
    assert keys > 2 * rows + 1
    for key_cap, at_once in ((keys - 2 * rows, True), (keys - 2 * rows - 1, False)):
        plan = plan_backward(dataclasses.replace(packed, key_cap=key_cap))
        assert (len(plan.stages) == 1) == at_once
        assert sum(len(stage.calls) for stage in plan.stages) > 1


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
