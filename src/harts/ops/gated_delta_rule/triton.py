# mypy: disable-error-code="no-untyped-call, untyped-decorator"
"""The gated delta rule of a tree on a GPU: Triton kernels put together, forward and backward.

Everything that is parallel over blocks runs once over the whole block tree (`blockwise`); only the recurrence follows
the tree (`recurrence`), in one launch in which programs wait for the chains that theirs start from. A block's numbers
depend on the rows of its path alone, not on chain, launch or neighbours: outputs are bit for bit those of separate
rows, and everything is bit for bit the same in every run.

Shape suffixes: T rows, X rows with those replayed from outside (X = T for a whole tree), E blocks, C chains, J
boundaries, O states from outside, W wanted states, H key heads, G value heads, K key size, V value size.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from harts.blocks import BLOCK
from harts.layout import PackedTree
from harts.ops.chains import ChainOrder, Schedule, chain_order, schedule
from harts.ops.gated_delta_rule import blockwise, recurrence
from harts.ops.linear_attention.context import LinearContext
from harts.ops.requirements import require_triton

__all__ = [
    "Blocks",
    "LaunchPlan",
    "gated_delta_rule_triton",
    "make_launch_plan",
    "run_blocks",
    "run_state_gradients",
    "run_states",
]

INTERPRETED = not isinstance(recurrence.states_kernel, triton.runtime.JITFunction)
"""Whether the kernels run in Triton's interpreter, on a CPU; decided by Triton when they are defined."""

SIZES = (16, 32, 64, 128) if INTERPRETED else (128,)
"""Head sizes. On a Hopper GPU (Triton 3.7.1) tiles of 32 columns came out wrong; 64 has not been tried there."""
DTYPES = (torch.float32,) if INTERPRETED else (torch.bfloat16,)
"""Of q, k and v: the interpreter cannot multiply bfloat16, and fp32 tiles of this size do not fit a GPU."""
VALUE_TILE = 64
"""Value columns of a program of the recurrence."""


