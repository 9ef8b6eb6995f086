"""Tree attention by a varlen flash kernel: queries are a chain's own rows, keys and values its path, gathered.

Chains run group by group (`KeyGroup`), so that never more than a group's keys and values exist, in the backward
neither: they are gathered again there, and their gradients are added per row in a fixed order, in fp32 where there are
several groups. Groups of root chains need no gather.

Shape suffixes: T rows, H query heads, G key heads, D and V head sizes, K gathered keys, Q rows of a group.
"""

from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from harts.layout import KeyGroup, PackedTree
from harts.ops.rows import group_rows, segment_sum

__all__ = ["VarlenKernel", "attend_paths"]


class VarlenKernel(Protocol):
    """A flash kernel over sequences of a group, bottom-right causal; `harts.ops.attention.fa4` and `.varlen`."""

    def forward(
        self, q_QHD: Tensor, k_KGD: Tensor, v_KGV: Tensor, group: KeyGroup, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Outputs [Q, H, V] and log-sum-exps [H, Q]."""
        ...

    def backward(
        self,
        grad_QHV: Tensor,
        q_QHD: Tensor,
        k_KGD: Tensor,
        v_KGV: Tensor,
        out_QHV: Tensor,
        lse_HQ: Tensor,
        group: KeyGroup,
        scale: float,
        deterministic: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of q, k and v."""
        ...


def attend_paths(
    q_THD: Tensor,
    k_TGD: Tensor,
    v_TGV: Tensor,
    packed: PackedTree,
    scale: float,
    kernel: VarlenKernel,
    deterministic: bool,
) -> Tensor:
    """See `harts.ops.attention`."""
    return _AttendPaths.apply(  # type: ignore[no-any-return, no-untyped-call]
        q_THD, k_TGD, v_TGV, packed, scale, kernel, deterministic
    )


class _AttendPaths(torch.autograd.Function):
    """Keeps q, k, v, the outputs and the log-sum-exps; not the gathered rows."""

    @staticmethod
    def forward(
        ctx: Any,
        q_THD: Tensor,
        k_TGD: Tensor,
        v_TGV: Tensor,
        packed: PackedTree,
        scale: float,
        kernel: VarlenKernel,
        deterministic: bool,
    ) -> Tensor:
        outs, lses = [], []
        for group, rows in _groups(packed):
            k_KGD, v_KGV = _keys(k_TGD, group), _keys(v_TGV, group)
            out_QHV, lse_HQ = kernel.forward(q_THD[rows], k_KGD, v_KGV, group, scale)
            outs.append(out_QHV)
            lses.append(lse_HQ)
        out_THV = outs[0] if len(outs) == 1 else torch.cat(outs)
        ctx.save_for_backward(q_THD, k_TGD, v_TGV, out_THV, *lses)
        ctx.packed, ctx.scale, ctx.kernel, ctx.deterministic = packed, scale, kernel, deterministic
        return out_THV

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad_THV: Tensor) -> tuple[Tensor | None, ...]:
        q_THD, k_TGD, v_TGV, out_THV, *lses = ctx.saved_tensors
        packed: PackedTree = ctx.packed
        grads_q, total_k, total_v = [], _RowSum(k_TGD, packed), _RowSum(v_TGV, packed)
        for (group, rows), lse_HQ in zip(_groups(packed), lses, strict=True):
            k_KGD, v_KGV = _keys(k_TGD, group), _keys(v_TGV, group)
            grad_q, grad_k, grad_v = ctx.kernel.backward(
                grad_THV[rows],
                q_THD[rows],
                k_KGD,
                v_KGV,
                out_THV[rows],
                lse_HQ,
                group,
                ctx.scale,
                ctx.deterministic,
            )
            del k_KGD, v_KGV
            grads_q.append(grad_q)
            total_k.add(grad_k, group)
            total_v.add(grad_v, group)
        grad_q_THD = grads_q[0] if len(grads_q) == 1 else torch.cat(grads_q)
        return grad_q_THD, total_k.result(), total_v.result(), None, None, None, None


def _groups(packed: PackedTree) -> Iterator[tuple[KeyGroup, slice]]:
    for group in packed.key_groups:
        yield group, slice(group.row_start, group.row_stop)


def _keys(x_TGD: Tensor, group: KeyGroup) -> Tensor:
    if group.key_row_K is None:
        return x_TGD[group.row_start : group.row_stop]
    return x_TGD.index_select(0, group.key_row_K)


class _RowSum:
    """Gradients of keys or values, group after group."""

    def __init__(self, x_TGD: Tensor, packed: PackedTree) -> None:
        self.rows, self.dtype = len(x_TGD), x_TGD.dtype
        self.only_one = len(packed.key_groups) == 1
        sum_dtype = torch.promote_types(x_TGD.dtype, torch.float32)
        shape = (0,) if self.only_one else x_TGD.shape
        self.total = torch.zeros(shape, dtype=sum_dtype, device=x_TGD.device)

    def add(self, grad_KGD: Tensor, group: KeyGroup) -> None:
        """Adds the gradients of a group's gathered rows."""
        index_K = group.key_row_K
        if self.only_one:
            self.total = grad_KGD if index_K is None else segment_sum(grad_KGD, group_rows(index_K, self.rows))
        elif index_K is None:
            self.total[group.row_start : group.row_stop] += grad_KGD
        else:
            segment_sum(grad_KGD, group_rows(index_K, self.rows), out=self.total)

    def result(self) -> Tensor:
        """The sums, in the dtype of keys and values."""
        return self.total.to(self.dtype)
