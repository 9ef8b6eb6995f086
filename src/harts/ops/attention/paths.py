"""Tree attention by a varlen flash kernel.

Forward: queries are a chain's own rows, keys and values its path, so that a row meets the same keys in the same tiles
as in a batch of separate rows and has the same bits. Where the kernel reads keys by pages (`pages`), chains read them
where they lie, most often all in one call; else paths are gathered, call by call, so that never more than a call's keys
and values exist. Root chains need neither.

Backward: a row's gradient is a sum over what it sees, so it may be cut differently (`branches`): keys shared by many
chains are read once for all queries below them. What the calls give adds up in a fixed order, in fp32.

With a window, each chain reads the last rows of its path alone. A sink is a key of value zero whose score is learned,
one for each head: outputs and log-sum-exps of a call without sinks tell what those with them are, and a backward that
gets the latter gives the right gradients.

Shape suffixes: T rows, P rows outside and T rows behind them, H query heads, G key heads, D and V head sizes, K keys
of a call, Q its queries, N pages of R rows.
"""

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from harts.layout import PackedTree
from harts.ops.attention.branches import BackwardPlan, Stage, plan_backward
from harts.ops.attention.calls import Call, forward_calls, limits, take
from harts.ops.attention.kept import Phase, computed_once, current_phase
from harts.ops.attention.pages import KeyPages, key_pages
from harts.ops.rows import RowIndex, segment_sum

__all__ = ["PagedForward", "VarlenKernel", "attend_paths"]


