"""What a token mixer is.

Everything in a decoder layer but its mixer works row by row, on a tree as on a batch. A mixer reads other rows of the
path. It is one file here, beside an op of `harts.ops`; families of models (`harts.models.families`) say which one each
layer has.

Shape suffixes: T rows, L tokens of one trajectory.
"""

from collections.abc import Mapping
from typing import Any, Protocol, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from harts.layout import PackedTree
from harts.mixers.context import Context
from harts.ops.kernels import Kernels

__all__ = ["Example", "Mixer", "draw"]

Ints = NDArray[np.int64]
Example = tuple[list[Tensor], list[Tensor]]
"""Inputs over rows, [T, ...] each, and inputs that all rows share, weights; both in the order of `forward`."""


class Mixer(Protocol):
    """A token mixer with its sizes and options; frozen.

    `tests/mixers` holds every registered mixer to its laws: on random trees, whole and in random pieces, `forward`
    equals `linear` on each trajectory, outputs and all gradients.
    """

    @classmethod
    def from_config(cls, config: Any) -> Self:
        """The mixer of a model's layers, from its transformers config."""
        ...

    @classmethod
    def small(cls) -> Self:
        """One with small sizes, for the laws."""
        ...

    def outside(self, packed: PackedTree) -> Mapping[str, Ints]:
        """What a piece reads from outside: by name, the rows of the tree, ascending; host side."""
        ...

    def forward(self, packed: PackedTree, kernels: Kernels, context: Context | None, *inputs: Any) -> Tensor:
        """Mixes the rows of a tree or piece.

        Args:
            packed: the rows.
            kernels: which implementation each op uses.
            context: of a piece; None for a whole tree.
            inputs: those over rows first, [T, ...], then what all rows share.

        Returns:
            [T, ...].
        """
        ...

    def linear(self, *inputs: Tensor) -> Tensor:
        """The same for one trajectory, from the definition: plain, slow, any dtype. Inputs over tokens are [L, ...]."""
        ...

    def example(self, rows: int, generator: torch.Generator, dtype: torch.dtype) -> Example:
        """Random inputs on which a wrong parent, state or position shows."""
        ...


def draw(generator: torch.Generator, dtype: torch.dtype, *shape: int) -> Tensor:
    """Standard normal."""
    return torch.randn(*shape, generator=generator, dtype=dtype)
