"""FlashAttention 2 as it comes with PyTorch: the kernel behind `torch.nn.attention.varlen.varlen_attn`.

Called below that function, as its autograd keeps the gathered keys and values until the backward.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from harts.ops.attention.calls import Call

__all__ = ["TorchVarlen"]

_LARGEST_HEAD = 256


class TorchVarlen:
    """A `harts.ops.attention.paths.VarlenKernel`.

    Raises:
        ValueError: tensors are not on a CUDA device, of another dtype than fp16 or bf16, or of a head size over 256 or
            none of 8's multiples.
    """

    paged = None
    leaves_gaps = False
    key_tile = 128

    def __init__(self, q_THD: Tensor, v_TGV: Tensor) -> None:
        if not q_THD.is_cuda or q_THD.dtype not in (torch.float16, torch.bfloat16):
            raise ValueError(
                "attention: impl='varlen' expected fp16 or bf16 tensors on a CUDA device, got "
                f"{q_THD.dtype} on {q_THD.device}; convert them, or choose impl='reference'"
            )
        size = q_THD.shape[-1]
        if size > _LARGEST_HEAD or size % 8 or v_TGV.shape[-1] != size:
            raise ValueError(
                f"attention: impl='varlen' expected one head size in q, k and v, a multiple of 8 up to "
                f"{_LARGEST_HEAD}, got {size} and {v_TGV.shape[-1]}; choose impl='fa4' or 'reference'"
            )
        # Newer versions of PyTorch split long rows of keys among programs unless told not to; then the number of
        # splits, and with it a row's bits, would depend on the rows beside it.
        schema = torch.ops.aten._flash_attention_forward.default._schema
        splits = any(argument.name == "num_splits" for argument in schema.arguments)
        self.one_split = {"num_splits": 1} if splits else {}

    def forward(self, q_QHD: Tensor, k_KGD: Tensor, v_KGV: Tensor, call: Call, scale: float) -> tuple[Tensor, Tensor]:
        """See `VarlenKernel`."""
        out_QHV, lse_HQ, *_ = torch.ops.aten._flash_attention_forward(
            q_QHD,
            k_KGD,
            v_KGV,
            call.cu_queries_C1,
            call.cu_keys_C1,
            max(call.query_lengths),
            max(call.key_lengths),
            0.0,
            True,
            False,
            scale=scale,
            **_window(call),
            **self.one_split,
        )
        return out_QHV, lse_HQ

    def backward(
        self,
        grad_QHV: Tensor,
        q_QHD: Tensor,
        k_KGD: Tensor,
        v_KGV: Tensor,
        out_QHV: Tensor,
        lse_HQ: Tensor,
        call: Call,
        scale: float,
        deterministic: bool,
        into: tuple[Tensor, Tensor, Tensor],
    ) -> None:
        """See `VarlenKernel`."""
        rng_state = torch.zeros(2, dtype=torch.uint64, device=q_QHD.device)  # read by dropout alone
        with _deterministic(deterministic):
            grads = torch.ops.aten._flash_attention_backward(
                grad_QHV,
                q_QHD,
                k_KGD,
                v_KGV,
                out_QHV,
                lse_HQ,
                call.cu_queries_C1,
                call.cu_keys_C1,
                max(call.query_lengths),
                max(call.key_lengths),
                0.0,
                call.causal,
                rng_state,
                torch.empty(0, device=q_QHD.device),
                scale=scale,
                **_window(call),
            )
        for part, grad in zip(into, grads, strict=True):
            part.copy_(grad)


def _window(call: Call) -> dict[str, int]:
    """Keys on both sides of a query's own that it sees; without a window none of this is passed."""
    return {} if call.window is None else {"window_size_left": call.window - 1, "window_size_right": 0}


@contextmanager
def _deterministic(wanted: bool) -> Iterator[None]:
    """PyTorch's kernel reads this from its global switch alone; the switch is put back as it was."""
    before, warns = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    memory: Any = torch.utils.deterministic
    fills = memory.fill_uninitialized_memory
    if not wanted or (before and not warns):
        yield
        return
    try:
        memory.fill_uninitialized_memory = False
        torch.use_deterministic_algorithms(True)
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warns)
        memory.fill_uninitialized_memory = fills
