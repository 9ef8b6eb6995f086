"""The part that all Mamba2 mixers of transformers share, on a tree.

Shape suffixes: T rows of the tree, F rows with the dummy ones of `harts.models.row_floor`, D channels, P channels of
the input projection, G heads, V head size.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from harts.layout import PackedTree
from harts.mixers import Mamba2
from harts.models.pieces import context_of
from harts.models.row_floor import cut_rows, fill_rows
from harts.models.sharded import Sealed, unseal

__all__ = ["TreeMamba2"]


class TreeMamba2(nn.Module):
    """Goes before a transformers mixer in a class's bases: `packed=` runs on the rows of a tree, all else is the mixer.

    The object shares parameters and submodules of the mixer that it stands for. Behind the convolution it computes in
    fp32 at least, as transformers' own PyTorch code does.
    """

    def project(self, hidden_FD: Tensor) -> Tensor:
        """Gate, x, B, C and step size side by side, [F, P]."""
        mixer: Any = self
        return mixer.in_proj(hidden_FD)  # type: ignore[no-any-return]

    def gated_norm(self, out_1FD: Tensor, gate_1FD: Tensor) -> Tensor:
        """What lies between the recurrence and the output projection."""
        mixer: Any = self
        return mixer.norm(out_1FD, gate_1FD)  # type: ignore[no-any-return]

    def forward(
        self, hidden_states: Tensor, *args: Any, packed: PackedTree | Sealed[PackedTree] | None = None, **kwargs: Any
    ) -> Tensor:  # [1, F, D] -> [1, F, D]
        """Runs on the rows of `packed`; without it, as the original does."""
        packed = unseal(packed)
        if packed is None:
            return super().forward(hidden_states, *args, **kwargs)  # type: ignore[misc, no-any-return]
        mixer: Any = self
        rows, inner = packed.num_rows, mixer.intermediate_size
        sizes = [inner, mixer.conv_dim, mixer.num_heads]
        gate_FD, xbc_FC, step_FG = torch.split(self.project(hidden_states[0]), sizes, dim=-1)
        dtype = torch.promote_types(step_FG.dtype, torch.float32)
        least, most = mixer.time_step_limit
        out_TGV = Mamba2(
            groups=mixer.n_groups,
            heads=mixer.num_heads,
            state_size=mixer.ssm_state_size,
            head_size=mixer.head_dim,
            taps=mixer.conv_kernel_size,
            activation=mixer.activation,
        ).forward(
            packed,
            kwargs["kernels"],
            context_of(self, kwargs.get("contexts")),
            cut_rows(xbc_FC, rows),
            softplus(cut_rows(step_FG, rows).to(dtype) + mixer.dt_bias.to(dtype)).clamp(least, most),
            mixer.conv1d.weight.squeeze(1),
            mixer.conv1d.bias,
            -mixer.A_log.to(dtype).exp(),
            mixer.D.to(dtype),
        )
        out_1FD = fill_rows(out_TGV, hidden_states.shape[1]).reshape(1, -1, inner)
        normed_1FD = self.gated_norm(out_1FD, gate_FD.unsqueeze(0))
        return mixer.out_proj(normed_1FD.to(hidden_states.dtype))  # type: ignore[no-any-return]
