"""Runs transformers models wholly in fp64.

transformers casts norms, gates, rotary angles and its CPU gated delta rule to fp32, whatever the model's dtype. Under
`all_fp64` those casts give fp64 instead, in both arms of a comparison, and any fp32 tensor that still appears is an
error: an exactness check that quietly runs in fp32 checks little.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

__all__ = ["all_fp64"]

# Casts. Replaced rather than intercepted: recomputed activations run inside a backward, where no mode is active.
_CASTS = ((Tensor, "to"), (Tensor, "type"), (Tensor, "softmax"), (torch, "softmax"), (torch.nn.functional, "softmax"))


def _to_double(value: Any) -> Any:
    return torch.float64 if isinstance(value, torch.dtype) and value is torch.float32 else value


def _lifted(plain: Callable[..., Any]) -> Callable[..., Any]:
    def cast(*args: Any, **kwargs: Any) -> Any:
        return plain(*map(_to_double, args), **{name: _to_double(value) for name, value in kwargs.items()})

    return cast


class _NoLowPrecision(TorchFunctionMode):
    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **{name: _to_double(value) for name, value in (kwargs or {}).items()})
        for value in result if isinstance(result, tuple | list) else (result,):
            if isinstance(value, Tensor) and value.dtype in (torch.float32, torch.bfloat16, torch.float16):
                raise AssertionError(f"{func} gave {value.dtype} in an fp64 check; the model holds a cast that is left")
        return result


@contextmanager
def all_fp64() -> Iterator[None]:
    """Lifts casts to fp32 to fp64 and fails where a lower precision is left.

    Raises:
        AssertionError: an operation gave fp32, bf16 or fp16.
    """
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with ExitStack() as stack:
            stack.enter_context(mock.patch.object(Tensor, "float", Tensor.double))
            for owner, name in _CASTS:
                stack.enter_context(mock.patch.object(owner, name, _lifted(getattr(owner, name))))
            stack.enter_context(_NoLowPrecision())
            yield
    finally:
        torch.set_default_dtype(default)
