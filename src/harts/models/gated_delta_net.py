"""The part that all gated delta rule mixers of transformers share, on a tree.

Shape suffixes: T rows of the tree (in `project`, all it is given), F rows with the dummy ones of
`harts.models.row_floor`, D channels, C channels of q, k and v together, G value heads, V value size, X = rows * G.
"""

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from harts.layout import PackedTree
from harts.mixers import GatedDeltaRule
from harts.models.pieces import context_of
from harts.models.row_floor import cut_rows, fill_rows
from harts.models.sharded import Sealed, unseal

__all__ = ["TreeMixer"]


class TreeMixer(nn.Module):
    """Goes before a transformers mixer in a class's bases: `packed=` runs on the rows of a tree, all else is the mixer.

    The object shares parameters and submodules of the mixer that it stands for; families differ in how one input
    projection or several give q, k, v, gate, writing strength and step size.
    """

    @abstractmethod
    def project(self, hidden_TD: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Input projections: q, k and v side by side [T, C], gate [X, V], writing strength and step size [T, G]."""

    def strength(self, b_TG: Tensor) -> Tensor:
        """The writing strength, from its projection."""
        return b_TG.sigmoid()

    def finish(self, out_XV: Tensor, gate_XV: Tensor, *shape: int) -> Tensor:
        """Gated norm and output projection; the first dimensions of the result are `shape`."""
        mixer: Any = self
        return mixer.out_proj(mixer.norm(out_XV, gate_XV).view(*shape, -1))  # type: ignore[no-any-return]

    def forward(
        self, hidden_states: Tensor, *args: Any, packed: PackedTree | Sealed[PackedTree] | None = None, **kwargs: Any
    ) -> Tensor:  # [1, F, D] -> [1, F, D]
        """Runs on the rows of `packed`; without it, as the original does."""
        packed = unseal(packed)
        if packed is None:
            return super().forward(hidden_states, *args, **kwargs)  # type: ignore[misc, no-any-return]
        mixer: Any = self
        rows = packed.num_rows
        qkv_FC, gate_XV, b_FG, a_FG = self.project(hidden_states[0])
        b_TG, a_TG = cut_rows(b_FG, rows), cut_rows(a_FG, rows)
        dtype = torch.promote_types(a_TG.dtype, torch.float32)
        out_TGV = GatedDeltaRule(
            key_heads=mixer.num_k_heads,
            value_heads=mixer.num_v_heads,
            key_size=mixer.head_k_dim,
            value_size=mixer.head_v_dim,
            taps=mixer.conv_kernel_size,
            activation=mixer.activation,
        ).forward(
            packed,
            kwargs["kernels"],
            context_of(self, kwargs.get("contexts")),
            cut_rows(qkv_FC, rows),
            -mixer.A_log.to(dtype).exp() * softplus(a_TG.to(dtype) + mixer.dt_bias),
            self.strength(b_TG),
            mixer.conv1d.weight.squeeze(1),
            mixer.conv1d.bias,
        )
        out_FGV = fill_rows(out_TGV, hidden_states.shape[1])
        return self.finish(out_FGV.reshape(-1, mixer.head_v_dim), gate_XV, *hidden_states.shape[:2])
