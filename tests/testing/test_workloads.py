"""The workloads: their sizes, their shape under scaling, and what they refuse."""

import dataclasses
import gzip
import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from harts.testing.trees import AWKWARD
from harts.testing.workloads import WORKLOADS, shrink, workload
from harts.trajectory import Trajectory
from harts.tree import PrefixTree
from harts.vocabulary import remap_vocabulary

SYNTHETIC = [name for name, about in WORKLOADS.items() if not about.files]
REAL = [name for name, about in WORKLOADS.items() if about.files]


def _need(name: str, **sizes: int | None) -> list[Trajectory]:
    try:
        return workload(name, **sizes)
    except ValueError as error:
        if "found none" in str(error):
            pytest.skip(f"no data for {name}")
        raise


def _same(first: list[Trajectory], second: list[Trajectory]) -> bool:
    return all(
        np.array_equal(a.token_ids, b.token_ids) and np.array_equal(a.loss_mask, b.loss_mask) and a.id == b.id
        for a, b in zip(first, second, strict=True)
    )


def test_all_named_in_the_issue_are_there() -> None:
    assert SYNTHETIC == ["star3", "grpo", "think", "swe", "search", "flat", "thin"]
    assert REAL == ["tau", "mint", "toolbench", "pi", "openhands"]


def test_star3_has_the_rows_it_promises() -> None:
    tree = PrefixTree.build(workload("star3"))
    assert sorted(tree.length_S.tolist()) == [1_029] * 16 + [2_055] * 4 + [12_321]
    assert not tree.trained_T[:12_321].any()
    assert tree.trained_T[12_321:].all()


def test_flat_shares_nothing_and_thin_a_tenth_in_short_segments() -> None:
    flat = PrefixTree.build(workload("flat"))
    assert (flat.num_rows, flat.num_tokens) == (16 * 4_096, 16 * 4_096)
    for seed in range(5):
        thin = PrefixTree.build(workload("thin", seed=seed))
        assert 1.07 < thin.sharing < 1.13
        inner_S = np.isin(np.arange(thin.num_segments), thin.parent_S)
        assert inner_S.sum() > 150
        assert np.median(thin.length_S[inner_S]) < 30


def test_grpo_responses_are_log_normal_around_1000() -> None:
    lengths = np.array([each.num_trained for each in workload("grpo", responses=500)])
    assert abs(np.log(lengths).mean() - np.log(1_000)) < 0.1
    assert abs(np.log(lengths).std() - 0.5) < 0.1


def test_think_drops_the_reasoning_from_later_turns() -> None:
    first, second = workload("think", rollouts=1, turns=2)
    reasoning_start = int(np.argmax(first.loss_mask))
    assert np.array_equal(first.token_ids[:reasoning_start], second.token_ids[:reasoning_start])
    assert first.token_ids[reasoning_start] != second.token_ids[reasoning_start]
    observation = reasoning_start - 4_800
    assert 200 <= observation <= 1_000
    answer = 100  # the last tokens of the response come back, right behind the observation
    assert first.token_ids[-answer:].tobytes() in second.token_ids[reasoning_start:].tobytes()


def test_swe_cuts_the_context_back_three_times() -> None:
    lengths = [len(each) for each in workload("swe", rollouts=1)]
    assert len(lengths) == 40
    assert 1 <= sum(after < before for before, after in itertools.pairwise(lengths)) <= 3


def test_search_has_its_depth_and_children() -> None:
    tree = PrefixTree.build(workload("search", depth=4))
    level = [0] * tree.num_segments
    for segment, parent in enumerate(tree.parent_S.tolist()):
        level[segment] = level[parent] + 1 if parent >= 0 else 0
    assert max(level) == 3
    children = np.bincount(tree.parent_S[1:], minlength=tree.num_segments)
    assert set(children[children > 0].tolist()) <= {2, 3, 4}
    assert 256 <= tree.length_S.min() <= tree.length_S.max() <= 1_024


@pytest.mark.parametrize("name", SYNTHETIC)
def test_seeded_and_of_one_shape_at_every_scale(name: str) -> None:
    small = workload(name, scale=0.05)
    assert _same(small, workload(name, scale=0.05))
    assert not _same(small, workload(name, scale=0.05, seed=1)) if name not in ("star3", "flat") else True
    large = workload(name, scale=0.1)
    assert [each.id for each in large] == [each.id for each in small]
    if name != "thin":  # its segments are too short to survive
        assert PrefixTree.build(small).num_segments == PrefixTree.build(large).num_segments
    assert sum(map(len, small)) == pytest.approx(0.5 * sum(map(len, large)), rel=0.05)


