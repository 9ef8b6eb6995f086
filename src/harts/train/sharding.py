"""Parameters over processes, and in fp32 while the model computes in bf16: FSDP2 of PyTorch, on one process too.

In bf16 a weight of 1 moves by no less than 0.004, so an optimiser on bf16 parameters rounds most of its updates away.
The parameters that are trained are fp32 therefore, and FSDP2 hands each layer a bf16 copy while it runs.
"""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from harts.models.attach import find_backbone

__all__ = [
    "cast_all_but_kept",
    "gather",
    "join_alone",
    "kept_in_fp32",
    "like",
    "parameter_dtype",
    "put",
    "shard",
    "split_by_kind",
    "whole",
]

# Decays of linear attention: the reference implementations read them in fp32.
_KEPT = ("A_log", "dt_bias")


def parameter_dtype(compute: torch.dtype) -> torch.dtype:
    """That of parameters, gradients and moments where the model computes in `compute`."""
    return torch.float32 if compute == torch.bfloat16 else compute


def kept_in_fp32(model: nn.Module) -> set[nn.Parameter]:
    """Parameters that a model computes with in fp32 although all else is bf16."""
    return {parameter for name, parameter in model.named_parameters() if name.rpartition(".")[2] in _KEPT}


def cast_all_but_kept(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Gives a model that is not trained the dtypes that a sharded one computes with. Returns the same model."""
    kept = kept_in_fp32(model)
    for parameter in model.parameters():
        if parameter not in kept:
            parameter.data = parameter.data.to(dtype)
    return model


def join_alone(device: str) -> bool:
    """Starts a process group of this process alone, which FSDP2 asks for. False where one is there already."""
    if dist.is_initialized():
        return False
    cuda = device.startswith("cuda")
    if cuda:
        torch.cuda.set_device(torch.device(device))
    store: Any = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("nccl" if cuda else "gloo", store=store, rank=0, world_size=1)
    return True


def shard(model: nn.Module, *, compute: torch.dtype, device: str, size: int) -> nn.Module:
    """Shards each layer and the rest over the processes; gradients are summed over them, not averaged.

    Args:
        model: attached, on its device, the same in each process.
        compute: the dtype to compute in; where it is not that of the parameters, `kept_in_fp32` stay whole and as they
            are, and their gradients are for `Replicas.sum_gradients` to sum.
        device: of the model.
        size: number of processes.

    Returns:
        The same model.
    """
    mixed = compute != next(model.parameters()).dtype
    settings: dict[str, Any] = {"mesh": init_device_mesh(torch.device(device).type, (size,))}
    if mixed:
        settings["mp_policy"] = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)
        settings["ignored_params"] = kept_in_fp32(model)
    text: Any = find_backbone(model).text
    for layer in text.layers:
        fully_shard(layer, **settings)
    fully_shard(model, **settings)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # Losses have the denominators of the whole step, so what processes give adds up.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    return model


def whole(value: Tensor) -> Tensor:
    """All of a tensor that may be sharded; every process calls this."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def gather(value: Tensor, *, keep: bool) -> Tensor:
    """All of a tensor that may be sharded, in the CPU's memory then; empty unless kept. Every process calls this."""
    if not isinstance(value, DTensor):
        return value
    full = value.full_tensor()
    return full.cpu() if keep else full.new_empty(0)


@torch.no_grad()
def put(target: Tensor, value: Tensor) -> None:
    """Writes a whole tensor into one that may be sharded, this process its part."""
    target.copy_(like(target, value))


def like(target: Tensor, value: Tensor) -> Tensor:
    """A whole tensor on the device of another, sharded as that is."""
    value = value.to(target.device)
    if not isinstance(target, DTensor):
        return value
    return distribute_tensor(value, target.device_mesh, target.placements, src_data_rank=None)


def split_by_kind(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Sharded ones and others apart, as PyTorch's operations on lists take them; no list is empty."""
    sharded: list[Tensor] = []
    others: list[Tensor] = []
    for each in tensors:
        (sharded if isinstance(each, DTensor) else others).append(each)
    return [group for group in (sharded, others) if group]
