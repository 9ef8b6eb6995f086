"""Where a model runs, by name."""

import torch

__all__ = ["to_device"]


def to_device(name: str) -> torch.device:
    """The device of that name.

    Raises:
        ValueError: no such kind of device, or this machine has none of that number.
    """
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"device: expected cpu, cuda or cuda:NUMBER, got {name!r}") from error
    if device.type == "cuda" and (not torch.cuda.is_available() or (device.index or 0) >= torch.cuda.device_count()):
        raise ValueError(f"device: {name!r} is not there; this machine has {torch.cuda.device_count()} CUDA devices")
    return device
