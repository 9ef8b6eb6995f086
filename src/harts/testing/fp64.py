"""Runs transformers models wholly in fp64.

transformers casts norms, gates, rotary angles and its CPU gated delta rule to fp32, whatever the model's dtype. Under
`all_fp64` those casts give fp64 instead, in both arms of a comparison, and any fp32 tensor that still appears is an
error: an exactness check that quietly runs in fp32 checks little.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

__all__ = ["all_fp64"]

_FLOATS = (torch.float32, torch.float)


class _Fp64Casts(TorchFunctionMode):
    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is Tensor.float:
            return args[0].double()
        args = tuple(torch.float64 if isinstance(arg, torch.dtype) and arg in _FLOATS else arg for arg in args)
        if kwargs.get("dtype") in _FLOATS:
            kwargs["dtype"] = torch.float64
        result = func(*args, **kwargs)
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
        with _Fp64Casts():
            yield
    finally:
        torch.set_default_dtype(default)
