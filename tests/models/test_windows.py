"""Models with sliding windows in some or all layers, against untouched transformers."""

from typing import Any

import pytest
import torch
from test_models import SeparateRows, compare

import harts
from harts.models import tiny_model
from harts.models.attach import find_backbone
from harts.models.kernel_choice import _choose
from harts.ops.kernels import Kernels
from harts.testing.fp64 import all_fp64
from harts.testing.trees import AWKWARD
from harts.tree import PrefixTree

BRANCHES = AWKWARD["branches at 63/64/65 inside branches"]
MIXED = ["full_attention", "sliding_attention"]
SETTINGS: dict[str, dict[str, Any]] = {
    "tiny-ministral3": {"sliding_window": 30},
    "tiny-mixtral": {"sliding_window": 30},
    "tiny-dots1": {"sliding_window": 30, "layer_types": MIXED},
    "tiny-qwen2-moe": {"sliding_window": 30, "use_sliding_window": True, "layer_types": MIXED},
    "tiny-qwen3": {"sliding_window": 30, "use_sliding_window": True, "max_window_layers": 1},
    "tiny-qwen3-moe": {"sliding_window": 30, "use_sliding_window": True},
    "tiny-smollm3": {"sliding_window": 30, "use_sliding_window": True, "layer_types": 2 * MIXED},
}
"""Families whose layers may have windows, and whose presets have none."""


@pytest.mark.parametrize("name", list(SETTINGS))
def test_every_family_with_windows_in_fp64(name: str, separate_rows: SeparateRows) -> None:
    with all_fp64():
        model = tiny_model(name, dtype=torch.float64, **SETTINGS[name])
        logprob_error, grad_error = compare(model, AWKWARD["comb"][:6], separate_rows)
    assert logprob_error < 1e-10
    assert grad_error < 1e-8


@pytest.mark.parametrize("window", [1, 63, 64, 65, 1000])
def test_windows_at_block_boundaries_and_longer_than_every_path(window: int, separate_rows: SeparateRows) -> None:
    with all_fp64():
        model = tiny_model("tiny-mistral", dtype=torch.float64, sliding_window=window)
        logprob_error, grad_error = compare(model, BRANCHES, separate_rows)
    assert logprob_error < 1e-10
    assert grad_error < 1e-8


@pytest.mark.parametrize("off", [-1, 1])
def test_law_fails_with_another_window(off: int, separate_rows: SeparateRows) -> None:
    with all_fp64(), torch.no_grad():
        model = tiny_model("tiny-mistral", dtype=torch.float64, sliding_window=20)
        expected, _ = separate_rows(model, BRANCHES)
        model.config.sliding_window = 20 + off
        ours = harts.logprobs(harts.attach(model), harts.pack(PrefixTree.build(BRANCHES)))
    assert float((ours - expected).abs().max()) > 1e-6


def test_kernels_on_a_gpu_are_the_plain_ones_until_windows_are_measured_there() -> None:
    fastest = Kernels(attention="fa4")
    for name, changes, impl in (
        ("tiny-mistral", {}, "reference"),
        ("tiny-mistral", {"sliding_window": None}, "fa4"),
        ("tiny-qwen2", {}, "reference"),
        ("tiny-qwen3", {}, "fa4"),
    ):
        config = find_backbone(tiny_model(name, **changes)).config
        assert _choose(fastest, torch.bfloat16, config).attention == impl
