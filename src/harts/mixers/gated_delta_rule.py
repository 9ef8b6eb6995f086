"""Short convolution, then the gated delta rule: linear attention of Qwen3-Next and Qwen3.5.

A piece reads rows in front of the convolution, the states at block boundaries from which its rows go on, and the
convolution's outputs, decay and writing strength of the rows between, which are replayed.

Shape suffixes: T rows, L tokens of one trajectory, C channels of q, k and v side by side, H key heads, G value heads,
K, V head sizes, W taps.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from harts.layout import PackedTree
from harts.mixers.context import Context
from harts.mixers.linear import linear_causal_conv1d, linear_gated_delta_rule
from harts.mixers.protocol import Example, Ints, draw
from harts.ops import causal_conv1d
from harts.ops.causal_conv1d.layout import outside_rows
from harts.ops.gated_delta_rule import gated_delta_rule_and_states
from harts.ops.kernels import Kernels
from harts.ops.linear_attention import LinearContext, linear_reads

__all__ = ["GatedDeltaRule"]


@dataclass(frozen=True)
class GatedDeltaRule:
    """Inputs: qkv_TC, g_TG (logarithm of the decay), beta_TG; weight_CW and bias_C (or None). Output: [T, G, V].

    Attributes:
        key_heads, value_heads, key_size, value_size: H, G, K, V.
        taps: W.
        activation: of the convolution: "silu" or None.
    """

    key_heads: int
    value_heads: int
    key_size: int
    value_size: int
    taps: int
    activation: str | None = "silu"

    @classmethod
    def from_config(cls, config: Any) -> Self:
        """See `Mixer`."""
        return cls(
            key_heads=config.linear_num_key_heads,
            value_heads=config.linear_num_value_heads,
            key_size=config.linear_key_head_dim,
            value_size=config.linear_value_head_dim,
            taps=config.linear_conv_kernel_dim,
            activation=config.hidden_act,
        )

    @classmethod
    def small(cls) -> Self:
        """See `Mixer`."""
        return cls(key_heads=2, value_heads=4, key_size=6, value_size=5, taps=4)

    def outside(self, packed: PackedTree) -> Mapping[str, Ints]:
        """See `Mixer`."""
        reads = linear_reads(packed)
        replayed = dict.fromkeys(("qkv", "decay", "strength"), reads.replayed_R)
        return {"taps": outside_rows(packed, self.taps), **replayed, "states": reads.state_O}

    def forward(self, packed: PackedTree, kernels: Kernels, context: Context | None, *inputs: Any) -> Tensor:
        """See `Mixer`."""
        x_TC, g_TG, beta_TG, weight_CW, bias_C = inputs
        taps_AC = None if context is None else context.take("taps", x_TC, x_TC.shape[1])
        qkv_TC = causal_conv1d(
            x_TC,
            weight_CW,
            bias_C,
            packed,
            activation=self.activation,
            impl=kernels.causal_conv1d,
            context_AD=taps_AC,
        )
        outside: LinearContext | None = None
        wanted: tuple[int, ...] = ()
        if context is not None:
            context.hand_on("taps", x_TC)
            outside = self._exchange(context, qkv_TC, g_TG, beta_TG)
            wanted = context.wanted["states"].rows
        out_TGV, states_WGVK = self.recur(packed, kernels, qkv_TC, g_TG, beta_TG, outside, wanted)
        if context is not None:
            context.give("states", states_WGVK)
        return out_TGV

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
        """What is behind the convolution: outputs [T, G, V], and states behind the wanted rows."""
        return gated_delta_rule_and_states(
            *self.heads(qkv_TC), g_TG, beta_TG, packed, impl=kernels.gated_delta_rule, context=context, wanted=wanted
        )

    def _exchange(self, context: Context, qkv_TC: Tensor, g_TG: Tensor, beta_TG: Tensor) -> LinearContext:
        """Hands on what others replay, and takes what this piece reads."""
        replayed = {"qkv": qkv_TC, "decay": g_TG, "strength": beta_TG}
        for name, values in replayed.items():
            context.hand_on(name, values)
        qkv_RC, g_RG, beta_RG = (context.take(name, values, *values.shape[1:]) for name, values in replayed.items())
        _, k_RHK, v_RGV = self.heads(qkv_RC)
        states = context.take("states", g_TG, self.value_heads, self.value_size, self.key_size)
        return LinearContext(k_RHK, v_RGV, g_RG, beta_RG, states)

    def linear(self, *inputs: Tensor) -> Tensor:
        """See `Mixer`."""
        x_LC, g_LG, beta_LG, weight_CW, bias_C = inputs
        qkv_LC = linear_causal_conv1d(x_LC, weight_CW, bias_C, activation=self.activation)
        return linear_gated_delta_rule(*self.heads(qkv_LC), g_LG, beta_LG)

    def example(self, rows: int, generator: torch.Generator, dtype: torch.dtype) -> Example:
        """See `Mixer`; a token keeps 90-99.9 % of the state, or no test of state passing could fail."""
        channels = 2 * self.key_heads * self.key_size + self.value_heads * self.value_size
        keep = 1 - torch.rand(rows, self.value_heads, generator=generator, dtype=dtype) * 0.099 - 1e-3
        strength = draw(generator, dtype, rows, self.value_heads).sigmoid()
        return [draw(generator, dtype, rows, channels), keep.log(), strength], [
            draw(generator, dtype, channels, self.taps),
            draw(generator, dtype, channels),
        ]

    def heads(self, qkv_TC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q_THK, k_THK and v_TGV: views."""
        keys, values = self.key_heads * self.key_size, self.value_heads * self.value_size
        q_TC, k_TC, v_TC = torch.split(qkv_TC, [keys, keys, values], dim=-1)
        return (
            q_TC.view(-1, self.key_heads, self.key_size),
            k_TC.view(-1, self.key_heads, self.key_size),
            v_TC.view(-1, self.value_heads, self.value_size),
        )
