"""Short convolution, then the delta rule with a decay of each key channel (KDA): Kimi Linear and its like.

Kimi Linear, arXiv:2510.26692, section 3. A piece reads and hands on what the gated delta rule does.

Shape suffixes: T rows, L tokens of one trajectory, R replayed rows, C channels of q, k and v side by side, H key heads,
G value heads, K, V head sizes, W wanted states.
"""

import dataclasses
from typing import Any, Self

import torch
from torch import Tensor

from harts.layout import PackedTree
from harts.mixers.gated_delta_rule import GatedDeltaRule
from harts.mixers.linear import linear_causal_conv1d, linear_kimi_delta_attention
from harts.mixers.protocol import Example
from harts.ops.kernels import Kernels
from harts.ops.linear_attention import LinearContext, linear_attention_and_states, unit

__all__ = ["KimiDeltaAttention"]


class KimiDeltaAttention(GatedDeltaRule):
    """Inputs: qkv_TC, g_TGK (logarithm of the decay), beta_TG; weight_CW and bias_C (or None). Output: [T, G, V]."""

    @classmethod
    def from_config(cls, config: Any) -> Self:
        """See `Mixer`."""
        return cls(
            key_heads=config.linear_num_heads,
            value_heads=config.linear_num_heads,
            key_size=config.linear_head_dim,
            value_size=config.linear_head_dim,
            taps=config.linear_conv_kernel_dim,
            activation=config.hidden_act,
        )

    def recur(
        self,
        packed: PackedTree,
        kernels: Kernels,
        qkv_TC: Tensor,
        g_TG: Tensor,
        beta_TG: Tensor,
        context: LinearContext | None,
        wanted: tuple[int, ...],
    ) -> tuple[Tensor, Tensor]:
        """See `GatedDeltaRule.recur`; g is [T, G, K]."""
        dtype = torch.promote_types(qkv_TC.dtype, torch.float32)
        q_THK, k_THK, v_TGV = self.heads(qkv_TC.to(dtype))
        if context is not None:
            context = dataclasses.replace(context, k_RHK=unit(context.k_RHK.to(dtype)), v_RGV=context.v_RGV.to(dtype))
        out_TGV, states_WGVK = linear_attention_and_states(
            unit(q_THK) * self.key_size**-0.5,
            unit(k_THK),
            v_TGV,
            g_TG,
            beta_TG,
            packed,
            delta=True,
            impl=kernels.linear_attention,
            context=context,
            wanted=wanted,
        )
        return out_TGV.to(qkv_TC.dtype), states_WGVK

    def linear(self, *inputs: Tensor) -> Tensor:
        """See `Mixer`."""
        x_LC, g_LGK, beta_LG, weight_CW, bias_C = inputs
        qkv_LC = linear_causal_conv1d(x_LC, weight_CW, bias_C, activation=self.activation)
        return linear_kimi_delta_attention(*self.heads(qkv_LC), g_LGK, beta_LG)

    def example(self, rows: int, generator: torch.Generator, dtype: torch.dtype) -> Example:
        """See `Mixer`; a token keeps 90-99.9 % of each channel of the state."""
        (x_TC, _, beta_TG), shared = super().example(rows, generator, dtype)
        keep = 1 - torch.rand(rows, self.value_heads, self.key_size, generator=generator, dtype=dtype) * 0.099 - 1e-3
        return [x_TC, keep.log(), beta_TG], shared
