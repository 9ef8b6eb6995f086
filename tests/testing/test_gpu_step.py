"""The benchmark of whole steps, on a tiny model: what it runs is the same everywhere, what it counts is right."""

import dataclasses
from typing import Any

import pytest
import torch

from harts.models.attach import find_backbone
from harts.ops.kernels import Kernels
from harts.testing.gpu_step import Setting, gradient_errors, summarise, time_arm
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
SETTING = Setting(kernels=Kernels(), fused=False, recompute=True, token_budget=1200)


def test_arms_agree_and_count_their_own_work() -> None:
    trajectories = workload("star3", scale=0.015)
    model = build_model(TINY, device="cpu", dtype=torch.float32)
    records, scores = {}, {}
    for arm in ("rows", "merged", "tree", "plain"):
        records[arm], scores[arm] = time_arm(
            model, arm, trajectories, SETTING, repeats=2, warm_up=0, baseline_N=scores.get("rows")
        )
    assert [record["check"] for record in records.values()] == ["none", "passed", "passed", "passed"]
    assert all(len(record["seconds"]) == 2 for record in records.values())
    assert records["tree"]["rows"] < records["rows"]["rows"] == records["plain"]["rows"] == records["rows"]["tokens"]
    assert records["rows"]["microbatches"] > records["tree"]["microbatches"] == 1
    assert max(float((scores[arm] - scores["rows"]).abs().max()) for arm in scores) < 1e-5
    assert not any(p.grad is not None for p in model.parameters())
    summary = summarise(list(records.values()), find_backbone(model).config, trajectories)
    speedup, limit, efficiency = (summary[name] for name in ("speedup_over_rows", "flop_limit", "efficiency_over_rows"))
    assert speedup is not None
    assert limit is not None
    assert efficiency == pytest.approx(speedup / limit, abs=2e-3)


def test_an_arm_that_is_off_gets_no_time() -> None:
    trajectories = workload("star3", scale=0.01)
    model = build_model(TINY, device="cpu", dtype=torch.float32)
    _, scores = time_arm(model, "rows", trajectories, SETTING, warm_up=0)
    scores[scores != 0] += 0.01
    record, _ = time_arm(model, "tree", trajectories, SETTING, warm_up=0, baseline_N=scores)
    assert record["check"] == "failed"
    assert "seconds" not in record
    assert "tflop_per_s" not in record


def test_gradient_errors_of_tree_and_rows_are_alike() -> None:
    trajectories = workload("star3", scale=0.01)
    setting = dataclasses.replace(SETTING, recompute=False)
    errors = gradient_errors(trajectories, setting, TINY, device="cpu")
    assert 1e-4 < errors["gradient_error_rows"] < 0.1
    assert 0.5 < errors["gradient_error_ratio_median"] < 2


def test_a_mixture_of_experts_runs_the_same_arms() -> None:
    trajectories = workload("star3", scale=0.01)
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    changes = {**TINY, **experts, "shared_expert_intermediate_size": 32}
    model = build_model(changes, shape="qwen3.5-35b-a3b", device="cpu", dtype=torch.float32)
    assert find_backbone(model).config._experts_implementation == "grouped_mm"
    _, rows = time_arm(model, "rows", trajectories, SETTING, warm_up=0)
    record, _ = time_arm(model, "tree", trajectories, SETTING, warm_up=0, baseline_N=rows)
    assert record["check"] == "passed"
    assert record["tflop"] >= 0
