"""Full softmax attention: a row sees its path. A piece reads keys and values of the path above it.

Shape suffixes: T rows, H query heads, G key heads, D and V head sizes.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from harts.layout import PackedTree
from harts.mixers.context import Context
from harts.mixers.linear import linear_causal_attention
from harts.mixers.protocol import Example, Ints, draw
from harts.ops import attention
from harts.ops.kernels import Kernels

__all__ = ["Attention"]


@dataclass(frozen=True)
class Attention:
    """Inputs: q_THD, k_TGD, v_TGV, positions already applied. Output: [T, H, V].

    Attributes:
        scale: factor on q k^T.
    """

    scale: float

    @classmethod
    def from_config(cls, config: Any) -> Self:
        """See `Mixer`."""
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return cls(scale=float(size) ** -0.5)

    @classmethod
    def small(cls) -> Self:
        """See `Mixer`."""
        return cls(scale=0.3)

    def outside(self, packed: PackedTree) -> Mapping[str, Ints]:
        """See `Mixer`."""
        return {"keys": packed.outside_D, "values": packed.outside_D}

    def forward(self, packed: PackedTree, kernels: Kernels, context: Context | None, *inputs: Any) -> Tensor:
        """See `Mixer`."""
        q_THD, k_TGD, v_TGV = inputs
        outside = None
        if context is not None:
            outside = (context.take("keys", k_TGD, *k_TGD.shape[1:]), context.take("values", v_TGV, *v_TGV.shape[1:]))
            context.hand_on("keys", k_TGD)
            context.hand_on("values", v_TGV)
        return attention(
            q_THD,
            k_TGD,
            v_TGV,
            packed,
            scale=self.scale,
            impl=kernels.attention,
            deterministic=kernels.deterministic,
            context=outside,
        )

    def linear(self, *inputs: Tensor) -> Tensor:
        """See `Mixer`."""
        return linear_causal_attention(*inputs, scale=self.scale)

    def example(self, rows: int, generator: torch.Generator, dtype: torch.dtype) -> Example:
        """See `Mixer`."""
        return [draw(generator, dtype, rows, heads, 8) for heads in (4, 2, 2)], []
