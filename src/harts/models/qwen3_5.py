"""Qwen3.5's linear-attention mixer on a tree.

Shape suffixes: T rows, D channels, H key heads, K key size, G value heads, V value size.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import softplus
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet

from harts.layout import PackedTree
from harts.ops import causal_conv1d, gated_delta_rule
from harts.ops.kernels import Kernels

__all__ = ["TreeGatedDeltaNet"]


class TreeGatedDeltaNet(Qwen3_5GatedDeltaNet):  # type: ignore[misc]
    """Stands in for a `Qwen3_5GatedDeltaNet`, whose parameters and submodules it shares.

    With `packed=` it runs on the rows of a tree; without, it is the module that it stands for.
    """

    def forward(
        self, hidden_states: Tensor, *args: Any, packed: PackedTree | None = None, **kwargs: Any
    ) -> Tensor:  # [1, T, D] -> [1, T, D]
        """Runs on the rows of `packed`; without it, as the original does."""
        if packed is None:
            return super().forward(hidden_states, *args, **kwargs)  # type: ignore[no-any-return]
        kernels: Kernels = kwargs["kernels"]
        hidden_TD = hidden_states[0]
        rows = len(hidden_TD)
        qkv_TC = causal_conv1d(
            self.in_proj_qkv(hidden_TD),
            self.conv1d.weight.squeeze(1),
            self.conv1d.bias,
            packed,
            activation=self.activation,
            impl=kernels.causal_conv1d,
        )
        q_TC, k_TC, v_TC = torch.split(qkv_TC, [self.key_dim, self.key_dim, self.value_dim], dim=-1)
        dtype = torch.promote_types(hidden_TD.dtype, torch.float32)
        step_TG = softplus(self.in_proj_a(hidden_TD).to(dtype) + self.dt_bias)
        out_TGV = gated_delta_rule(
            q_TC.view(rows, -1, self.head_k_dim),
            k_TC.view(rows, -1, self.head_k_dim),
            v_TC.view(rows, -1, self.head_v_dim),
            -self.A_log.to(dtype).exp() * step_TG,
            self.in_proj_b(hidden_TD).sigmoid(),
            packed,
            impl=kernels.gated_delta_rule,
        )
        gate_XV = self.in_proj_z(hidden_TD).view(-1, self.head_v_dim)
        normed_XV = self.norm(out_TGV.reshape(-1, self.head_v_dim), gate_XV)
        return self.out_proj(normed_XV.view(1, rows, -1))  # type: ignore[no-any-return]
