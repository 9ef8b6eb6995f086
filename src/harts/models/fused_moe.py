"""The parts of `harts.models.fuse` for mixtures of experts; the router stays the model's own, with its hooks.

Shape suffixes: T rows, D channels, K experts per row.
"""

from typing import Any

from torch import Tensor, nn

from harts.models.fuse import fused_impl
from harts.ops.moe import run_experts

__all__ = ["FusedExperts", "FusedSharedExpertBlock"]


class FusedExperts(nn.Module):
    """All experts of a layer, for rows whose experts are chosen."""

    gate_up_proj: Tensor
    down_proj: Tensor

    def forward(
        self,
        hidden_states: Tensor,  # [T, D]
        top_k_index: Tensor,  # [T, K]
        top_k_weights: Tensor,
        *,
        shared: Tensor | None = None,
        shared_gate: Tensor | None = None,
    ) -> Tensor:
        """The weighted sum of each row's experts; with `shared` [T, D], sigmoid(<x, shared_gate>) of it is added."""
        return run_experts(
            hidden_states,
            top_k_index,
            top_k_weights,
            self.gate_up_proj,
            self.down_proj,
            shared_TD=shared,
            shared_gate_D=shared_gate,
            impl=fused_impl(self),
        )


class FusedSharedExpertBlock(nn.Module):
    """Router, experts and the expert that all rows share, behind a gate of one channel.

    Its product is part of the last kernel: as a product of its own, of one column, its bits depend on how many rows
    there are.
    """

    gate: Any
    experts: Any
    shared_expert: Any
    shared_expert_gate: Any

    def forward(self, hidden_states: Tensor) -> Tensor:
        """[..., D] -> [..., D]."""
        gate = self.shared_expert_gate
        if not isinstance(gate, nn.Linear) or gate.bias is not None:
            raise ValueError(
                f"model: expected shared_expert_gate to be a plain linear layer, got {type(gate).__name__}; leave it "
                "out of LoRA (exclude_modules=['shared_expert_gate']), or call harts.models.fuse.unfuse"
            )
        x_TD = hidden_states.reshape(-1, hidden_states.shape[-1])
        _, weight_TK, chosen_TK = self.gate(x_TD)
        out_TD = self.experts(
            x_TD, chosen_TK, weight_TK, shared=self.shared_expert(x_TD), shared_gate=gate.weight.squeeze(0)
        )
        return out_TD.view(hidden_states.shape)  # type: ignore[no-any-return]
