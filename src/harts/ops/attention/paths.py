"""Tree attention by a varlen flash kernel.

Forward: queries are a chain's own rows, keys and values its path, gathered, so that a row meets the same keys in the
same tiles as in a batch of separate rows and has the same bits. Chains run group by group (`KeyGroup`), so that never
more than a group's keys and values exist. Groups of root chains need no gather.

Backward: a row's gradient is a sum over what it sees, so it may be cut differently (`branches`): keys shared by many
chains are read once for all queries below them. Calls and rows add up in a fixed order, in fp32.

Shape suffixes: T rows, H query heads, G key heads, D and V head sizes, K keys of a call, Q its queries.
"""

from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from harts.layout import KeyGroup, PackedTree
from harts.ops.attention.branches import BackwardCall, Rows, backward_calls
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
        call: BackwardCall,
        scale: float,
        deterministic: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of q, k and v that pass through these keys; outputs and log-sum-exps are those over all keys."""
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
        lse_HT = lses[0] if len(lses) == 1 else torch.cat(lses, dim=1)
        calls = backward_calls(ctx.packed)
        totals = [_RowSum(x, len(calls)) for x in (q_THD, k_TGD, v_TGV)]
        for call in calls:
            grads = ctx.kernel.backward(
                _take(grad_THV, call.queries),
                _take(q_THD, call.queries),
                _take(k_TGD, call.keys),
                _take(v_TGV, call.keys),
                _take(out_THV, call.queries),
                _take(lse_HT, call.queries, dim=1).contiguous(),
                call,
                ctx.scale,
                ctx.deterministic,
            )
            for total, grad, rows in zip(totals, grads, (call.queries, call.keys, call.keys), strict=True):
                total.add(grad, rows)
        return *(total.result() for total in totals), None, None, None, None


def _groups(packed: PackedTree) -> Iterator[tuple[KeyGroup, slice]]:
    for group in packed.key_groups:
        yield group, slice(group.row_start, group.row_stop)


def _keys(x_TGD: Tensor, group: KeyGroup) -> Tensor:
    if group.key_row_K is None:
        return x_TGD[group.row_start : group.row_stop]
    return x_TGD.index_select(0, group.key_row_K)


def _take(x: Tensor, rows: Rows, dim: int = 0) -> Tensor:
    if isinstance(rows, Tensor):
        return x.index_select(dim, rows)
    return x.narrow(dim, rows.start, rows.stop - rows.start)


class _RowSum:
    """Gradients of rows, call after call, in fp32 (fp64 for fp64) where there are several calls."""

    def __init__(self, x_TX: Tensor, num_calls: int) -> None:
        self.rows, self.dtype = len(x_TX), x_TX.dtype
        self.total: Tensor | None = None
        if num_calls > 1:
            sum_dtype = torch.promote_types(x_TX.dtype, torch.float32)
            self.total = torch.zeros(x_TX.shape, dtype=sum_dtype, device=x_TX.device)

    def add(self, grad_KX: Tensor, rows: Rows) -> None:
        """Adds the gradients of some rows; a single call has all rows."""
        if self.total is None:
            self.total = segment_sum(grad_KX, group_rows(rows, self.rows)) if isinstance(rows, Tensor) else grad_KX
        elif isinstance(rows, Tensor):
            segment_sum(grad_KX, group_rows(rows, len(self.total)), out=self.total)
        else:
            self.total[rows] += grad_KX

    def result(self) -> Tensor:
        """The sums, in the dtype of the rows."""
        assert self.total is not None, "a layout has at least one call"
        return self.total.to(self.dtype)
