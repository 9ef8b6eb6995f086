"""FSDP2: log-probs and gradients of a sharded model are those of the whole one."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard

import harts
from harts.layout import PackedTree, pack
from harts.models import RouterConfig, attach, logprobs, recompute_activations, tiny_model
from harts.models.attach import find_backbone
from harts.models.fuse import fuse
from harts.models.sharded import compute_dtype
from harts.testing.workloads import workload
from harts.tree import PrefixTree


def microbatches() -> list[PackedTree]:
    trajectories = workload("star3", scale=0.003)
    return [pack(PrefixTree.build(part)) for part in (trajectories[:5], trajectories[5:])]


def make(preset: str) -> nn.Module:
    return attach(tiny_model(preset, vocab_size=1024, dtype=torch.float64))


def shard(model: nn.Module, **settings: Any) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    text: Any = find_backbone(model).text
    for layer in text.layers:
        fully_shard(layer, mesh=mesh, **settings)
    return fully_shard(model, mesh=mesh, **settings)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    found = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        grad: Any = parameter.grad
        found[name] = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
    return found


def assert_alike(ours: dict[str, Tensor], truth: dict[str, Tensor]) -> None:
    assert ours.keys() == truth.keys()
    for name, expected in truth.items():
        assert (ours[name] - expected).norm() <= 1e-10 * expected.norm(), name


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("preset", ["tiny-qwen3.5", "tiny-qwen3.5-moe", "fused tiny-qwen3.5-moe", "tiny-llama"])
def test_one_process(group: None, preset: str, recompute: bool) -> None:
    *fused, name = preset.split()
    whole, parts = (fuse(make(name), impl="reference") if fused else make(name) for _ in range(2))
    parts = shard(parts)
    for model in (whole, parts):
        if recompute:
            recompute_activations(model)
    router = RouterConfig(scope="microbatch", balance_coefficient=0.1) if "moe" in preset else None
    for packed in microbatches():
        results = []
        for model in (whole, parts):
            values, entropy, *routed = logprobs(model, packed, entropy=True, router=router)  # type: ignore[call-overload]
            loss = values.sum() + 0.1 * entropy.sum() + sum(each.aux_loss() for each in routed)
            loss.backward()
            results.append((values.detach(), entropy.detach()))
        for one, other in zip(*results, strict=True):
            assert torch.allclose(one, other, rtol=0, atol=1e-12)
    assert_alike(gradients(parts), gradients(whole))


def _replica(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=2)
    whole, parts = make("tiny-qwen3.5"), shard(make("tiny-qwen3.5"))
    for packed in microbatches():
        (logprobs(whole, packed).sum() / 2).backward()
    mine = microbatches()[rank]
    expected = logprobs(whole, mine).detach()
    values = logprobs(parts, mine)
    assert torch.allclose(values.detach(), expected, rtol=0, atol=1e-12)
    values.sum().backward()  # FSDP2 takes the mean over replicas
    assert_alike(gradients(parts), gradients(whole))
    with torch.no_grad():
        assert torch.allclose(logprobs(parts, mine), expected, rtol=0, atol=1e-12)
    dist.destroy_process_group()


def test_two_processes_with_a_microbatch_each(tmp_path: Path) -> None:
    mp.spawn(_replica, args=(str(tmp_path),), nprocs=2)


def test_kernels_follow_mixed_precision(group: None) -> None:
    model = attach(tiny_model("tiny-qwen3.5"))
    assert compute_dtype(model) == torch.float32
    shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    assert next(model.parameters()).dtype == torch.float32
    assert compute_dtype(model) == torch.bfloat16


def test_what_cannot_be_gathered_is_refused(group: None) -> None:
    (packed, _) = microbatches()
    model = make("tiny-llama")
    fully_shard(find_backbone(model).head, mesh=init_device_mesh("cpu", (1,)))
    with pytest.raises(ValueError, match="expected the head's whole weight"):
        harts.logprobs(shard(model), packed)
    model = make("tiny-llama")
    layer: Any = find_backbone(model).text.layers[0]  # type: ignore[union-attr, index]
    layer.mlp = FullyShardedDataParallel(layer.mlp, device_id=torch.device("cpu"))
    with pytest.raises(ValueError, match=r"\(FSDP1\) is not supported"):
        harts.logprobs(model, packed)
