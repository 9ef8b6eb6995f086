"""Attention on a tree: a row sees its path, or the last rows of it."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from harts.layout import PackedTree
from harts.ops.attention.reference import attention_reference
from harts.ops.dispatch import check_context, choose

if TYPE_CHECKING:
    from harts.ops.attention.paths import VarlenKernel

__all__ = ["attention", "default_impl"]


def attention(
    q_THD: Tensor,
    k_TGD: Tensor,
    v_TGV: Tensor,
    packed: PackedTree,
    *,
    scale: float,
    impl: str = "reference",
    deterministic: bool = False,
    context: tuple[Tensor, Tensor] | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Softmax attention of every row over the rows of its path, itself included.

    Args:
        q_THD: queries, [T, H, D], positions already applied.
        k_TGD, v_TGV: keys and values, [T, G, D] and [T, G, V]; H is a multiple of G.
        packed: the tree, or a piece of one.
        scale: factor on q k^T.
        impl: `"reference"`: PyTorch's scaled_dot_product_attention per chain, any device and dtype. `"varlen"`:
            FlashAttention 2 as it comes with PyTorch, on path-gathered keys and values; `"fa4"`: flash-attn-4, which
            on Hopper reads them where they lie. Both take fp16 or bf16 on CUDA, and give each row the bits that it has
            in a batch of separate rows.
            `default_impl()` names the fastest one installed.
        deterministic: gradients are equal in every bit from run to run. The flash kernels take longer for it; the
            reference is as deterministic as PyTorch.
        context: of a piece: keys and values of the rows outside, `packed.outside_D`, [D, G, D'] and [D, G, V];
            differentiable.
        window: a row sees the last so many rows of its path, itself included; None: all of them.
        softcap: scores become softcap * tanh(scores / softcap); None: they do not. Only the reference has it.
        sinks_H: [H], differentiable: a score for each head that joins every row's softmax and carries no value.

    Returns:
        o_THV: [T, H, V].

    Raises:
        ValueError: shapes do not fit each other or the tree, `impl` is unknown, or does not take such tensors.
        ImportError: `"fa4"` without flash-attn-4.
    """
    rows, heads, size = q_THD.shape
    groups = k_TGD.shape[1]
    if rows != packed.num_rows or k_TGD.shape != (rows, groups, size) or v_TGV.shape[:2] != (rows, groups):
        raise ValueError(
            f"attention: expected {packed.num_rows} rows in q, k and v and one head size in q and k, got "
            f"q {list(q_THD.shape)}, k {list(k_TGD.shape)}, v {list(v_TGV.shape)}"
        )
    outside = {} if context is None else {"keys": context[0], "values": context[1]}
    check_context("attention", outside, packed.num_outside)
    if heads % groups:
        raise ValueError(f"attention: expected query heads to be a multiple of key heads, got {heads} and {groups}")
    options = _Options(scale, deterministic, context, window, softcap, sinks_H)
    _check_options(options, heads)
    return choose("attention", impl, _IMPLEMENTATIONS)(q_THD, k_TGD, v_TGV, packed, options)


def default_impl() -> str:
    """The fastest `impl` of this installation: `"fa4"` on Hopper or newer with flash-attn-4, else `"varlen"` on CUDA,
    else `"reference"`."""
    from harts.ops.attention.fa4 import has_fa4

    if not torch.cuda.is_available():
        return "reference"
    return "fa4" if has_fa4() and torch.cuda.get_device_capability() >= (9, 0) else "varlen"


@dataclass(frozen=True, eq=False)
class _Options:
    """What `attention` was called with beside queries, keys and values."""

    scale: float
    deterministic: bool
    context: tuple[Tensor, Tensor] | None
    window: int | None
    softcap: float | None
    sinks_H: Tensor | None


def _check_options(options: _Options, heads: int) -> None:
    window, softcap, sinks_H = options.window, options.softcap, options.sinks_H
    if window is not None and (isinstance(window, bool) or not isinstance(window, int) or window < 1):
        raise ValueError(f"attention: window: expected a number of rows of at least 1 or None, got {window!r}")
    if softcap is not None and not 0 < softcap < float("inf"):
        raise ValueError(f"attention: softcap: expected a number above 0 or None, got {softcap!r}")
    if sinks_H is not None and sinks_H.shape != (heads,):
        raise ValueError(
            f"attention: sinks: expected one score for each of {heads} query heads, got {list(sinks_H.shape)}"
        )


def _reference(q_THD: Tensor, k_TGD: Tensor, v_TGV: Tensor, packed: PackedTree, options: _Options) -> Tensor:
    return attention_reference(
        q_THD,
        k_TGD,
        v_TGV,
        packed,
        options.scale,
        options.context,
        window=options.window,
        softcap=options.softcap,
        sinks_H=options.sinks_H,
    )


def _varlen(q_THD: Tensor, k_TGD: Tensor, v_TGV: Tensor, packed: PackedTree, options: _Options) -> Tensor:
    from harts.ops.attention.varlen import TorchVarlen

    _check_no_softcap("varlen", options)
    return _by_kernel(q_THD, k_TGD, v_TGV, packed, options, TorchVarlen(q_THD, v_TGV))


def _fa4(q_THD: Tensor, k_TGD: Tensor, v_TGV: Tensor, packed: PackedTree, options: _Options) -> Tensor:
    from harts.ops.attention.fa4 import FlashAttention4

    _check_no_softcap("fa4", options)
    return _by_kernel(q_THD, k_TGD, v_TGV, packed, options, FlashAttention4(q_THD, v_TGV, options.window))


def _check_no_softcap(impl: str, options: _Options) -> None:
    if options.softcap is not None:
        raise ValueError(
            f"attention: impl={impl!r} expected scores that are not soft-capped, got softcap={options.softcap}; "
            "choose impl='reference'"
        )


def _by_kernel(
    q_THD: Tensor, k_TGD: Tensor, v_TGV: Tensor, packed: PackedTree, options: _Options, kernel: "VarlenKernel"
) -> Tensor:
    from harts.ops.attention.paths import attend_paths

    return attend_paths(
        q_THD,
        k_TGD,
        v_TGV,
        packed,
        options.scale,
        kernel,
        options.deterministic,
        options.context,
        window=options.window,
        sinks_H=options.sinks_H,
    )


_IMPLEMENTATIONS = {"reference": _reference, "varlen": _varlen, "fa4": _fa4}
