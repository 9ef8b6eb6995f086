"""Full attention on a tree: a row sees its path."""

import torch
from torch import Tensor

from harts.layout import PackedTree
from harts.ops.attention.reference import attention_reference
from harts.ops.dispatch import check_context, choose

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
    return choose("attention", impl, _IMPLEMENTATIONS)(q_THD, k_TGD, v_TGV, packed, scale, deterministic, context)


def default_impl() -> str:
    """The fastest `impl` of this installation: `"fa4"` on Hopper or newer with flash-attn-4, else `"varlen"` on CUDA,
    else `"reference"`."""
    from harts.ops.attention.fa4 import has_fa4

    if not torch.cuda.is_available():
        return "reference"
    return "fa4" if has_fa4() and torch.cuda.get_device_capability() >= (9, 0) else "varlen"


_Context = tuple[Tensor, Tensor] | None


def _reference(
    q_THD: Tensor,
    k_TGD: Tensor,
    v_TGV: Tensor,
    packed: PackedTree,
    scale: float,
    deterministic: bool,
    context: _Context,
) -> Tensor:
    return attention_reference(q_THD, k_TGD, v_TGV, packed, scale, context)


def _varlen(
    q_THD: Tensor,
    k_TGD: Tensor,
    v_TGV: Tensor,
    packed: PackedTree,
    scale: float,
    deterministic: bool,
    context: _Context,
) -> Tensor:
    from harts.ops.attention.paths import attend_paths
    from harts.ops.attention.varlen import TorchVarlen

    return attend_paths(q_THD, k_TGD, v_TGV, packed, scale, TorchVarlen(q_THD, v_TGV), deterministic, context)


def _fa4(
    q_THD: Tensor,
    k_TGD: Tensor,
    v_TGV: Tensor,
    packed: PackedTree,
    scale: float,
    deterministic: bool,
    context: _Context,
) -> Tensor:
    from harts.ops.attention.fa4 import FlashAttention4
    from harts.ops.attention.paths import attend_paths

    return attend_paths(q_THD, k_TGD, v_TGV, packed, scale, FlashAttention4(q_THD, v_TGV), deterministic, context)


_IMPLEMENTATIONS = {"reference": _reference, "varlen": _varlen, "fa4": _fa4}