@pytest.mark.parametrize("name", REAL)
def test_real_rows_keep_their_tree_when_shrunk(name: str) -> None:
    whole = _need(name)
    tree, small = PrefixTree.build(whole), PrefixTree.build(workload(name, scale=0.05))
    assert np.array_equal(tree.parent_S, small.parent_S)
    assert np.array_equal(tree.multiplicity_S, small.multiplicity_S)
    assert small.num_rows < 0.1 * tree.num_rows
    ids = remap_vocabulary(small.trajectories)[0]
    assert max(each.token_ids.max() for each in ids) < 2_000


def test_tau_is_the_same_from_the_bundled_and_the_full_file() -> None:
    bundled = Path(__file__).parents[2] / "examples" / "data"
    assert _same(workload("tau", data_dir=bundled, scale=0.1), _need("tau", scale=0.1))


def test_sizes_limit_what_is_taken() -> None:
    assert len({each.group for each in _need("tau", groups=2)}) == 2
    assert max(map(len, _need("tau", groups=1, max_length=6_000))) <= 6_000
    assert len(workload("think", rollouts=2, turns=3)) == 6


@pytest.mark.parametrize("name", AWKWARD)
def test_shrink_keeps_shape_masks_and_fields(name: str) -> None:
    trajectories = AWKWARD[name][:40]
    tree, small = PrefixTree.build(trajectories), PrefixTree.build(shrink(trajectories, 0.3))
    assert np.array_equal(tree.parent_S, small.parent_S)
    assert (small.length_S <= tree.length_S).all()
    for before, after in zip(trajectories, small.trajectories, strict=True):
        assert (before.id, before.reward) == (after.id, after.reward)
        assert after.advantages is not None
        assert before.advantages is not None
        assert after.advantages[0] == before.advantages[0]
    assert _same(shrink(trajectories, 1.0), trajectories)


def test_shrink_cuts_every_field_with_a_value_per_token() -> None:
    names = {field.name for field in dataclasses.fields(Trajectory)}
    per_token = {"token_ids", "loss_mask", "logprobs", "ref_logprobs", "advantages", "merge_keys", "routes"}
    assert names - per_token == {"group", "id", "reward", "temperature", "meta"}  # a new field belongs to one of them
    length = 40
    full = Trajectory(
        token_ids=np.arange(length),
        loss_mask=np.arange(length) >= 20,
        logprobs=-np.arange(length) / 8,
        ref_logprobs=-np.arange(length) / 4,
        advantages=np.arange(length) / 2,
        merge_keys=np.arange(length) * 3,
        routes=np.stack([np.arange(length), np.arange(length) + 1], -1)[:, None],
    )
    (short,) = shrink([full], 0.25)
    kept = [*range(5), *range(20, 25)]
    for name in per_token:
        assert np.array_equal(getattr(short, name), getattr(full, name)[kept]), name


def test_remap_keeps_the_tree() -> None:
    trajectories = workload("grpo", scale=0.05)
    remapped, old_V = remap_vocabulary(trajectories)
    assert np.array_equal(old_V[remapped[3].token_ids], trajectories[3].token_ids)
    assert {int(each.token_ids.max()) for each in remapped} <= set(range(len(old_V)))
    before, after = PrefixTree.build(trajectories), PrefixTree.build(remapped)
    assert after.num_rows == before.num_rows
    with pytest.raises(ValueError, match="at least one"):
        remap_vocabulary([])


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("stars", {}, "expected one of star3, grpo"),
        ("star3", {"scale": 0.0}, "scale: expected a factor above 0"),
        ("star3", {"scale": 1.5}, "scale: expected a factor above 0"),
        ("star3", {"turns": 3}, "there is no size 'turns'; expected one of: none"),
        ("think", {"turn": 3}, "expected one of: rollouts, turns"),
        ("think", {"turns": 0}, "turns: expected at least 1, got 0"),
        ("flat", {"vocab_size": 1}, "vocab_size: expected at least 2"),
        ("mint", {"data_dir": "no-such-directory"}, "expected mint.jsonl.gz in no-such-directory, found none"),
    ],
)
def test_bad_input(name: str, arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        workload(name, **arguments)  # type: ignore[arg-type]


def test_more_groups_than_there_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = {"id": "a", "messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]}
    with gzip.open(tmp_path / "mint.jsonl.gz", "wt") as file:
        file.write(json.dumps(row) + "\n")
    monkeypatch.setenv("HARTS_DATA", str(tmp_path))
    with pytest.raises(ValueError, match=r"groups: expected at most the 1 in .*mint.jsonl.gz, got 12"):
        workload("mint")
    with pytest.raises(ValueError, match=r"no call of .* has at most 2 tokens"):
        workload("mint", groups=1, max_length=2)
    assert len(workload("mint", groups=1)) == 1
