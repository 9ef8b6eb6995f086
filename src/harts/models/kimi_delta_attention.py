"""The part that all Kimi delta attention mixers of transformers share, on a tree.

Shape suffixes: F rows of the tree and the dummy ones of `harts.models.row_floor`, D channels, G heads, K head size.
"""

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor, nn

from harts.layout import PackedTree
from harts.mixers import KimiDeltaAttention
from harts.models.pieces import context_of
from harts.models.row_floor import cut_rows, fill_rows
from harts.models.sharded import Sealed, unseal

__all__ = ["TreeKimiDeltaAttention"]


class TreeKimiDeltaAttention(nn.Module):
    """Goes before a transformers mixer in a class's bases: `packed=` runs on the rows of a tree, all else is the mixer.

    The object shares parameters and submodules of the mixer that it stands for.
    """

    @abstractmethod
    def output_gate(self, hidden_1FD: Tensor) -> Tensor:
        """What the output's norm takes beside it, [1, F, G * K]."""

    def forward(
        self, hidden_states: Tensor, *args: Any, packed: PackedTree | Sealed[PackedTree] | None = None, **kwargs: Any
    ) -> Tensor:  # [1, F, D] -> [1, F, D]
        """Runs on the rows of `packed`; without it, as the original does."""
        packed = unseal(packed)
        if packed is None:
            return super().forward(hidden_states, *args, **kwargs)  # type: ignore[misc, no-any-return]
        mixer: Any = self
        rows, weight = packed.num_rows, mixer.conv1d.weight.squeeze(1)
        qkv_1FC = torch.cat([project(hidden_states) for project in (mixer.q_proj, mixer.k_proj, mixer.v_proj)], dim=-1)
        out_TGV = KimiDeltaAttention(
            key_heads=mixer.num_heads,
            value_heads=mixer.num_heads,
            key_size=mixer.head_dim,
            value_size=mixer.head_dim,
            taps=mixer.conv_kernel_size,
            activation=mixer.activation,
        ).forward(
            packed,
            kwargs["kernels"],
            context_of(self, kwargs.get("contexts")),
            cut_rows(qkv_1FC[0], rows).to(weight.dtype),  # some models keep the convolution in fp32
            cut_rows(mixer.forget_gate(hidden_states)[0], rows),
            cut_rows(mixer.b_proj(hidden_states)[0], rows).sigmoid(),
            weight,
            mixer.conv1d.bias,
        )
        out_1FGV = fill_rows(out_TGV.to(hidden_states.dtype), hidden_states.shape[1]).unsqueeze(0)
        normed_1FGV = mixer.o_norm(out_1FGV, self.output_gate(hidden_states).view_as(out_1FGV))
        return mixer.o_proj(normed_1FGV.flatten(2))  # type: ignore[no-any-return]