@dataclass(frozen=True)
class LaunchPlan:
    """What does not change between forward and backward."""

    schedule: Schedule
    order: ChainOrder
    num_rows: int
    heads: int
    groups: int
    key_size: int
    value_size: int

    @property
    def tile(self) -> int:
        """Value columns of a program of the recurrence."""
        return min(VALUE_TILE, self.value_size)

    @property
    def scale(self) -> float:
        """Of q."""
        return float(self.key_size**-0.5)

    @property
    def sizes(self) -> dict[str, int]:
        """Of a kernel that reads keys and values."""
        return {"H": self.heads, "G": self.groups, "K": self.key_size, "V": self.value_size}

    def tiles(self, like: Tensor, *shape: int) -> Tensor:
        """One contiguous tile a block and value head."""
        return like.new_empty(self.schedule.num_blocks, self.groups, *shape)

    def copies(self, like: Tensor, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Gradients by target: rows, then the copies of the rows with several slots."""
        rows = self.schedule.num_rows + self.schedule.num_copies
        return like.new_empty(rows, self.groups, *shape, dtype=dtype or like.dtype)

    def flags(self, like: Tensor, sets: int) -> Tensor:
        """A ticket counter and `sets` of flags by boundary, value head and tile, all 0."""
        flags = sets * self.schedule.num_boundaries * self.groups * (self.value_size // self.tile)
        return torch.zeros(1 + flags, dtype=torch.int32, device=like.device)

    def by_boundary(self, flags: Tensor) -> Tensor:
        """One set of flags as [J, value heads * tiles]: a view."""
        return flags.view(self.schedule.num_boundaries, -1)


@dataclass(frozen=True)
class Blocks:
    """What the forward computes block by block and the backward reads again (see `blockwise` for the shapes)."""

    q_unit: Tensor
    k_unit: Tensor
    gamma: Tensor
    inverse: Tensor
    w: Tensor
    written: Tensor
    states: Tensor


def gated_delta_rule_triton(
    q_THK: Tensor,
    k_THK: Tensor,
    v_TGV: Tensor,
    g_TG: Tensor,
    beta_TG: Tensor,
    packed: PackedTree,
    context: LinearContext | None = None,
    wanted: tuple[int, ...] = (),
    *,
    recompute: bool = False,
) -> tuple[Tensor, Tensor]:
    """See `harts.ops.gated_delta_rule_and_states`.

    Args:
        recompute: keep only the inputs for the backward and run the forward again there. Otherwise what the kernels
            hand on is kept too: 2 K (1 + 2 H / G) + 2 V + 128 + K V / 32 bytes a slot and value head, which is 45 kB a
            row at K = V = 128, H = 16, G = 32.

    Raises:
        ValueError: the device, the Triton version, a dtype, a head size or a memory layout is not supported.
    """
    _check(q_THK, k_THK, v_TGV, g_TG, beta_TG, packed)
    plan = make_launch_plan(q_THK, v_TGV, packed, wanted)
    inputs: tuple[Tensor | None, ...] = (k_THK, v_TGV, g_TG, beta_TG)
    states_OGVK = None
    if context is not None:
        inputs, states_OGVK = context.append_to(k_THK, v_TGV, g_TG, beta_TG), context.states_OGVK.contiguous()
    o_TGV, states_WGVK = _GatedDeltaRule.apply(q_THK, *inputs, states_OGVK, plan, recompute)
    return o_TGV, states_WGVK


def make_launch_plan(q_THK: Tensor, v_TGV: Tensor, packed: PackedTree, wanted: tuple[int, ...] = ()) -> LaunchPlan:
    """Sizes, slots and order of one call; see `gated_delta_rule_triton`."""
    rows, heads, key_size = q_THK.shape
    groups, value_size = v_TGV.shape[1:]
    processors = 1 if INTERPRETED else torch.cuda.get_device_properties(q_THK.device).multi_processor_count
    programs = groups * value_size // min(VALUE_TILE, value_size)  # a chain
    slots = packed.layout(schedule, BLOCK, wanted)
    order = packed.layout(chain_order, BLOCK, max(processors // programs, 1))
    return LaunchPlan(slots, order, rows, heads, groups, key_size, value_size)


class _GatedDeltaRule(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        states_OGVK: Tensor | None,
        plan: LaunchPlan,
        recompute: bool,
    ) -> tuple[Tensor, Tensor]:
        with _device_of(q):
            blocks, handed_JGVK = run_blocks(q, k, v, g, beta, states_OGVK, plan)
            o_TGV = torch.empty(plan.num_rows, *v.shape[1:], dtype=q.dtype, device=q.device)
            _launch(
                blockwise.outputs_kernel,
                plan.schedule.num_blocks * plan.groups,
                *(blocks.q_unit, blocks.k_unit, blocks.written, blocks.states, blocks.gamma, o_TGV),
                *(plan.schedule.own_row_S, plan.scale),
                **plan.sizes,
                PRECISION=_precision(q),
            )
        ctx.plan = plan
        kept = () if recompute else tuple(vars(blocks).values())
        ctx.save_for_backward(q, k, v, g, beta, states_OGVK, *kept)
        return o_TGV, handed_JGVK.index_select(0, plan.schedule.wanted_W)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(  # type: ignore[override]
        ctx: Any, do_TGV: Tensor, dstates_WGVK: Tensor
    ) -> tuple[Tensor | None, ...]:
        plan: LaunchPlan = ctx.plan
        q, k, v, g, beta, states_OGVK, *kept = ctx.saved_tensors
        with _device_of(q):
            blocks = Blocks(*kept) if kept else run_blocks(q, k, v, g, beta, states_OGVK, plan)[0]
            *grads, dg, dbeta, handed = _run_gradients(q, k, v, beta, do_TGV.contiguous(), dstates_WGVK, blocks, plan)
        dstates = None if states_OGVK is None else handed.index_select(0, plan.schedule.first_child_O)
        return *grads, dg.to(g.dtype), dbeta.to(beta.dtype), dstates, None, None


def run_blocks(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, states_OGVK: Tensor | None, plan: LaunchPlan
) -> tuple[Blocks, Tensor]:
    """Everything of the forward but the outputs; and the states at boundaries, [J, G, V, K] in fp32."""
    schedule = plan.schedule
    q_unit = q.new_empty(schedule.num_blocks, plan.heads, BLOCK, plan.key_size)
    k_unit = torch.empty_like(q_unit)
    _launch(
        blockwise.unit_rows_kernel,
        schedule.num_blocks * plan.heads,
        *(q, k, q_unit, k_unit, schedule.row_S, schedule.own_row_S, q.stride(0), k.stride(0)),
        H=plan.heads,
        K=plan.key_size,
    )
    gamma, inverse, w, u = _run_corrections(k_unit, v, g, beta, plan)
    states, written, handed = run_states(k_unit, w, u, gamma, plan, states_OGVK)
    return Blocks(q_unit, k_unit, gamma, inverse, w, written, states), handed


def _run_corrections(
    k_unit: Tensor, v: Tensor, g: Tensor, beta: Tensor, plan: LaunchPlan
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """gamma, (I + A)^-1, w and u of every block, see `blockwise`."""
    gamma = plan.tiles(g, BLOCK)
    inverse, w = plan.tiles(k_unit, BLOCK, BLOCK), plan.tiles(k_unit, BLOCK, plan.key_size)
    u = plan.tiles(k_unit, plan.value_size, BLOCK)
    _launch(
        blockwise.corrections_kernel,
        plan.schedule.num_blocks * plan.groups,
        *(k_unit, v, g, beta, gamma, inverse, w, u, plan.schedule.row_S, v.stride(0), g.stride(0), beta.stride(0)),
        **plan.sizes,
        BK=_parts(blockwise.corrections_kernel, plan.key_size),
        BV=_parts(blockwise.corrections_kernel, plan.value_size),
        PRECISION=_precision(k_unit),
    )
    return gamma, inverse, w, u


def run_states(
    k_unit: Tensor, w: Tensor, u: Tensor, gamma: Tensor, plan: LaunchPlan, states_OGVK: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """The recurrence.

    Returns:
        States [E, G, V, K] at the start of every block, values [E, G, V, 64] written to them, and states at boundaries
        [J, G, V, K] in fp32.
    """
    schedule = plan.schedule
    states, written = plan.tiles(w, plan.value_size, plan.key_size), torch.empty_like(u)
    handed = w.new_empty(schedule.num_boundaries, *states.shape[1:], dtype=torch.float32)
    flags = plan.flags(w, sets=1)
    if states_OGVK is not None and schedule.num_outside:
        handed[: schedule.num_outside] = states_OGVK
        plan.by_boundary(flags[1:])[: schedule.num_outside] = 1
    _launch_recurrence(
        recurrence.states_kernel,
        plan,
        *(k_unit, w, u, gamma, states, written, handed, flags[1:], flags),
        *(plan.order.forward_C, schedule.first_block_C1, schedule.boundary_E, schedule.source_C),
        PRECISION=_precision(w),
    )
    return states, written, handed


def run_state_gradients(
    blocks: Blocks, do_scaled: Tensor, local: Tensor, plan: LaunchPlan, dstates_WGVK: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """The recurrence of the gradients: of the state at the end of every block, and of the values written to it.

    Returns:
        Those two, and the gradients of the states that chains start from, [C + W, G, V, K] in fp32; those of one
        boundary are added up in the place of its first chain. In the last W places are the gradients given for the
        wanted states.
    """
    schedule = plan.schedule
    dstates, dwritten = torch.empty_like(blocks.states), torch.empty_like(local)
    places = schedule.num_chains + schedule.num_wanted
    handed = local.new_empty(places, *dstates.shape[1:], dtype=torch.float32)
    flags = plan.flags(local, sets=2)
    summed, arrived = flags[1:].chunk(2) if schedule.num_boundaries else (flags, flags)
    if schedule.num_wanted and dstates_WGVK is not None:
        handed[schedule.num_chains :] = dstates_WGVK
        plan.by_boundary(arrived)[schedule.wanted_W] = 1
        plan.by_boundary(summed)[schedule.alone_A] = 1
    _launch_recurrence(
        recurrence.state_gradients_kernel,
        plan,
        *(blocks.q_unit, blocks.k_unit, blocks.w, blocks.gamma, do_scaled, local, dstates, dwritten, handed),
        *(summed, arrived, flags, plan.order.backward_C, schedule.first_block_C1, schedule.boundary_E),
        *(schedule.source_C, schedule.children_J1, schedule.child_L),
        PRECISION=_precision(local),
    )
    return dstates, dwritten, handed


def _run_gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    do: Tensor,
    dstates_WGVK: Tensor,
    blocks: Blocks,
    plan: LaunchPlan,
) -> tuple[Tensor, ...]:
    """Gradients of q, k, v, g and beta, the last two in fp32; and of states, see `run_state_gradients`."""
    schedule, programs = plan.schedule, plan.schedule.num_blocks * plan.groups
    do_scaled, local = (plan.tiles(q, plan.value_size, BLOCK) for _ in range(2))
    _launch(
        blockwise.local_gradients_kernel,
        programs,
        *(blocks.q_unit, blocks.k_unit, blocks.gamma, do, do_scaled, local, schedule.own_row_S, plan.scale),
        **plan.sizes,
        PRECISION=_precision(q),
    )
    dstates, dwritten, handed = run_state_gradients(blocks, do_scaled, local, plan, dstates_WGVK)
    del do_scaled, local
    dq_unit = q.new_empty(plan.num_rows, plan.groups, plan.key_size)
    dk_unit, dv = plan.copies(q, plan.key_size), plan.copies(q, plan.value_size)
    dg, dbeta = plan.copies(q, dtype=torch.float32), plan.copies(q, dtype=torch.float32)
    _launch(
        blockwise.block_gradients_kernel,
        programs,
        *(blocks.q_unit, blocks.k_unit, v, beta, blocks.gamma, blocks.inverse, blocks.written, blocks.states),
        *(do, dwritten, dstates, dq_unit, dk_unit, dv, dg, dbeta),
        *(schedule.row_S, schedule.own_row_S, schedule.target_S, v.stride(0), beta.stride(0), plan.scale),
        **plan.sizes,
        BK=_parts(blockwise.block_gradients_kernel, plan.key_size),
        PRECISION=_precision(q),
    )
    _add_copies(plan, dk_unit, dv, dg, dbeta)
    dq, dk = _unit_gradients(q, dq_unit, plan), _unit_gradients(k, dk_unit, plan)
    rows = plan.schedule.num_rows
    return dq, dk, dv[:rows], dg[:rows], dbeta[:rows], handed


def _add_copies(plan: LaunchPlan, *gradients: Tensor) -> None:
    """Adds the copies of each row with several slots into the row, in the order of their chains."""
    for x in gradients:
        inner = x.shape[2:].numel()
        groups, size = (plan.groups, inner) if inner > 1 else (1, plan.groups)
        if size & (size - 1):  # a vector in Triton has a power of two of entries
            groups, size = groups * size, 1
        _launch(
            blockwise.add_copies_kernel,
            len(plan.schedule.row_D) * groups,
            *(x, plan.schedule.row_D, plan.schedule.copies_D1, plan.schedule.num_rows),
            G=groups,
            N=size,
        )


def _unit_gradients(x: Tensor, dunit: Tensor, plan: LaunchPlan) -> Tensor:
    """Gradient of q or k from that of its unit rows, summed over the value heads that share it."""
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows = 32
    _launch(
        blockwise.unit_gradients_kernel,
        triton.cdiv(len(x), rows) * plan.heads,
        *(x, dunit, dx, len(x), x.stride(0)),
        H=plan.heads,
        G=plan.groups,
        K=plan.key_size,
        ROWS=rows,
    )
    return dx


# -- launches ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Config:
    """How a kernel runs: warps a program, stages of its pipelined loop, and columns that the loop takes at a time."""

    warps: int
    stages: int = 1
    width: int = 64


CONFIGS: dict[Any, _Config] = {
    blockwise.unit_rows_kernel: _Config(4),
    blockwise.corrections_kernel: _Config(4),
    blockwise.outputs_kernel: _Config(4),
    blockwise.local_gradients_kernel: _Config(4),
    blockwise.block_gradients_kernel: _Config(4),
    blockwise.add_copies_kernel: _Config(1),
    blockwise.unit_gradients_kernel: _Config(4),
    recurrence.states_kernel: _Config(4, stages=3),
    recurrence.state_gradients_kernel: _Config(4, stages=3),
}
"""The fastest of those tried on an H200 at K = V = 128 (benchmarks/ops_gated_delta_rule.py)."""


def _launch(kernel: Any, programs: int, *arguments: Any, **constants: Any) -> None:
    if programs:
        config = CONFIGS[kernel]
        kernel[(programs,)](*arguments, **constants, num_warps=config.warps, num_stages=config.stages)


def _parts(kernel: Any, size: int) -> int:
    """Columns that the kernel's loop takes at a time."""
    return min(CONFIGS[kernel].width, size)


def _launch_recurrence(kernel: Any, plan: LaunchPlan, *arguments: Any, PRECISION: str) -> None:
    """One program a chain, value head and tile."""
    _launch(
        kernel,
        plan.schedule.num_chains * plan.groups * (plan.value_size // plan.tile),
        *arguments,
        **plan.sizes,
        BV=plan.tile,
        PRECISION=PRECISION,
        INTERPRETED=INTERPRETED,
        STAGES=CONFIGS[kernel].stages,
    )


def _precision(x: Tensor) -> str:
    """Of products of fp32 tiles: full for fp32 inputs; for bf16 tf32 has more bits than the result."""
    return "ieee" if x.dtype == torch.float32 else "tf32"


def _device_of(x: Tensor) -> Any:
    """Triton launches on the current device."""
    return torch.cuda.device(x.device) if x.is_cuda else torch.no_grad()


# -- checks ------------------------------------------------------------------------------------------------------------


def _check(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, packed: PackedTree) -> None:
    """Refuses what the kernels cannot do, before any of them runs."""
    op = "gated_delta_rule, impl='triton'"
    require_triton("gated_delta_rule", q.device)
    named = {"q": q, "k": k, "v": v, "g": g, "beta": beta}
    for name, x in named.items():
        if x.device != packed.device:
            raise ValueError(f"{op}: expected {name} on the device of packed, {packed.device}, got {x.device}")
    if q.dtype not in DTYPES or k.dtype != q.dtype or v.dtype != q.dtype:
        raise ValueError(
            f"{op}: expected q, k and v of one dtype, {DTYPES[0]}, got {q.dtype}, {k.dtype}, {v.dtype}; cast them, or "
            "use impl='reference'"
        )
    if g.dtype != torch.float32 or beta.dtype not in (torch.float32, q.dtype):
        raise ValueError(
            f"{op}: expected g in float32 and beta in float32 or {q.dtype}, got {g.dtype} and {beta.dtype}; cast them"
        )
    for name, size in (("K", q.shape[-1]), ("V", v.shape[-1])):
        if size not in SIZES:
            raise ValueError(f"{op}: expected a head size {name} of {SIZES}, got {size}; use impl='reference'")
    for name, x in named.items():
        inner = x.stride()[1:] if x.shape[0] else ()
        expected: list[int] = [x.shape[-1], 1] if x.dim() == 3 else [1]
        wrong = [a for a, b, n in zip(inner, expected, x.shape[1:], strict=True) if a != b and n > 1]
        if wrong:
            raise ValueError(
                f"{op}: expected {name} with contiguous heads (strides {expected} behind the rows'), got strides "
                f"{list(x.stride())}; call .contiguous()"
            )
