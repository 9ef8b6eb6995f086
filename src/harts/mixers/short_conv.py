"""A short convolution by itself, between two gates: LFM2. A piece reads the rows in front of the convolution.

Shape suffixes: T rows, D channels, W taps.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from harts.layout import PackedTree
from harts.mixers.context import Context
from harts.mixers.linear import linear_causal_conv1d
from harts.mixers.protocol import Example, Ints, draw
from harts.ops import causal_conv1d
from harts.ops.causal_conv1d.layout import outside_rows
from harts.ops.kernels import Kernels

__all__ = ["ShortConv"]


@dataclass(frozen=True)
class ShortConv:
    """Inputs: x_TD; weight_DW and bias_D (or None). Output: [T, D].

    Attributes:
        taps: W.
    """

    taps: int

    @classmethod
    def from_config(cls, config: Any) -> Self:
        """See `Mixer`."""
        return cls(taps=config.conv_L_cache)

    @classmethod
    def small(cls) -> Self:
        """See `Mixer`."""
        return cls(taps=3)

    def outside(self, packed: PackedTree) -> Mapping[str, Ints]:
        """See `Mixer`."""
        return {"taps": outside_rows(packed, self.taps)}

    def forward(self, packed: PackedTree, kernels: Kernels, context: Context | None, *inputs: Any) -> Tensor:
        """See `Mixer`."""
        x_TD, weight_DW, bias_D = inputs
        outside = None
        if context is not None:
            outside = context.take("taps", x_TD, x_TD.shape[1])
            context.hand_on("taps", x_TD)
        return causal_conv1d(
            x_TD,
            weight_DW,
            bias_D,
            packed,
            activation=None,
            impl=kernels.causal_conv1d,
            context_AD=outside,
        )

    def linear(self, *inputs: Tensor) -> Tensor:
        """See `Mixer`."""
        return linear_causal_conv1d(*inputs, activation=None)

    def example(self, rows: int, generator: torch.Generator, dtype: torch.dtype) -> Example:
        """See `Mixer`."""
        return [draw(generator, dtype, rows, 5)], [draw(generator, dtype, 5, self.taps), draw(generator, dtype, 5)]
