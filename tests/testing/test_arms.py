"""The arms of a comparison: each runs what it says, all give the same log-probs, and the model comes out clean."""

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from harts.models.attach import find_backbone
from harts.ops.kernels import Kernels
from harts.testing.arms import ARMS, Setting, prepare, run_step, set_up
from harts.testing.gradients import gradient_errors
from harts.testing.measure import measure
from harts.testing.shapes import build_model
from harts.testing.workloads import workload

TINY: dict[str, Any] = {
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "vocab_size": 1024,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10_000_000.0,
        "partial_rotary_factor": 0.25,
        "mrope_section": [1, 1, 0],
    },
}
EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
SETTING = Setting(token_budget=1200, kernels=Kernels(), recompute=True)


def test_arms_agree_and_count_their_own_work() -> None:
    trajectories = workload("star3", scale=0.015)
    model = build_model(TINY, device="cpu", dtype=torch.float32)
    measured = measure(model, trajectories, SETTING, arms=tuple(ARMS), turns=2)
    rows, tree, plain = (measured.arms[arm] for arm in ("rows", "tree", "plain"))
    assert tree.counts.rows < rows.counts.rows == plain.counts.rows == sum(map(len, trajectories))
    assert rows.microbatches > tree.microbatches == 1
    assert all(len(each.seconds) == 2 and each.logprob_max_abs < 1e-5 for each in measured.arms.values())
    assert measured.arms["shuffled"].bitwise_equal == 1.0  # the order of microbatches changes no log-prob
    assert measured.limit("plain") is None
    assert not any(p.grad is not None for p in model.parameters())


def test_arms_give_the_same_gradients() -> None:
    trajectories = workload("star3", scale=0.01)
    weights = torch.linspace(-1, 2, len(trajectories)).tolist()
    model = build_model(TINY, device="cpu", dtype=torch.float32)
    found = {}
    for arm in ARMS:
        set_up(model, arm, SETTING)
        run_step(model, prepare(trajectories, arm, SETTING), kernels=SETTING.kernels, weights_B=weights)
        found[arm] = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        model.zero_grad(set_to_none=True)
    scale = found["plain"].norm()
    assert scale > 0
    assert all((each - found["plain"]).norm() < 1e-5 * scale for each in found.values())


def test_a_step_without_trained_tokens_is_refused() -> None:
    unmarked = [dataclasses.replace(each, loss_mask=0 * each.loss_mask) for each in workload("star3", scale=0.01)]
    model = build_model(TINY, device="cpu", dtype=torch.float32)
    set_up(model, "tree", SETTING)
    with pytest.raises(ValueError, match="expected a trained token in at least one of 16 trajectories, got none"):
        run_step(model, prepare(unmarked, "tree", SETTING), kernels=SETTING.kernels)


def test_the_state_of_a_model_is_that_of_its_arm() -> None:
    model = build_model(TINY, device="cpu", dtype=torch.float32)
    layers = [m for m in find_backbone(model).text.modules() if hasattr(m, "gradient_checkpointing")]
    assert len(layers) >= TINY["num_hidden_layers"]
    set_up(model, "plain", SETTING)
    assert not find_backbone(model).attached
    assert all(layer.gradient_checkpointing for layer in layers)
    set_up(model, "tree", Setting(token_budget=1))
    assert find_backbone(model).attached
    assert not any(layer.gradient_checkpointing for layer in layers)


def test_gradient_errors_of_tree_and_rows_are_alike_and_the_model_stays() -> None:
    trajectories = workload("star3", scale=0.01)
    model = build_model(TINY, device="cpu")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    buffers = {name: tensor.clone() for name, tensor in model.named_buffers()}
    errors = gradient_errors(model, trajectories, Setting(token_budget=1200, kernels=Kernels()))
    assert 1e-4 < errors.rows_median < 0.1
    assert 0.5 < errors.ratio_median < 2
    assert errors.ratio_worst >= errors.ratio_worst_matrix > 0
    assert 0 < errors.tree_from_rows < errors.rows_median * 2
    assert errors.worst in before
    assert errors.parameters == len(list(model.parameters()))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(torch.equal(tensor, buffers[name]) for name, tensor in model.named_buffers())
    untrained = [dataclasses.replace(each, loss_mask=np.zeros(len(each), np.bool_)) for each in trajectories]
    with pytest.raises(ValueError, match="expected a trained token"):
        gradient_errors(model, untrained, SETTING)
    with pytest.raises(ValueError, match="expected bfloat16 or float16"):
        gradient_errors(model.float(), trajectories, SETTING)


def test_a_mixture_of_experts_runs_the_same_arms() -> None:
    trajectories = workload("star3", scale=0.01)
    model = build_model({**TINY, **EXPERTS}, shape="qwen3.5-35b-a3b", device="cpu", dtype=torch.float32)
    assert find_backbone(model).config._experts_implementation == "grouped_mm"
    measured = measure(model, trajectories, SETTING, turns=1)
    assert measured.arms["tree"].logprob_max_abs < 1e-5
    assert measured.arms["tree"].flops > 0
