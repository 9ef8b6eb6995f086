"""What a recurrence over blocks reads from outside a piece: inputs of replayed rows, and states.

Shape suffixes: T own rows, R replayed rows, O states, H key heads, G value heads, K key size, V value size.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from harts.blocks import BLOCK
from harts.layout import PackedTree
from harts.ops.chains import OutsideReads, outside_reads
from harts.ops.dispatch import check_context

__all__ = ["LinearContext", "check", "linear_reads"]


@dataclass(frozen=True, eq=False)
class LinearContext:
    """Inputs of the rows outside that are replayed, and states behind rows outside; all differentiable.

    Attributes:
        k_RHK, v_RGV, g_RG, beta_RG: as the op was given them, of the rows `linear_reads(packed).replayed_R`; g is
            [R, G, K] for a decay of each key channel, None where all rows share it; beta is None where the op has none.
        states_OGVK: fp32 (or wider): what the op gave for the rows `linear_reads(packed).state_O`.
    """

    k_RHK: Tensor
    v_RGV: Tensor
    g_RG: Tensor | None
    beta_RG: Tensor | None
    states_OGVK: Tensor

    def append_to(
        self, k_THK: Tensor, v_TGV: Tensor, g_TG: Tensor, beta_TG: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """The inputs with the replayed rows behind them."""
        return (
            torch.cat([k_THK, self.k_RHK]),
            torch.cat([v_TGV, self.v_RGV]),
            g_TG if self.g_RG is None else torch.cat([g_TG, self.g_RG]),
            beta_TG if beta_TG is None or self.beta_RG is None else torch.cat([beta_TG, self.beta_RG]),
        )


def linear_reads(packed: PackedTree) -> OutsideReads:
    """What a recurrence over blocks reads from outside a piece, as rows of the tree, ascending; host side."""
    return packed.layout(outside_reads, BLOCK)


def check(op: str, context: LinearContext | None, packed: PackedTree) -> None:
    """Compares a context with what the piece reads.

    Raises:
        ValueError: it is missing or of other lengths.
    """
    reads = linear_reads(packed)
    rows: dict[str, Tensor | None] = {}
    states = {}
    if context is not None:
        states = {"states": context.states_OGVK}
        rows = {"keys": context.k_RHK, "values": context.v_RGV, "decays": context.g_RG, "strengths": context.beta_RG}
    check_context(op, {name: x for name, x in rows.items() if x is not None}, len(reads.replayed_R))
    check_context(op, states, len(reads.state_O))
