"""A mixture of experts in plain PyTorch, one expert after another.

Shape suffixes: T rows, D channels, E experts, K experts per row, S = T * K pairs (row, expert) in order of experts, R
pairs of one expert, I channels inside an expert, J = 2 * I.
"""

import torch
from torch import Tensor
from torch.nn.functional import linear, silu

__all__ = ["run_experts_reference"]


def run_experts_reference(
    x_TD: Tensor,
    chosen_TK: Tensor,
    weight_TK: Tensor,
    gate_up_EJD: Tensor,
    down_EDI: Tensor,
    shared_TD: Tensor | None,
    shared_gate_D: Tensor | None,
) -> Tensor:
    """See `harts.ops.moe.run_experts`."""
    rows, per_row = chosen_TK.shape
    order_S = chosen_TK.flatten().argsort(stable=True)
    pairs_E = chosen_TK.flatten().bincount(minlength=len(down_EDI)).tolist()
    inputs = torch.split(x_TD[order_S // per_row], pairs_E)
    outputs = []
    for x_RD, gate_up_JD, down_DI in zip(inputs, gate_up_EJD.unbind(), down_EDI.unbind(), strict=True):
        gate_RI, up_RI = linear(x_RD, gate_up_JD).chunk(2, -1)
        outputs.append(linear(silu(gate_RI) * up_RI, down_DI))
    y_TKD = torch.cat(outputs)[order_S.argsort()].view(rows, per_row, x_TD.shape[1])
    out_TD: Tensor = (weight_TK.unsqueeze(-1) * y_TKD).sum(1)
    if shared_TD is None or shared_gate_D is None:
        return out_TD
    return out_TD + linear(x_TD, shared_gate_D.unsqueeze(0)).sigmoid() * shared_TD