class PagedForward(Protocol):
    """A forward that reads keys page by page."""

    page_rows: int
    """Rows of a page: a tile of the kernel."""

    def __call__(
        self, q_QHD: Tensor, k_NRGD: Tensor, v_NRGV: Tensor, pages: KeyPages, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Outputs [Q, H, V] and log-sum-exps [H, Q] of the chains."""
        ...


class VarlenKernel(Protocol):
    """A flash kernel over sequences of a call; `harts.ops.attention.fa4` and `.varlen`."""

    @property
    def paged(self) -> PagedForward | None:
        """The forward over pages, where the kernel has one."""
        ...

    @property
    def leaves_gaps(self) -> bool:
        """Whether the backward can leave out rows between sequences, `Call.used_queries_C`."""
        ...

    @property
    def key_tile(self) -> int:
        """A multiple of the keys that the forward reads at once; see `harts.ops.attention.calls.forward_calls`."""
        ...

    def forward(self, q_QHD: Tensor, k_KGD: Tensor, v_KGV: Tensor, call: Call, scale: float) -> tuple[Tensor, Tensor]:
        """Outputs [Q, H, V] and log-sum-exps [H, Q] of a causal call."""
        ...

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
        """Writes gradients of q, k and v that pass through these keys; outputs and log-sum-exps are those over all.

        Rows of the gradient of q in gaps between sequences may be left as they are.
        """
        ...


def attend_paths(
    q_THD: Tensor,
    k_TGD: Tensor,
    v_TGV: Tensor,
    packed: PackedTree,
    scale: float,
    kernel: VarlenKernel,
    deterministic: bool,
    context: tuple[Tensor, Tensor] | None = None,
    *,
    window: int | None = None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """See `harts.ops.attention`."""
    outside = (None, None) if context is None else context
    return _AttendPaths.apply(  # type: ignore[no-any-return, no-untyped-call]
        q_THD, k_TGD, v_TGV, *outside, sinks_H, packed, scale, kernel, deterministic, current_phase(), window
    )


class _AttendPaths(torch.autograd.Function):
    """Keeps q, k, v, the outputs and the log-sum-exps; not the gathered rows."""

    @staticmethod
    def forward(
        ctx: Any,
        q_THD: Tensor,
        k_TGD: Tensor,
        v_TGV: Tensor,
        k_outside: Tensor | None,
        v_outside: Tensor | None,
        sinks_H: Tensor | None,
        packed: PackedTree,
        scale: float,
        kernel: VarlenKernel,
        deterministic: bool,
        phase: Phase | None,
        window: int | None,
    ) -> Tensor:
        def compute() -> tuple[Tensor, ...]:
            keys = (k_TGD,) if k_outside is None else (k_outside, k_TGD)
            values = (v_TGV,) if v_outside is None else (v_outside, v_TGV)
            results = _forward(q_THD, keys, values, packed, scale, kernel, window)
            return results if sinks_H is None else _with_sinks(*results, sinks_H=sinks_H)

        out_THV, *lses = computed_once(compute, phase)
        ctx.save_for_backward(q_THD, k_TGD, v_TGV, k_outside, v_outside, sinks_H, out_THV, *lses)
        ctx.packed, ctx.scale, ctx.kernel, ctx.deterministic = packed, scale, kernel, deterministic
        ctx.window = window
        return out_THV

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad_THV: Tensor) -> tuple[Tensor | None, ...]:
        q_THD, k_TGD, v_TGV, k_outside, v_outside, sinks_H, out_THV, *lses = ctx.saved_tensors
        lse_HT = lses[0] if len(lses) == 1 else torch.cat(lses, dim=1)
        k_PGD = k_TGD if k_outside is None else torch.cat([k_outside, k_TGD])
        v_PGV = v_TGV if v_outside is None else torch.cat([v_outside, v_TGV])
        plan = ctx.packed.layout(plan_backward, ctx.kernel.leaves_gaps, *limits(ctx.window))
        total_q, total_k, total_v = _QuerySum(q_THD, plan), _KeySum(k_PGD, plan), _KeySum(v_PGV, plan)
        for stage in plan.stages:
            total_k.start(stage)
            total_v.start(stage)
            for call in stage.calls:
                ctx.kernel.backward(
                    take(grad_THV, call.queries).contiguous(),
                    take(q_THD, call.queries),
                    take(k_PGD, call.keys),
                    take(v_PGV, call.keys),
                    take(out_THV, call.queries),
                    take(lse_HT, call.queries, dim=1).contiguous(),
                    call,
                    ctx.scale,
                    ctx.deterministic,
                    (total_q.part(call), total_k.part(call), total_v.part(call)),
                )
            total_k.finish(stage)
            total_v.finish(stage)
        grad_sinks = None if sinks_H is None else _sink_gradient(sinks_H, grad_THV, out_THV, lse_HT)
        grad_k_PGD, grad_v_PGV = total_k.total(), total_v.total()
        rows = ctx.packed.num_outside
        own = (total_q.total(), grad_k_PGD[rows:], grad_v_PGV[rows:])
        outside = (None, None) if k_outside is None else (grad_k_PGD[:rows], grad_v_PGV[:rows])
        return *own, *outside, grad_sinks, *[None] * 6


def _forward(
    q_THD: Tensor,
    keys: tuple[Tensor, ...],
    values: tuple[Tensor, ...],
    packed: PackedTree,
    scale: float,
    kernel: VarlenKernel,
    window: int | None,
) -> tuple[Tensor, ...]:
    """Outputs, and log-sum-exps of one or several calls; keys and values with those outside in front."""
    parts = []
    if kernel.paged is not None and packed.chains.parent_row_C.max() >= 0:
        for pages in packed.layout(key_pages, kernel.paged.page_rows, *limits(window)):
            parts.append(kernel.paged(q_THD[pages.queries], pages.view(*keys), pages.view(*values), pages, scale))
    else:
        k_PGD, v_PGV = (x[0] if len(x) == 1 else torch.cat(x) for x in (keys, values))
        for call in packed.layout(forward_calls, *limits(window, kernel.key_tile)):
            q_QHD, k_KGD, v_KGV = take(q_THD, call.queries), take(k_PGD, call.keys), take(v_PGV, call.keys)
            parts.append(kernel.forward(q_QHD, k_KGD, v_KGV, call, scale))
    outs, lses = zip(*parts, strict=True)
    return (outs[0] if len(outs) == 1 else torch.cat(outs), *lses)


def _with_sinks(out_THV: Tensor, *lses: Tensor, sinks_H: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs and log-sum-exps [H, T] with one more key in each head, whose value is zero."""
    lse_HT = lses[0] if len(lses) == 1 else torch.cat(lses, dim=1)
    sinks_H1 = sinks_H.to(lse_HT.dtype).unsqueeze(1)
    share_TH1 = (lse_HT - sinks_H1).sigmoid().T.unsqueeze(-1)  # what is left to the other keys
    return (out_THV * share_TH1).to(out_THV.dtype), torch.logaddexp(lse_HT, sinks_H1)


def _sink_gradient(sinks_H: Tensor, grad_THV: Tensor, out_THV: Tensor, lse_HT: Tensor) -> Tensor:
    """Of the sinks' scores; `out_THV` and `lse_HT` are those with sinks."""
    weight_HT = (sinks_H.to(lse_HT.dtype).unsqueeze(1) - lse_HT).exp()
    share_TH = (grad_THV.to(lse_HT.dtype) * out_THV).sum(-1)
    return -(weight_HT * share_TH.T).sum(1).to(sinks_H.dtype)


class _Parts:
    """Room for what several calls give, one after the other."""

    def __init__(self, like: Tensor, rows: int) -> None:
        self.values, self.filled = like.new_empty(rows, *like.shape[1:]), 0

    def next(self, rows: int) -> Tensor:
        """Where the next rows go."""
        self.filled += rows
        return self.values[self.filled - rows : self.filled]


def _add_up(parts: _Parts, rows: RowIndex | None, out: Tensor | None = None) -> Tensor:
    """Gradients of rows, those of one row added up."""
    assert parts.filled == len(parts.values), "every call has written its part"
    if rows is None:
        return parts.values if out is None else out.add_(parts.values)
    return segment_sum(parts.values, rows.groups, out=out)


class _QuerySum:
    """Gradients of queries: of all calls, then added up."""

    def __init__(self, q_THD: Tensor, plan: BackwardPlan) -> None:
        self.rows = plan.queries
        self.parts = _Parts(q_THD, sum(call.num_queries for stage in plan.stages for call in stage.calls))

    def part(self, call: Call) -> Tensor:
        """Where a call writes."""
        return self.parts.next(call.num_queries)

    def total(self) -> Tensor:
        """The sums."""
        return _add_up(self.parts, self.rows)


class _KeySum:
    """Gradients of keys or values, stage after stage, in fp32 (fp64 for fp64) where there are several."""

    def __init__(self, x_PGX: Tensor, plan: BackwardPlan) -> None:
        self.x_PGX = x_PGX
        self.sum: Tensor | None = None
        if len(plan.stages) > 1:
            sum_dtype = torch.promote_types(x_PGX.dtype, torch.float32)
            self.sum = torch.zeros(x_PGX.shape, dtype=sum_dtype, device=x_PGX.device)

    def start(self, stage: Stage) -> None:
        """Makes room for the calls of a stage."""
        self.parts = _Parts(self.x_PGX, sum(call.num_keys for call in stage.calls))

    def part(self, call: Call) -> Tensor:
        """Where a call writes."""
        return self.parts.next(call.num_keys)

    def finish(self, stage: Stage) -> None:
        """Adds what the calls of a stage gave, and gives the room back."""
        self.sum = _add_up(self.parts, stage.keys, self.sum)
        del self.parts

    def total(self) -> Tensor:
        """The sums, in the dtype of the rows."""
        assert self.sum is not None, "a layout has at least one stage"
        return self.sum.to(self.x_PGX.dtype)
