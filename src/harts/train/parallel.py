"""Replicas: each runs its own microbatches; together they hold one model, whose gradients add up."""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

__all__ = ["Replicas"]

_BUCKET = 64 * 2**20  # bytes summed in one call


@dataclass(frozen=True)
class Replicas:
    """This process among those that train together.

    Attributes:
        rank: 0 to size - 1; rank 0 writes files.
        size: number of replicas.
    """

    rank: int = 0
    size: int = 1

    @staticmethod
    def join(device: str) -> "Replicas":
        """Joins the processes that torchrun started, or stays alone where there is no such start."""
        if int(os.environ.get("WORLD_SIZE", "1")) == 1:
            return Replicas()
        if not dist.is_initialized():
            if device.startswith("cuda"):
                torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
            dist.init_process_group("nccl" if device.startswith("cuda") else "gloo")
        return Replicas(dist.get_rank(), dist.get_world_size())

    def leave(self) -> None:
        """Ends what `join` started."""
        if self.size > 1 and dist.is_initialized():
            dist.destroy_process_group()

    def same_start(self, model: nn.Module) -> None:
        """Gives every replica the parameters and buffers of rank 0."""
        if self.size > 1:
            for tensor in model.state_dict().values():
                dist.broadcast(tensor, src=0)

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Sums `.grad` over the replicas, in buckets of one dtype, in a fixed order; FSDP has summed what it shards."""
        if self.size == 1:
            return
        parameters = [each for each in parameters if not isinstance(each, DTensor)]
        bucket: list[Tensor] = []
        filled = 0
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            grad = parameter.grad
            if bucket and (filled + grad.nbytes > _BUCKET or grad.dtype != bucket[0].dtype):
                _sum(bucket)
                bucket, filled = [], 0
            bucket.append(grad)
            filled += grad.nbytes
        if bucket:
            _sum(bucket)

    def sum(self, value: float) -> float:
        """The sum over the replicas; all replicas must call it."""
        return self._reduce(value, dist.ReduceOp.SUM)

    def max(self, value: float) -> float:
        """The largest over the replicas; all replicas must call it."""
        return self._reduce(value, dist.ReduceOp.MAX)

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on any replica; all replicas must call it."""
        return bool(self._reduce(flag, dist.ReduceOp.MAX))

    def _reduce(self, value: float, op: Any) -> float:
        if self.size == 1:
            return value
        total = torch.tensor(value, dtype=torch.float64, device="cuda" if dist.get_backend() == "nccl" else "cpu")
        dist.all_reduce(total, op=op)
        return float(total.item())

    def wait(self) -> None:
        """Waits for all replicas."""
        if self.size > 1:
            dist.barrier()


def _sum(grads: list[Tensor]) -> None:
    flat = torch.cat([grad.reshape(-1) for grad in grads])
    dist.all_reduce(flat, op=dist.ReduceOp.SUM)
    for grad, part in zip(grads, torch.split(flat, [grad.numel() for grad in grads]), strict=True):
        grad.copy_(part.view_as(grad))
