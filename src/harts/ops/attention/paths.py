"""Tree attention by a varlen flash kernel.

Forward: queries are a chain's own rows, keys and values its path, gathered, so that a row meets the same keys in the
same tiles as in a batch of separate rows and has the same bits. Chains run group by group (`KeyGroup`), so that never
more than a group's keys and values exist. Groups of root chains need no gather.

Backward: a row's gradient is a sum over what it sees, so it may be cut differently (`branches`): keys shared by many
chains are read once for all queries below them. What the calls give adds up in a fixed order, in fp32.

Shape suffixes: T rows, H query heads, G key heads, D and V head sizes, K keys of a call, Q its queries.
"""

from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from harts.layout import KeyGroup, PackedTree
from harts.ops.attention.branches import BackwardCall, BackwardPlan, Rows, Stage, plan_backward
from harts.ops.attention.kept import Phase, computed_once, current_phase
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
        q_THD, k_TGD, v_TGV, packed, scale, kernel, deterministic, current_phase()
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
        phase: Phase | None,
    ) -> Tensor:
        def compute() -> tuple[Tensor, ...]:
            outs, lses = [], []
            for group, rows in _groups(packed):
                k_KGD, v_KGV = _keys(k_TGD, group), _keys(v_TGV, group)
                out_QHV, lse_HQ = kernel.forward(q_THD[rows], k_KGD, v_KGV, group, scale)
                outs.append(out_QHV)
                lses.append(lse_HQ)
            return (outs[0] if len(outs) == 1 else torch.cat(outs), *lses)

        out_THV, *lses = computed_once(compute, phase)
        ctx.save_for_backward(q_THD, k_TGD, v_TGV, out_THV, *lses)
        ctx.packed, ctx.scale, ctx.kernel, ctx.deterministic = packed, scale, kernel, deterministic
        return out_THV

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad_THV: Tensor) -> tuple[Tensor | None, ...]:
        q_THD, k_TGD, v_TGV, out_THV, *lses = ctx.saved_tensors
        lse_HT = lses[0] if len(lses) == 1 else torch.cat(lses, dim=1)
        plan = plan_backward(ctx.packed)
        grad_q, total_k, total_v = [], _KeySum(k_TGD, plan), _KeySum(v_TGV, plan)
        for stage in plan.stages:
            parts = [
                ctx.kernel.backward(
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
                for call in stage.calls
            ]
            queries, keys, values = (list(each) for each in zip(*parts, strict=True))
            grad_q += queries
            total_k.add(keys, stage)
            total_v.add(values, stage)
            del parts, keys, values  # before the next stage needs room
        grad_THD = _sum_rows(grad_q, plan.queries, len(q_THD))
        return grad_THD, total_k.total, total_v.total, *[None] * 5


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


def _sum_rows(parts: list[Tensor], rows: Rows, num_rows: int, out: Tensor | None = None) -> Tensor:
    """Gradients of rows, those of one row added up."""
    values = parts[0] if len(parts) == 1 else torch.cat(parts)
    if isinstance(rows, slice):
        return values if out is None else out.add_(values)
    return segment_sum(values, group_rows(rows, num_rows), out=out)


class _KeySum:
    """Gradients of keys or values, stage after stage, in fp32 (fp64 for fp64) where there are several."""

    def __init__(self, x_TGX: Tensor, plan: BackwardPlan) -> None:
        self.x_TGX, self.stages = x_TGX, len(plan.stages)
        self.sum: Tensor | None = None
        if self.stages > 1:
            sum_dtype = torch.promote_types(x_TGX.dtype, torch.float32)
            self.sum = torch.zeros(x_TGX.shape, dtype=sum_dtype, device=x_TGX.device)

    def add(self, parts: list[Tensor], stage: Stage) -> None:
        """Adds what the calls of a stage gave."""
        self.sum = _sum_rows(parts, stage.keys, len(self.x_TGX), self.sum)

    @property
    def total(self) -> Tensor:
        """The sums, in the dtype of the rows."""
        assert self.sum is not None, "a layout has at least one stage"
        return self.sum.to(self.x_TGX.dtype)
