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
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

import harts
from harts.layout import PackedTree, pack
from harts.models import RouterConfig, attach, logprobs, recompute_activations, tiny_model
from harts.models.attach import find_backbone
from harts.models.fuse import fuse, unfuse
from harts.models.sharded import compute_device, compute_dtype
from harts.ops.kernels import Kernels
from harts.testing.workloads import workload
from harts.tree import PrefixTree


def microbatches() -> list[PackedTree]:
    trajectories = workload("star3", scale=0.003)
    return [pack(PrefixTree.build(part)) for part in (trajectories[:5], trajectories[5:])]


def make(preset: str) -> nn.Module:
    return attach(tiny_model(preset, vocab_size=1024, dtype=torch.float64))


def shard(model: nn.Module, style: str = "layers", **settings: Any) -> nn.Module:
    settings["mesh"] = init_device_mesh("cpu", (dist.get_world_size(),))
    backbone = find_backbone(model)
    text: Any = backbone.text
    for layer in text.layers if style != "whole model only" else ():
        fully_shard(layer, **settings)
    if style == "resharded":  # the head's weight is gone again behind the forward
        settings["reshard_after_forward"] = True
    elif style == "head alone":
        fully_shard(backbone.head, reshard_after_forward=True, **settings)
    elif style == "norm and head":
        fully_shard([text.norm, backbone.head], reshard_after_forward=True, **settings)
    return fully_shard(model, **settings)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Those of a sharded model must have gone through FSDP, which leaves them sharded."""
    found = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        assert parameter.grad is not None, name
        grad: Any = parameter.grad
        assert isinstance(grad, DTensor) == isinstance(model, FSDPModule), name
        found[name] = grad.full_tensor() if isinstance(grad, DTensor) else grad
    return found


def assert_alike(ours: dict[str, Tensor], truth: dict[str, Tensor], rounding: float = 1e-10) -> None:
    assert ours.keys() == truth.keys()
    for name, expected in truth.items():
        assert (ours[name] - expected).norm() <= rounding * expected.norm(), name


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
            scores: Any = logprobs(model, packed, entropy=True, router=router, hidden=True, top_k=3)
            parts_of = (scores.logprobs_N, scores.entropy_N, scores.hidden_N, scores.top_logprobs_NK)
            loss = sum(weight * part.sum() for weight, part in zip((1.0, 0.1, 0.01, 0.1), parts_of, strict=True))
            (loss if router is None else loss + scores.router.aux_loss()).backward()
            results.append([part.detach() for part in parts_of])
        for one, other in zip(*results, strict=True):
            assert torch.allclose(one, other, rtol=0, atol=1e-12)
    assert_alike(gradients(parts), gradients(whole))


STYLES = ("layers", "whole model only", "resharded", "head alone", "norm and head")


@pytest.mark.parametrize("style", STYLES[1:])
@pytest.mark.parametrize("trained", ["all", "head"])
def test_every_way_to_shard(group: None, style: str, trained: str) -> None:
    whole, parts = make("tiny-qwen3.5"), make("tiny-qwen3.5")
    for model in (whole, parts):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(trained == "all" or "lm_head" in name)
    shard(parts, style)
    for packed in microbatches():
        with torch.no_grad():
            assert torch.allclose(logprobs(parts, packed), logprobs(whole, packed), rtol=0, atol=1e-12)
        for model in (whole, parts):
            scores = logprobs(model, packed, entropy=True)
            assert scores.entropy_N is not None
            (scores.logprobs_N.sum() + scores.entropy_N.sum()).backward()
    assert_alike(gradients(parts), gradients(whole))


@pytest.mark.parametrize("preset", ["tiny-qwen3.5-moe", "tiny-qwen3-moe", "tiny-qwen3-next"])
def test_the_balancing_loss_of_transformers_stays_off(group: None, preset: str) -> None:
    (packed, _) = microbatches()
    expected = logprobs(make(preset), packed)
    for model in (make(preset), shard(make(preset))):
        find_backbone(model).config.output_router_logits = True
        assert torch.equal(logprobs(model, packed), expected)
        assert find_backbone(model).config.output_router_logits


def test_a_sharded_model_within_adapters(group: None) -> None:
    from peft import LoraConfig, get_peft_model

    def adapted() -> Any:
        torch.manual_seed(0)
        config = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        return get_peft_model(make("tiny-qwen3.5"), config).double()

    (packed, _) = microbatches()
    whole, parts = adapted(), adapted()
    shard(parts.get_base_model())
    for model in (whole, parts):
        logprobs(model, packed).sum().backward()
    assert_alike(gradients(parts.get_base_model()), gradients(whole.get_base_model()))


def _replica(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=2)
    whole = make("tiny-qwen3.5")
    for packed in microbatches():
        (logprobs(whole, packed).sum() / 2).backward()
    mine = microbatches()[rank]
    expected = logprobs(whole, mine).detach()
    for style in STYLES:
        parts = shard(make("tiny-qwen3.5"), style)
        values = logprobs(parts, mine)
        assert torch.allclose(values.detach(), expected, rtol=0, atol=1e-12)
        values.sum().backward()  # FSDP2 takes the mean over replicas
        assert_alike(gradients(parts), gradients(whole))
        with torch.no_grad():
            assert torch.allclose(logprobs(parts, mine), expected, rtol=0, atol=1e-12)
    dist.barrier()  # who leaves first may abort the other
    dist.destroy_process_group()


IN_PIECES = 1e-5
"""The gated delta rule sums gradients of fp32 states, whose rounding depends on where a tree is cut."""


def _replica_in_pieces(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=2)
    whole = make("tiny-qwen3.5")
    for packed in microbatches():
        (logprobs(whole, packed).sum() / 2).backward()
    mine = microbatches()[rank]
    expected = logprobs(whole, mine).detach()
    for style in STYLES:
        for budgets in ((40, 200), (200, 40), (33, 33)):
            parts = shard(make("tiny-qwen3.5"), style)
            with torch.no_grad():
                assert torch.allclose(logprobs(parts, mine, token_budget=budgets[rank]), expected, rtol=0, atol=1e-12)
            values = logprobs(parts, mine, token_budget=budgets[rank])
            assert torch.allclose(values.detach(), expected, rtol=0, atol=1e-12)
            values.sum().backward()
            assert_alike(gradients(parts), gradients(whole), IN_PIECES)
    with pytest.raises(ValueError, match="got one sharded over several"):
        harts.backward(parts, mine, lambda indices, scores: scores.logprobs_N.sum(), token_budget=40)
    dist.barrier()
    dist.destroy_process_group()


def test_two_processes_with_pieces_of_their_own(tmp_path: Path) -> None:
    mp.spawn(_replica_in_pieces, args=(str(tmp_path),), nprocs=2)


def test_two_processes_with_a_microbatch_each(tmp_path: Path) -> None:
    mp.spawn(_replica, args=(str(tmp_path),), nprocs=2)


def test_kernels_follow_mixed_precision(group: None) -> None:
    model = attach(tiny_model("tiny-qwen3.5"))
    assert compute_dtype(model) == torch.float32
    shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    assert next(model.parameters()).dtype == torch.float32
    assert compute_dtype(model) == torch.bfloat16


def test_kernels_follow_the_device_that_parameters_are_gathered_on(group: None) -> None:
    model: Any = shard(attach(tiny_model("tiny-llama")))
    assert compute_device(model) == torch.device("cpu")
    model._get_fsdp_state()._device = torch.device("cuda", 0)  # as with CPUOffloadPolicy
    assert compute_device(model) == torch.device("cuda", 0)
    assert next(model.parameters()).device.type == "cpu"
    with pytest.raises(ValueError, match="packed: lies on cpu, the model on cuda:0"):
        logprobs(model, microbatches()[0], kernels=Kernels())


def test_sharded_modules_are_not_swapped_in_part(group: None) -> None:
    mesh = init_device_mesh("cpu", (1,))
    model = make("tiny-qwen3.5-moe")
    for layer in find_backbone(model).text.layers:  # type: ignore[union-attr]
        fully_shard(layer.mlp.experts, mesh=mesh)
    before = [type(module) for module in model.modules()]
    with pytest.raises(ValueError, match="Qwen3_5MoeExperts is sharded by itself"):
        fuse(model, impl="reference")
    assert [type(module) for module in model.modules()] == before
    model = fuse(make("tiny-qwen3.5-moe"), impl="reference")
    for layer in find_backbone(model).text.layers:  # type: ignore[union-attr]
        fully_shard(layer.mlp.experts, mesh=mesh)
    before = [type(module) for module in model.modules()]
    with pytest.raises(ValueError, match="is sharded by itself"):
        unfuse(model)
    assert [type(module) for module in model.modules()] == before
    model = make("tiny-qwen3.5")
    for layer in find_backbone(model).text.layers:  # type: ignore[union-attr]
        fully_shard(layer.linear_attn if hasattr(layer, "linear_attn") else layer.self_attn, mesh=mesh)
    shard(model)
    with pytest.raises(ValueError, match="TreeGatedDeltaNet is sharded by itself"):
        harts.detach(model)
    assert torch.isfinite(harts.logprobs(model, microbatches()[0])).all()  # attached as before


def test_what_cannot_be_gathered_is_refused(group: None) -> None:
    (packed, _) = microbatches()
    mesh = init_device_mesh("cpu", (1,))
    model = make("tiny-llama")
    fully_shard(find_backbone(model).text.layers[0], mesh=mesh)  # type: ignore[union-attr, index, arg-type]
    with pytest.raises(ValueError, match="expected fully_shard on the whole model, got one with only a FSDPLlamaDec"):
        harts.logprobs(model, packed)
    model = make("tiny-llama")
    head: Any = find_backbone(model).head
    head.weight = nn.Parameter(distribute_tensor(head.weight.data, mesh))
    with pytest.raises(ValueError, match="expected the head's whole weight"):
        harts.logprobs(model, packed)
    model = make("tiny-llama")
    layer: Any = find_backbone(model).text.layers[0]  # type: ignore[union-attr, index]
    layer.mlp = FullyShardedDataParallel(layer.mlp, device_id=torch.device("cpu"))
    with pytest.raises(ValueError, match=r"\(FSDP1\) is not supported"):
        harts.logprobs(model, packed)
