"""The mixer of Ling's and Ring's hybrids on a tree.

Shape suffixes: F rows, D channels.
"""

from typing import Any

from torch import Tensor
from transformers.models.bailing_hybrid.modeling_bailing_hybrid import BailingHybridDeltaAttention

from harts.models.kimi_delta_attention import TreeKimiDeltaAttention

__all__ = ["TreeDeltaAttention"]


class TreeDeltaAttention(TreeKimiDeltaAttention, BailingHybridDeltaAttention):  # type: ignore[misc]
    """Stands in for a `BailingHybridDeltaAttention`."""

    def output_gate(self, hidden_1FD: Tensor) -> Tensor:
        """See `TreeKimiDeltaAttention.output_gate`."""
        mixer: Any = self
        return mixer.g_proj(hidden_1FD)  # type: ignore[no-any-return]
