"""The comparison of a tree with separate rows: it holds for what is right and fails for what is broken."""

import dataclasses
import importlib
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from harts.blocks import BLOCK
from harts.layout import PackedTree, pack
from harts.models import attach, tiny_model
from harts.models.attach import find_backbone
from harts.ops.chains import levels
from harts.testing.compare import compare, score_rows
from harts.testing.trees import AWKWARD, AWKWARD_VOCAB, random_trajectories
from harts.trajectory import Trajectory
from harts.tree import PrefixTree

# not attributes of harts.ops: its function has the name of the package
delta = importlib.import_module("harts.ops.gated_delta_rule")
delta_reference = importlib.import_module("harts.ops.gated_delta_rule.reference")


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return tiny_model("tiny-qwen3.5", vocab_size=AWKWARD_VOCAB, num_hidden_layers=4)


@pytest.fixture(scope="module")
def trajectories() -> list[Trajectory]:
    return random_trajectories(np.random.default_rng(0), num_trajectories=6, max_length=200)


@pytest.mark.parametrize("preset", ["tiny-qwen3.5", "tiny-qwen3", "tiny-llama"])
def test_fp64_law_holds(preset: str, trajectories: list[Trajectory]) -> None:
    result = compare(tiny_model(preset, vocab_size=AWKWARD_VOCAB), trajectories, dtype=torch.float64)
    assert result.ok, result.failures
    assert result.logprob_max_abs < 1e-12
    assert result.grad_max_rel < 1e-11
    assert 0.2 < result.logprob_bitwise_equal_fraction <= 1
    assert result.grad_error_ratio is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lower_precision_is_judged_by_fp64(
    dtype: torch.dtype, model: torch.nn.Module, trajectories: list[Trajectory]
) -> None:
    result = compare(model, trajectories, dtype=dtype)
    assert result.ok, result.failures
    assert result.logprob_max_abs > 1e-8
    assert result.logprob_error_ratio is not None
    assert 0.5 < result.logprob_error_ratio < 1.25


@pytest.mark.parametrize("name", ["duplicates", "empty response", "lengths 63/64/65", "one-token branches"])
def test_awkward_trees(name: str, model: torch.nn.Module) -> None:
    assert compare(model, AWKWARD[name], dtype=torch.float64).ok


def test_packed_separate_rows_are_compared_too(model: torch.nn.Module, trajectories: list[Trajectory]) -> None:
    result = compare(model, trajectories, dtype=torch.float64, share="none")
    assert result.ok
    assert result.rows == result.tokens > compare(model, trajectories, dtype=torch.float64).rows


def test_the_model_is_left_as_it_was(model: torch.nn.Module, trajectories: list[Trajectory]) -> None:
    before = {name: value.clone() for name, value in model.state_dict().items()}
    compare(model, trajectories[:2], dtype=torch.bfloat16)
    assert not find_backbone(model).attached
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_temperatures_count(model: torch.nn.Module, trajectories: list[Trajectory]) -> None:
    warmer = [dataclasses.replace(each, temperature=0.7 + 0.1 * (at % 3)) for at, each in enumerate(trajectories)]
    assert compare(model, warmer, dtype=torch.float64).ok


def _no_initial_state(u: Tensor, w: Tensor, *_: object) -> tuple[Tensor, ...]:
    zero = u.new_zeros(*u.shape[:2], w.shape[-1], u.shape[-1])
    return zero, zero, u


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_fails_where_branches_start_from_a_zero_state(
    dtype: torch.dtype, model: torch.nn.Module, trajectories: list[Trajectory], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.import_module("harts.ops.linear_attention.reference"), "_recur", _no_initial_state)
    result = compare(model, trajectories, dtype=dtype)
    assert not result.ok
    assert any("log-prob" in failure for failure in result.failures)


def test_fails_where_one_block_continues_another(model: torch.nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    right = delta_reference.gated_delta_rule_reference

    def misled(*inputs: Any) -> tuple[Tensor, Tensor]:
        packed: PackedTree = dataclasses.replace(inputs[5])
        layout = packed.layout(levels, BLOCK, ())
        wrong = layout.parent_E.clone()
        wrong[-1] = 0 if wrong[-1] else min(1, layout.level_sizes[-2] - 1)
        packed._layouts[levels, BLOCK, ()] = dataclasses.replace(layout, parent_E=wrong)
        return right(*inputs[:5], packed, *inputs[6:])

    monkeypatch.setitem(delta._IMPLEMENTATIONS, "reference", misled)
    assert not compare(model, AWKWARD["branches at 63/64/65 inside branches"], dtype=torch.float64).ok


def test_fails_where_gradients_miss_a_trajectory(
    model: torch.nn.Module, trajectories: list[Trajectory], monkeypatch: pytest.MonkeyPatch
) -> None:
    import harts.testing.compare as module

    packed = pack(PrefixTree.build(trajectories))
    whole = module._loss_weights(packed.loss_mask_N, 0)
    less = whole.clone()
    less[:, : packed.lengths[0]] = 0
    score_packed = module.score_packed

    def forgetful(*args: object, **kwargs: object) -> object:
        monkeypatch.setattr(module, "_loss_weights", lambda *_: less)
        scores = score_packed(*args, **kwargs)  # type: ignore[arg-type]
        monkeypatch.setattr(module, "_loss_weights", lambda *_: whole)
        return scores

    monkeypatch.setattr(module, "score_packed", forgetful)
    result = compare(model, trajectories, dtype=torch.float64)
    assert [failure.split()[0] for failure in result.failures] == ["gradient"]


def test_bad_input(model: torch.nn.Module, trajectories: list[Trajectory]) -> None:
    untrained = [dataclasses.replace(each, loss_mask=np.zeros(len(each), np.bool_)) for each in trajectories]
    with pytest.raises(ValueError, match="expected a trained token, got none"):
        compare(model, untrained)
    with pytest.raises(ValueError, match="dtype: expected float64, float32 or bfloat16"):
        compare(model, trajectories, dtype=torch.float16)
    with pytest.raises(ValueError, match="expected ids below the vocabulary size 10"):
        compare(tiny_model("tiny-llama", vocab_size=10), trajectories)
    frozen = tiny_model("tiny-llama", vocab_size=AWKWARD_VOCAB).requires_grad_(False)
    with pytest.raises(ValueError, match="expected parameters that require a gradient"):
        compare(frozen, trajectories)
    with pytest.raises(ValueError, match="expected one that is not attached"):
        score_rows(attach(tiny_model("tiny-llama", vocab_size=AWKWARD_VOCAB)), trajectories)
