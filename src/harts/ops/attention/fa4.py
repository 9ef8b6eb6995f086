"""FlashAttention 4 (CuTe DSL), called below its autograd function, which keeps the gathered keys and values."""

import importlib.util
from typing import Any

import torch
from torch import Tensor

from harts.ops.attention.calls import Call
from harts.ops.attention.pages import KeyPages

__all__ = ["FlashAttention4", "has_fa4"]

_TESTED = "4.0.0b36"


def has_fa4() -> bool:
    """Whether flash-attn-4 can be imported."""
    try:
        return importlib.util.find_spec("flash_attn.cute") is not None
    except ModuleNotFoundError:
        return False


class FlashAttention4:
    """A `harts.ops.attention.paths.VarlenKernel`.

    Args:
        q_THD, v_TGV: queries and values.
        window: of the calls; the kernel has other tiles with one.

    Raises:
        ImportError: flash-attn-4 is not installed, or of a version with other entry points.
        ValueError: tensors are not on a CUDA device of compute capability 9.0 or above, or of another dtype than fp16
            or bf16.
    """

    def __init__(self, q_THD: Tensor, v_TGV: Tensor, window: int | None = None) -> None:
        if not has_fa4():
            raise ImportError(
                f"attention: impl='fa4' needs flash-attn-4 (tested: {_TESTED}); install it with: pip install "
                f"'flash-attn-4=={_TESTED}', or choose impl='varlen'"
            )
        if not q_THD.is_cuda or q_THD.dtype not in (torch.float16, torch.bfloat16):
            raise ValueError(
                "attention: impl='fa4' expected fp16 or bf16 tensors on a CUDA device, got "
                f"{q_THD.dtype} on {q_THD.device}; convert them, or choose impl='reference'"
            )
        if torch.cuda.get_device_capability(q_THD.device) < (9, 0):
            raise ValueError(
                f"attention: impl='fa4' expected a GPU of compute capability 9.0 or above, got "
                f"{torch.cuda.get_device_name(q_THD.device)}; choose impl='varlen'"
            )
        interface: Any = importlib.import_module("flash_attn.cute.interface")
        on_hopper = torch.cuda.get_device_capability(q_THD.device)[0] == 9
        needed = ["_flash_attn_fwd", "_flash_attn_bwd", *["_tile_size_fwd_sm90"] * on_hopper]
        missing = [name for name in needed if not hasattr(interface, name)]
        if missing:
            raise ImportError(
                f"attention: the installed flash-attn-4 has no {missing[0]}; install the tested version with: "
                f"pip install 'flash-attn-4=={_TESTED}', or choose impl='varlen'"
            )
        self.interface = interface
        sizes = q_THD.shape[-1], v_TGV.shape[-1]
        self.paged = _Paged(interface, *sizes, window is not None) if on_hopper else None  # elsewhere never tried
        self.leaves_gaps = on_hopper
        self.key_tile = 128

    def forward(self, q_QHD: Tensor, k_KGD: Tensor, v_KGV: Tensor, call: Call, scale: float) -> tuple[Tensor, Tensor]:
        """See `VarlenKernel`."""
        out_QHV, lse_HQ, *_ = self.interface._flash_attn_fwd(
            q_QHD,
            k_KGD,
            v_KGV,
            softmax_scale=scale,
            return_lse=True,
            num_splits=1,
            **_mask(True, call.window),
            **_lengths(call),
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
        grad_q, grad_k, grad_v = into
        self.interface._flash_attn_bwd(
            q_QHD,
            k_KGD,
            v_KGV,
            out_QHV,
            grad_QHV,
            lse_HQ,
            softmax_scale=scale,
            deterministic=deterministic,
            dq=grad_q,
            dk=grad_k,
            dv=grad_v,
            seqused_q=call.used_queries_C,
            **_mask(call.causal, call.window),
            **_lengths(call),
        )


class _Paged:
    """A `harts.ops.attention.paths.PagedForward`, for Hopper: a page is a tile of the kernel."""

    def __init__(self, interface: Any, size: int, value_size: int, local: bool) -> None:
        self.interface = interface
        self.page_rows: int = interface._tile_size_fwd_sm90(size, value_size, not local, local).n_block_size

    def __call__(
        self, q_QHD: Tensor, k_NRGD: Tensor, v_NRGV: Tensor, pages: KeyPages, scale: float
    ) -> tuple[Tensor, Tensor]:
        """See `PagedForward`."""
        out_QHV, lse_HQ, *_ = self.interface._flash_attn_fwd(
            q_QHD,
            k_NRGD,
            v_NRGV,
            softmax_scale=scale,
            return_lse=True,
            num_splits=1,
            cu_seqlens_q=pages.cu_queries_C1,
            seqused_k=pages.key_length_C,
            page_table=pages.first_row_CP,
            max_seqlen_q=max(pages.query_lengths),
            max_seqlen_k=max(pages.key_lengths),
            **_mask(True, pages.window),
        )
        return out_QHV, lse_HQ


def _mask(causal: bool, window: int | None) -> dict[str, Any]:
    """The kernel's options for what a query sees; a window takes the place of `causal`."""
    if window is None:
        return {"causal": causal}
    return {"causal": False, "window_size_left": window - 1, "window_size_right": 0}


def _lengths(call: Call) -> dict[str, Any]:
    return {
        "cu_seqlens_q": call.cu_queries_C1,
        "cu_seqlens_k": call.cu_keys_C1,
        "max_seqlen_q": max(call.query_lengths),
        "max_seqlen_k": max(call.key_lengths),
    }
