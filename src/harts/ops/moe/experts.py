"""What a mixture of experts does with rows whose experts are chosen.

Shape suffixes: T rows, D channels, E experts, K experts per row, I channels inside an expert, J = 2 * I.
"""

import torch
from torch import Tensor

from harts.ops.dispatch import choose
from harts.ops.moe.reference import run_experts_reference
from harts.ops.requirements import check_tensors, require_triton

__all__ = ["run_experts"]


def run_experts(
    x_TD: Tensor,
    chosen_TK: Tensor,
    weight_TK: Tensor,
    gate_up_EJD: Tensor,
    down_EDI: Tensor,
    *,
    shared_TD: Tensor | None = None,
    shared_gate_D: Tensor | None = None,
    impl: str,
) -> Tensor:
    """Runs every row through its experts and adds up what they give.

    out_t = sum_k weight_tk expert_(chosen_tk)(x_t) + sigmoid(<x_t, shared_gate>) shared_t, where an expert is
    down (silu(gate x) * (up x)) and the second part is that of the expert that all rows share, if there is one (Qwen2
    technical report, arXiv:2407.10671, section 2.2.2). No row is dropped.

    `"triton"` sorts the pairs (row, expert) by expert and runs one grouped matrix product for each of the two
    projections; a row's K results and the shared expert's are then added in fp32, in order of k, and rounded once. A
    row's bits do not depend on the other rows as long as those of `torch.nn.functional.grouped_mm` do not (they do not
    on an H200 in bf16), and two runs give the same bits, gradients included: nothing is added by atomics.

    Args:
        x_TD: [T, D].
        chosen_TK: int64 [T, K], experts of each row, all different, in [0, E). They are not checked on a GPU.
        weight_TK: [T, K], their weights.
        gate_up_EJD: [E, 2 * I, D], gate projections above up projections.
        down_EDI: [E, D, I].
        shared_TD: [T, D], output of the shared expert; None without one.
        shared_gate_D: [D], given exactly when shared_TD is.
        impl: `"reference"`: plain PyTorch, any device and dtype; `"triton"`: CUDA, and D and I that fill multiples of
            16 bytes.

    Returns:
        out_TD: in the dtype of x.

    Raises:
        ValueError: shapes, dtypes or devices do not fit, an expert that does not exist, or `impl` is unknown or does
            not run on these tensors.
        ImportError: `"triton"` without Triton.
    """
    _check(x_TD, chosen_TK, weight_TK, gate_up_EJD, down_EDI, shared_TD, shared_gate_D)
    run = choose("run_experts", impl, {"reference": run_experts_reference, "triton": _run_triton})
    return run(x_TD, chosen_TK, weight_TK, gate_up_EJD, down_EDI, shared_TD, shared_gate_D)


def _run_triton(
    x_TD: Tensor,
    chosen_TK: Tensor,
    weight_TK: Tensor,
    gate_up_EJD: Tensor,
    down_EDI: Tensor,
    shared_TD: Tensor | None,
    shared_gate_D: Tensor | None,
) -> Tensor:
    require_triton("run_experts", x_TD.device)
    for name, size in (("D", x_TD.shape[1]), ("I", down_EDI.shape[2])):
        if x_TD.dtype == torch.float64 or size * x_TD.element_size() % 16:
            raise ValueError(
                f"run_experts: impl='triton' expected fp16, bf16 or fp32 and {name} of a multiple of 16 bytes, got "
                f"{x_TD.dtype} and {name} = {size}; choose impl='reference'"
            )
    from harts.ops.moe.experts_triton import run_experts_triton

    return run_experts_triton(x_TD, chosen_TK, weight_TK, gate_up_EJD, down_EDI, shared_TD, shared_gate_D)


def _check(
    x_TD: Tensor,
    chosen_TK: Tensor,
    weight_TK: Tensor,
    gate_up_EJD: Tensor,
    down_EDI: Tensor,
    shared_TD: Tensor | None,
    shared_gate_D: Tensor | None,
) -> None:
    if x_TD.ndim != 2 or down_EDI.ndim != 3 or chosen_TK.ndim != 2 or not chosen_TK.shape[1]:
        raise ValueError(
            f"run_experts: expected x [T, D], chosen [T, K >= 1] and down [E, D, I], got {list(x_TD.shape)}, "
            f"{list(chosen_TK.shape)} and {list(down_EDI.shape)}"
        )
    (rows, size), (experts, _, inside) = x_TD.shape, down_EDI.shape
    expected = {
        "chosen": (chosen_TK, (rows, chosen_TK.shape[1])),
        "weight": (weight_TK, (rows, chosen_TK.shape[1])),
        "gate_up": (gate_up_EJD, (experts, 2 * inside, size)),
        "down": (down_EDI, (experts, size, inside)),
        "shared": (shared_TD, (rows, size)),
        "shared_gate": (shared_gate_D, (size,)),
    }
    for name, (tensor, shape) in expected.items():
        if tensor is not None and tensor.shape != shape:
            raise ValueError(f"run_experts: expected {name} of shape {list(shape)}, got {list(tensor.shape)}")
    if (shared_TD is None) != (shared_gate_D is None):
        raise ValueError("run_experts: expected shared and shared_gate together, got one of them")
    if chosen_TK.dtype != torch.int64 or chosen_TK.device != x_TD.device:
        raise ValueError(
            f"run_experts: expected chosen in int64 on {x_TD.device}, got {chosen_TK.dtype} on {chosen_TK.device}"
        )
    if not chosen_TK.is_cuda and chosen_TK.numel() and not 0 <= int(chosen_TK.min()) <= int(chosen_TK.max()) < experts:
        raise ValueError(
            f"run_experts: expected chosen in [0, {experts}), got {int(chosen_TK.min())} to {int(chosen_TK.max())}"
        )
    check_tensors(
        "run_experts",
        x=x_TD,
        weight=weight_TK,
        gate_up=gate_up_EJD,
        down=down_EDI,
        shared=shared_TD,
        shared_gate=shared_gate_D,
    )
