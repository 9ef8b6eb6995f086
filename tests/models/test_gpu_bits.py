"""On a GPU: log-probs of a tree have the bits of packed separate rows, and everything those of another run."""

import dataclasses

import pytest
import torch
from torch import nn

from harts.layout import pack
from harts.models import logprobs
from harts.ops.kernels import Kernels
from harts.testing.gpu_step import Setting, build_model, time_arm
from harts.testing.workloads import workload
from harts.tree import PrefixTree

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]

# The widths of the real model: of narrower products cuBLAS picks another kernel for every number of rows.
CHANGES = {"num_hidden_layers": 4, "vocab_size": 32_768}


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return build_model(CHANGES)


def setting(recompute: bool = True, fused: bool = True, **kernels: object) -> Setting:
    chosen = dataclasses.replace(Kernels.fastest(), chunk_rows=1024, **kernels)  # type: ignore[arg-type]
    return Setting(kernels=chosen, fused=fused, recompute=recompute, token_budget=8192)


@pytest.mark.parametrize("name", ["star3", "grpo", "thin", "search"])
def test_bits_of_separate_rows(model: nn.Module, name: str) -> None:
    trajectories = workload(name, scale=0.1)
    for options in (setting(), setting(recompute=False), setting(fused=False), setting(attention="varlen")):
        _, rows_N = time_arm(model, "rows", trajectories, options, warm_up=0)
        record, _ = time_arm(model, "tree", trajectories, options, warm_up=0, baseline_N=rows_N)
        assert record["bitwise_equal"] == 1.0, (options, record)


def test_gradients_of_two_runs_have_the_same_bits(model: nn.Module) -> None:
    options = setting(deterministic=True)
    time_arm(model, "tree", workload("star3", scale=0.02), options, warm_up=0)  # sets the model up
    packed = pack(PrefixTree.build(workload("star3", scale=0.1)), device="cuda")
    runs = []
    for _ in range(2):
        logprobs(model, packed, kernels=options.kernels).sum().backward()
        runs.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        model.zero_grad(set_to_none=True)
    assert len(runs[0]) > 40
    assert all(torch.equal(first, second) for first, second in zip(*runs, strict=True))
