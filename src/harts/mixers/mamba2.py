"""Short convolution, then state-space duality: the mixer of Mamba2 and of the hybrids built with it.

A piece reads rows in front of the convolution, the states at block boundaries from which its rows go on, and the
convolution's outputs and the step sizes of the rows between, which are replayed.

Shape suffixes: T rows, L tokens of one trajectory, C channels of x, B and C side by side, G heads, H groups, K state
size, V head size, W taps.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from harts.cost import mamba2_sizes
from harts.layout import PackedTree
from harts.mixers.context import Context
from harts.mixers.linear import linear_causal_conv1d, linear_linear_attention
from harts.mixers.protocol import Example, Ints, draw
from harts.ops import causal_conv1d
from harts.ops.causal_conv1d.layout import outside_rows
from harts.ops.kernels import Kernels
from harts.ops.linear_attention import LinearContext, linear_attention_and_states, linear_reads

__all__ = ["Mamba2"]


@dataclass(frozen=True)
class Mamba2:
    """Inputs: xbc_TC, dt_TG (step sizes, > 0); weight_CW, bias_C (or None), a_G (< 0), d_G. Output: [T, G, V].

    With x, B, C behind the convolution: S_t = exp(dt a) S_parent + dt B x^T, y_t = S_t^T C + d x; computed, and given,
    in fp32 at least.

    Attributes:
        groups, heads, state_size, head_size: H, G, K, V.
        taps: W.
        activation: of the convolution: "silu" or None.
    """

    groups: int
    heads: int
    state_size: int
    head_size: int
    taps: int
    activation: str | None = "silu"

    @classmethod
    def from_config(cls, config: Any) -> Self:
        """See `Mixer`."""
        sizes = mamba2_sizes(config)
        if sizes is None:
            raise ValueError(f"model: expected the sizes of Mamba2 in the config of {config.model_type}, found none")
        return cls(
            groups=sizes.groups,
            heads=sizes.heads,
            state_size=sizes.state_size,
            head_size=sizes.head_size,
            taps=sizes.taps,
            activation=getattr(config, "mamba_hidden_act", None) or config.hidden_act,
        )

    @classmethod
    def small(cls) -> Self:
        """See `Mixer`."""
        return cls(groups=2, heads=4, state_size=6, head_size=5, taps=4)

    def outside(self, packed: PackedTree) -> Mapping[str, Ints]:
        """See `Mixer`."""
        reads = linear_reads(packed)
        replayed = dict.fromkeys(("xb", "steps"), reads.replayed_R)
        return {"taps": outside_rows(packed, self.taps), **replayed, "states": reads.state_O}

    def forward(self, packed: PackedTree, kernels: Kernels, context: Context | None, *inputs: Any) -> Tensor:
        """See `Mixer`."""
        in_TC, dt_TG, weight_CW, bias_C, a_G, d_G = inputs
        taps_AC = None if context is None else context.take("taps", in_TC, in_TC.shape[1])
        xbc_TC = causal_conv1d(
            in_TC,
            weight_CW,
            bias_C,
            packed,
            activation=self.activation,
            impl=kernels.causal_conv1d,
            context_AD=taps_AC,
        )
        dtype = torch.promote_types(in_TC.dtype, torch.float32)
        dt_TG = dt_TG.to(dtype)
        outside: LinearContext | None = None
        wanted: tuple[int, ...] = ()
        if context is not None:
            context.hand_on("taps", in_TC)
            outside = self._exchange(context, xbc_TC, dt_TG, a_G)
            wanted = context.wanted["states"].rows
        x_TGV, b_THK = (part.to(dtype) for part in self._written(xbc_TC))
        c_THK = self._read(xbc_TC).to(dtype)
        out_TGV, states_WGVK = linear_attention_and_states(
            c_THK,
            b_THK,
            x_TGV,
            dt_TG * a_G,
            dt_TG,
            packed,
            delta=False,
            impl=kernels.linear_attention,
            context=outside,
            wanted=wanted,
        )
        if context is not None:
            context.give("states", states_WGVK)
        skip_TGV: Tensor = d_G[:, None] * x_TGV
        return out_TGV + skip_TGV

    def _exchange(self, context: Context, xbc_TC: Tensor, dt_TG: Tensor, a_G: Tensor) -> LinearContext:
        """Hands on what others replay, and takes what this piece reads."""
        xb_TC = xbc_TC[:, : -self.groups * self.state_size]
        context.hand_on("xb", xb_TC)
        context.hand_on("steps", dt_TG)
        x_RGV, b_RHK = self._written(context.take("xb", xb_TC, xb_TC.shape[1]))
        dt_RG = context.take("steps", dt_TG, self.heads)
        states = context.take("states", dt_TG, self.heads, self.head_size, self.state_size)
        return LinearContext(b_RHK.to(dt_RG.dtype), x_RGV.to(dt_RG.dtype), dt_RG * a_G, dt_RG, states)

    def linear(self, *inputs: Tensor) -> Tensor:
        """See `Mixer`."""
        in_LC, dt_LG, weight_CW, bias_C, a_G, d_G = inputs
        xbc_LC = linear_causal_conv1d(in_LC, weight_CW, bias_C, activation=self.activation)
        x_LGV, b_LHK = self._written(xbc_LC)
        y_LGV = linear_linear_attention(self._read(xbc_LC), b_LHK, x_LGV, dt_LG * a_G, dt_LG, delta=False)
        return y_LGV + d_G[:, None] * x_LGV

    def example(self, rows: int, generator: torch.Generator, dtype: torch.dtype) -> Example:
        """See `Mixer`; a token keeps 90-99.9 % of the state, or no test of state passing could fail."""
        channels = self.heads * self.head_size + 2 * self.groups * self.state_size
        a_G = -torch.logspace(-3, -1, self.heads, dtype=dtype)
        steps = 0.5 + torch.rand(rows, self.heads, generator=generator, dtype=dtype) / 2
        return [draw(generator, dtype, rows, channels), steps], [
            draw(generator, dtype, channels, self.taps),
            draw(generator, dtype, channels),
            a_G,
            draw(generator, dtype, self.heads),
        ]

    def _written(self, xbc_TC: Tensor) -> tuple[Tensor, Tensor]:
        """x_TGV and b_THK, what the rows write: views."""
        inner, keys = self.heads * self.head_size, self.groups * self.state_size
        x_TC, b_TC = xbc_TC[:, :inner], xbc_TC[:, inner : inner + keys]
        return x_TC.view(-1, self.heads, self.head_size), b_TC.view(-1, self.groups, self.state_size)

    def _read(self, xbc_TC: Tensor) -> Tensor:
        """c_THK, with what the rows read: a view."""
        return xbc_TC[:, -self.groups * self.state_size :].view(-1, self.groups, self.state_size)
