"""Kimi Linear's mixer on a tree.

Shape suffixes: F rows, D channels.
"""

from typing import Any

from torch import Tensor
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearDeltaAttention

from harts.models.kimi_delta_attention import TreeKimiDeltaAttention

__all__ = ["TreeDeltaAttention"]


class TreeDeltaAttention(TreeKimiDeltaAttention, KimiLinearDeltaAttention):  # type: ignore[misc]
    """Stands in for a `KimiLinearDeltaAttention`."""

    def output_gate(self, hidden_1FD: Tensor) -> Tensor:
        """See `TreeKimiDeltaAttention.output_gate`."""
        mixer: Any = self
        return mixer.g_b_proj(mixer.g_a_proj(hidden_1FD))  # type: ignore[no-any-return]
