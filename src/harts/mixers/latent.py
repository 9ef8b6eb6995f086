"""Attention whose keys and values are expanded from one latent a row (multi-head latent attention, MLA).

DeepSeek-V2, arXiv:2405.04434, section 2.1. A row's latent is the row's alone, so that everything up to keys and values
runs once a row, whatever shares it; then it is softmax attention, with values of another size than keys.

Shape suffixes: T rows, H heads, D and V head sizes.
"""

import math
from typing import Any, Self

import torch

from harts.mixers.attention import Attention
from harts.mixers.protocol import Example, draw

__all__ = ["LatentAttention"]


class LatentAttention(Attention):
    """Inputs: q_THD, k_THD, v_THV, expanded. Output: [T, H, V]. Pieces hand on keys and values, not latents."""

    @classmethod
    def from_config(cls, config: Any) -> Self:
        """See `Mixer`."""
        return cls(scale=1 / math.sqrt(config.qk_nope_head_dim + config.qk_rope_head_dim))

    def example(self, rows: int, generator: torch.Generator, dtype: torch.dtype) -> Example:
        """See `Mixer`."""
        return [draw(generator, dtype, rows, 4, size) for size in (12, 12, 8)], []
