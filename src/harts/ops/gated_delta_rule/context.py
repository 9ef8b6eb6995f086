"""What the gated delta rule of a piece reads from outside.

Shape suffixes: T own rows, R replayed rows, O states, H key heads, G value heads, K key size, V value size.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from harts.blocks import BLOCK
from harts.layout import PackedTree
from harts.ops.chains import OutsideReads, outside_reads
from harts.ops.dispatch import check_context

__all__ = ["DeltaContext", "check", "delta_reads"]


@dataclass(frozen=True, eq=False)
class DeltaContext:
    """Inputs of the rows outside that are replayed, and states behind rows outside; all differentiable.

    Attributes:
        k_RHK, v_RGV, g_RG, beta_RG: as the op was given them, of the rows `delta_reads(packed).replayed_R`.
        states_OGVK: fp32 (or wider): what `gated_delta_rule_and_states` gave for `delta_reads(packed).state_O`.
    """

    k_RHK: Tensor
    v_RGV: Tensor
    g_RG: Tensor
    beta_RG: Tensor
    states_OGVK: Tensor

    def append_to(self, k_THK: Tensor, v_TGV: Tensor, g_TG: Tensor, beta_TG: Tensor) -> tuple[Tensor, ...]:
        """The inputs with the replayed rows behind them."""
        return (
            torch.cat([k_THK, self.k_RHK]),
            torch.cat([v_TGV, self.v_RGV]),
            torch.cat([g_TG, self.g_RG]),
            torch.cat([beta_TG, self.beta_RG]),
        )


def delta_reads(packed: PackedTree) -> OutsideReads:
    """What the gated delta rule reads from outside a piece, as rows of the tree, ascending; host side."""
    return packed.layout(outside_reads, BLOCK)


def check(context: DeltaContext | None, packed: PackedTree) -> None:
    """Compares a context with what the piece reads.

    Raises:
        ValueError: it is missing or of other lengths.
    """
    reads = delta_reads(packed)
    rows, states = {}, {}
    if context is not None:
        states = {"states": context.states_OGVK}
        rows = {"keys": context.k_RHK, "values": context.v_RGV, "decays": context.g_RG, "strengths": context.beta_RG}
    check_context("gated_delta_rule", rows, len(reads.replayed_R))
    check_context("gated_delta_rule", states, len(reads.state_O))
