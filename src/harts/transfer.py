"""Host tensors to a GPU, without waiting for the work that the GPU has before it."""

import torch
from torch import Tensor

__all__ = ["send"]


def send(tensor: Tensor, device: torch.device | str) -> Tensor:
    """`tensor.to(device)`; from the host to a CUDA device through pinned memory.

    A copy from ordinary memory waits until the device has done everything launched before, and is slower. Work on the
    device's current stream sees the copy. A tensor that is pinned already is read later: leave it as it is until then.
    """
    if torch.device(device).type != "cuda" or tensor.device.type != "cpu" or not tensor.numel():
        return tensor.to(device)
    return tensor.contiguous().pin_memory().to(device, non_blocking=True)
