"""Lightning attention: linear attention whose heads forget at fixed rates (MiniMax-01 and M1).

MiniMax-01, arXiv:2501.08313, section 2.2. A piece reads the states at block boundaries from which its rows go on, and
keys and values of the rows between, which are replayed.

Shape suffixes: T rows, L tokens of one trajectory, R replayed rows, H heads, D head size, W wanted states.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from harts.layout import PackedTree
from harts.mixers.context import Context
from harts.mixers.linear import linear_linear_attention
from harts.mixers.protocol import Example, Ints, draw
from harts.ops.kernels import Kernels
from harts.ops.linear_attention import LinearContext, linear_attention_and_states, linear_reads

__all__ = ["LightningAttention"]


@dataclass(frozen=True)
class LightningAttention:
    """Inputs: q_THD, k_THD, v_THD; g_H, the logarithm of the decay, not learnt. Output: [T, H, D].

    S_t = exp(g) S_parent + k v^T, o_t = S_t^T q.

    Attributes:
        num_heads, size: H, D.
    """

    num_heads: int
    size: int

    @classmethod
    def from_config(cls, config: Any) -> Self:
        """See `Mixer`."""
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return cls(num_heads=config.num_attention_heads, size=size)

    @classmethod
    def small(cls) -> Self:
        """See `Mixer`."""
        return cls(num_heads=3, size=5)

    def outside(self, packed: PackedTree) -> Mapping[str, Ints]:
        """See `Mixer`."""
        reads = linear_reads(packed)
        return {"keys": reads.replayed_R, "values": reads.replayed_R, "states": reads.state_O}

    def forward(self, packed: PackedTree, kernels: Kernels, context: Context | None, *inputs: Any) -> Tensor:
        """See `Mixer`."""
        q_THD, k_THD, v_THD, g_H = inputs
        outside: LinearContext | None = None
        wanted: tuple[int, ...] = ()
        if context is not None:
            context.hand_on("keys", k_THD)
            context.hand_on("values", v_THD)
            k_RHD, v_RHD = (context.take(name, x, *x.shape[1:]) for name, x in (("keys", k_THD), ("values", v_THD)))
            wide = torch.promote_types(k_THD.dtype, torch.float32)
            states = context.take("states", k_THD.new_empty(0, dtype=wide), self.num_heads, self.size, self.size)
            outside = LinearContext(k_RHD, v_RHD, None, None, states)
            wanted = context.wanted["states"].rows
        out_THD, states_WHDD = linear_attention_and_states(
            q_THD,
            k_THD,
            v_THD,
            g_H,
            None,
            packed,
            delta=False,
            impl=kernels.linear_attention,
            context=outside,
            wanted=wanted,
        )
        if context is not None:
            context.give("states", states_WHDD)
        return out_THD

    def linear(self, *inputs: Tensor) -> Tensor:
        """See `Mixer`."""
        q_LHD, k_LHD, v_LHD, g_H = inputs
        return linear_linear_attention(q_LHD, k_LHD, v_LHD, g_H, None, delta=False)

    def example(self, rows: int, generator: torch.Generator, dtype: torch.dtype) -> Example:
        """See `Mixer`; a token keeps 90-99.9 % of the state, or no test of state passing could fail."""
        qkv = [draw(generator, dtype, rows, self.num_heads, self.size) for _ in range(3)]
        return qkv, [-torch.logspace(-3, -1, self.num_heads, dtype=dtype)]
