"""Router logits whose bits depend on a row's hidden state alone, whatever comes with it and whatever the settings.

Products run in fp64 over a fixed number of rows, the last ones filled up with zeros, so that the BLAS takes the same
kernel for any number of rows; the result is rounded to fp32. In fp32, cuBLAS gave the rows of a router of 256 experts
other bits for nearly every number of rows up to 20,000 (H200, PyTorch 2.11). And fp64 is what neither TF32 nor
autocast touches: no global setting is changed, and none matters.

Shape suffixes: T rows, R rows of a chunk, D channels, E experts.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

__all__ = ["router_logits", "router_logits_reference"]

_CHUNK_ROWS = 4096
"""Rows of a product: with 256 experts enough to fill a GPU, and 64 MiB in fp64 at 2,048 channels."""


def router_logits(hidden_TD: Tensor, weight_ED: Tensor) -> Tensor:
    """Logits of a router in full precision: hidden_TD @ weight_ED^T, rounded once.

    A row's logits have the same bits in every batch that it is in, on one device. Gradients are computed in fp64, too,
    and rounded to the dtypes of the inputs; nothing but the inputs is kept for them. Twice differentiable it is not.

    Args:
        hidden_TD: [T, D], floating point.
        weight_ED: [E, D], on the same device.

    Returns:
        logits_TE: [T, E], fp32 (fp64 where an input is fp64).

    Raises:
        ValueError: shapes do not fit, devices differ, or an input is not floating point.
    """
    if hidden_TD.ndim != 2 or weight_ED.ndim != 2 or hidden_TD.shape[1] != weight_ED.shape[1]:
        raise ValueError(
            f"router_logits: expected hidden [rows, channels] and weight [experts, channels], got "
            f"{list(hidden_TD.shape)} and {list(weight_ED.shape)}"
        )
    if hidden_TD.device != weight_ED.device:
        raise ValueError(
            f"router_logits: expected hidden and weight on one device, got {hidden_TD.device} and {weight_ED.device}"
        )
    if not (hidden_TD.is_floating_point() and weight_ED.is_floating_point()):
        raise ValueError(
            f"router_logits: expected floating-point hidden and weight, got {hidden_TD.dtype} and {weight_ED.dtype}"
        )
    return _RouterLogits.apply(hidden_TD, weight_ED)  # type: ignore[no-any-return, no-untyped-call]


def router_logits_reference(hidden_TD: Tensor, weight_ED: Tensor) -> Tensor:
    """The same as one product, whose bits may depend on the number of rows."""
    return (hidden_TD.double() @ weight_ED.double().mT).to(_result_dtype(hidden_TD, weight_ED))


class _RouterLogits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_TD: Tensor, weight_ED: Tensor) -> Tensor:
        ctx.save_for_backward(hidden_TD, weight_ED)
        logits_TE = hidden_TD.new_empty(len(hidden_TD), len(weight_ED), dtype=_result_dtype(hidden_TD, weight_ED))
        weight_DE = weight_ED.double().mT
        for part in _chunks(len(hidden_TD)):
            hidden_RD = hidden_TD[part].double()
            missing = _CHUNK_ROWS - len(hidden_RD)
            filled_RD = pad(hidden_RD, (0, 0, 0, missing)) if missing else hidden_RD
            logits_TE[part] = (filled_RD @ weight_DE)[: len(hidden_RD)]
        return logits_TE

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad_TE: Tensor) -> tuple[Tensor | None, Tensor | None]:
        hidden_TD, weight_ED = ctx.saved_tensors
        need_hidden, need_weight = ctx.needs_input_grad
        grad_hidden_TD = torch.empty_like(hidden_TD) if need_hidden else None
        wide_ED = weight_ED.double()
        grad_weight_ED = torch.zeros_like(wide_ED) if need_weight else None
        for part in _chunks(len(hidden_TD)):
            grad_RE = grad_TE[part].double()
            if grad_hidden_TD is not None:
                grad_hidden_TD[part] = (grad_RE @ wide_ED).to(hidden_TD.dtype)
            if grad_weight_ED is not None:
                grad_weight_ED += grad_RE.mT @ hidden_TD[part].double()
        return grad_hidden_TD, None if grad_weight_ED is None else grad_weight_ED.to(weight_ED.dtype)


def _chunks(rows: int) -> Iterator[slice]:
    return (slice(start, start + _CHUNK_ROWS) for start in range(0, rows, _CHUNK_ROWS))


def _result_dtype(hidden_TD: Tensor, weight_ED: Tensor) -> torch.dtype:
    return torch.promote_types(torch.promote_types(hidden_TD.dtype, weight_ED.dtype), torch.float32)
