"""Softmax attention: a row sees its path, or the last rows of it. A piece reads keys and values of the path above it.

Shape suffixes: T rows, H query heads, G key heads, D and V head sizes.
"""

import math
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
from harts.ops.attention.context import window_context, window_reads
from harts.ops.kernels import Kernels

__all__ = ["Attention", "SlidingAttention"]


@dataclass(frozen=True)
class Attention:
    """Inputs: q_THD, k_TGD, v_TGV, positions already applied, and sinks_H where the model has them. Output: [T, H, V].

    Attributes:
        scale: factor on q k^T.
        window: rows of its path that a row sees at most, itself included; None: all.
        softcap: scores become softcap * tanh(scores / softcap); None: they do not.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None

    @classmethod
    def from_config(cls, config: Any) -> Self:
        """See `Mixer`."""
        return cls(scale=_scale(config))

    @classmethod
    def small(cls) -> Self:
        """See `Mixer`."""
        return cls(scale=0.3)

    def outside(self, packed: PackedTree) -> Mapping[str, Ints]:
        """See `Mixer`."""
        rows = packed.outside_D if self.window is None else packed.outside_D[window_reads(packed, self.window)]
        return {"keys": rows, "values": rows}

    def forward(self, packed: PackedTree, kernels: Kernels, context: Context | None, *inputs: Any) -> Tensor:
        """See `Mixer`."""
        q_THD, k_TGD, v_TGV, *sinks = inputs
        outside = None
        if context is not None:
            keys, values = (context.take(name, x, *x.shape[1:]) for name, x in (("keys", k_TGD), ("values", v_TGV)))
            if self.window is not None:
                places = packed.layout(window_context, self.window)
                keys, values = places.spread(keys), places.spread(values)
            outside = (keys, values)
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
            window=self.window,
            softcap=self.softcap,
            sinks_H=sinks[0] if sinks else None,
        )

    def linear(self, *inputs: Tensor) -> Tensor:
        """See `Mixer`."""
        return linear_causal_attention(*inputs, scale=self.scale, window=self.window, softcap=self.softcap)

    def example(self, rows: int, generator: torch.Generator, dtype: torch.dtype) -> Example:
        """See `Mixer`."""
        return [draw(generator, dtype, rows, heads, 8) for heads in (4, 2, 2)], []


class SlidingAttention(Attention):
    """Attention to the last `window` rows of the path."""

    @classmethod
    def from_config(cls, config: Any) -> Self:
        """See `Mixer`."""
        return cls(scale=_scale(config), window=config.sliding_window)

    @classmethod
    def small(cls) -> Self:
        """See `Mixer`."""
        return cls(scale=0.3, window=20, softcap=0.9)

    def example(self, rows: int, generator: torch.Generator, dtype: torch.dtype) -> Example:
        """See `Mixer`."""
        over_rows, _ = super().example(rows, generator, dtype)
        return over_rows, [draw(generator, dtype, 4)]


def _scale(config: Any) -> float:
    size: int = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 1 / math.sqrt(size)
