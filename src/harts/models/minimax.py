"""Lightning attention of MiniMax-01 and M1 on a tree.

transformers keeps powers of the decays that it made in fp32, also in a model that is made fp64 later; here they come
from the decays. So the two differ by 1e-7 of the state in fp64, unless those powers are made again (see `tiny_model`).

Shape suffixes: F rows of the tree and the dummy ones of `harts.models.row_floor`, D channels, H heads, X head size.
"""

from typing import Any

import torch
from torch import Tensor
from transformers.models.minimax.modeling_minimax import MiniMaxLightningAttention

from harts.layout import PackedTree
from harts.mixers import LightningAttention
from harts.models.pieces import context_of
from harts.models.row_floor import cut_rows, fill_rows
from harts.models.sharded import Sealed, unseal

__all__ = ["TreeLightningAttention"]


class TreeLightningAttention(MiniMaxLightningAttention):  # type: ignore[misc]
    """Stands in for a `MiniMaxLightningAttention`."""

    def forward(
        self, hidden_states: Tensor, *args: Any, packed: PackedTree | Sealed[PackedTree] | None = None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:  # [1, F, D] -> [1, F, D]
        """Runs on the rows of `packed`; without it, as the original does."""
        packed = unseal(packed)
        if packed is None:
            return super().forward(hidden_states, *args, **kwargs)  # type: ignore[no-any-return]
        rows, heads, size = packed.num_rows, self.num_attention_heads, self.head_dim
        qkv_FHX = self.act_fn(self.qkv_proj(hidden_states[0])).view(-1, heads, 3 * size)
        q_THX, k_THX, v_THX = (cut_rows(part, rows) for part in torch.split(qkv_FHX, size, dim=-1))
        out_THX = LightningAttention(num_heads=heads, size=size).forward(
            packed,
            kwargs["kernels"],
            context_of(self, kwargs.get("contexts")),
            q_THX,
            k_THX,
            v_THX,
            -self.slope_rate.flatten(),
        )
        out_1FD = fill_rows(out_THX, hidden_states.shape[1]).reshape(1, -1, heads * size)
        return self.out_proj(self.output_gate(hidden_states).sigmoid() * self.norm(out_1FD)), None
