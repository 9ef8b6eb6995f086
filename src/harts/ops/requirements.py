"""What a kernel needs to run, checked before it is launched; a refusal says what to install."""

import importlib.util
import os
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["check_tensors", "has_triton", "require_triton"]

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True)
class _Miscompiled:
    """What versions of Triton, first to last, make wrong code of.

    Attributes:
        op: whose kernels.
        capability: major compute capability of the GPUs.
        gpu: their name.
        good: the first version that is right again.
    """

    op: str
    capability: int
    gpu: str
    first: tuple[int, int, int]
    last: tuple[int, int, int]
    good: str


_MISCOMPILED = (_Miscompiled("gated_delta_rule", 9, "Hopper", (3, 4, 0), (3, 7, 0), "3.7.1"),)
"""fla-core refuses the same versions for its gated backward kernels, which ours are like."""


def has_triton() -> bool:
    """Whether Triton can be imported."""
    return importlib.util.find_spec("triton") is not None


def interpreted() -> bool:
    """Whether Triton was told to interpret kernels, which then run on CPU tensors, for tests."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def require_triton(op: str, device: torch.device, *, impl: str = "triton", other: str = "reference") -> None:
    """Refuses where a Triton kernel cannot run.

    Raises:
        ImportError: Triton is not installed.
        ValueError: the tensors lie where Triton does not run, or this version of it makes wrong code of the op's
            kernels for their GPU.
    """
    if not has_triton():
        raise ImportError(f"{op}: impl={impl!r} needs Triton; install it with: pip install 'harts[gpu]'")
    if device.type != "cuda" and not interpreted():
        raise ValueError(
            f"{op}: impl={impl!r} expected tensors on a CUDA device, got {device}; move them, or choose impl={other!r}"
        )
    if device.type == "cuda" and not interpreted():
        _check_version(op, device, impl, other)


def _check_version(op: str, device: torch.device, impl: str, other: str) -> None:
    for wrong in _MISCOMPILED:
        if op != wrong.op or torch.cuda.get_device_capability(device)[0] != wrong.capability:
            continue
        import triton

        version = tuple(int(part) for part in triton.__version__.split("+")[0].split(".")[:3])
        if wrong.first <= version <= wrong.last:
            raise ValueError(
                f"{op}: impl={impl!r} expected a Triton that compiles it right for {wrong.gpu} GPUs, got "
                f"{triton.__version__}; install it with: pip install 'triton>={wrong.good}', or choose impl={other!r}"
            )


def check_tensors(op: str, **tensors: Tensor | None) -> None:
    """Refuses tensors of different dtypes or devices, or of no floating dtype.

    Raises:
        ValueError: naming the first tensor that does not fit and what it was compared with.
    """
    first: tuple[str, Tensor] | None = None
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if tensor.dtype not in _FLOATS:
            raise ValueError(f"{op}: expected {name} to be floating point, got {tensor.dtype}")
        if first is None:
            first = name, tensor
        elif tensor.dtype != first[1].dtype or tensor.device != first[1].device:
            raise ValueError(
                f"{op}: expected {name} of one dtype and device with {first[0]} ({first[1].dtype} on "
                f"{first[1].device}), got {tensor.dtype} on {tensor.device}; convert one of them"
            )
