"""Index tensors on their way from the host to a GPU, without waiting for the work that the GPU has before it."""

import dataclasses
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

__all__ = ["OnDevice", "send", "to_int32", "to_int64"]


def send(tensor: Tensor, device: torch.device | str) -> Tensor:
    """`tensor.to(device)`; from the host to a CUDA device through pinned memory.

    A copy from ordinary memory waits until the device has done everything launched before, and is slower. Work on the
    device's current stream sees the copy. A tensor that is pinned already is read later: leave it as it is until then.
    """
    if torch.device(device).type != "cuda" or tensor.device.type != "cpu" or not tensor.numel():
        return tensor.to(device)
    return tensor.contiguous().pin_memory().to(device, non_blocking=True)


def to_int64(array: NDArray[Any], device: torch.device | str) -> Tensor:
    """An int64 tensor on a device, where possible in the memory of the array, which nobody else keeps."""
    return send(torch.from_numpy(np.ascontiguousarray(array)), device).long()


def to_int32(values: ArrayLike, device: torch.device | str) -> Tensor:
    """An int32 tensor on a device, always a copy."""
    return send(torch.from_numpy(np.array(values, np.int32)), device)


@dataclass(frozen=True, eq=False)
class OnDevice:
    """A frozen set of tensors that moves as one."""

    def to(self, device: torch.device | str) -> Self:
        """The same on another device; host-side arrays stay where they are."""
        moved: dict[str, Any] = {}
        with torch.inference_mode(False):
            for item in dataclasses.fields(self):
                value = getattr(self, item.name)
                if isinstance(value, Tensor):
                    moved[item.name] = send(value, device)
                elif isinstance(value, OnDevice):
                    moved[item.name] = value.to(device)
        return dataclasses.replace(self, **moved)
