"""LFM2's short convolution on a tree.

Shape suffixes: T rows of the tree, F rows with the dummy ones of `harts.models.row_floor`, D channels.
"""

from typing import Any

from torch import Tensor, nn
from transformers.models.lfm2.modeling_lfm2 import Lfm2ShortConv

from harts.layout import PackedTree
from harts.mixers import ShortConv
from harts.models.pieces import context_of
from harts.models.row_floor import cut_rows, fill_rows
from harts.models.sharded import Sealed, unseal

__all__ = ["ShortConvOnRows", "TreeShortConv"]


class ShortConvOnRows(nn.Module):
    """The forward of what stands in for a gated short convolution; the original comes next in the bases."""

    in_proj: Any
    out_proj: Any
    conv: Any

    def forward(
        self, hidden_states: Tensor, *args: Any, packed: PackedTree | Sealed[PackedTree] | None = None, **kwargs: Any
    ) -> Tensor:  # [1, F, D] -> [1, F, D]
        """Runs on the rows of `packed`; without it, as the original does."""
        packed = unseal(packed)
        if packed is None:
            return super().forward(hidden_states, *args, **kwargs)  # type: ignore[no-any-return, misc]
        before_FD, after_FD, x_FD = self.in_proj(hidden_states[0]).chunk(3, dim=-1)
        mixed_TD = ShortConv(taps=self.conv.weight.shape[-1]).forward(
            packed,
            kwargs["kernels"],
            context_of(self, kwargs.get("contexts")),
            cut_rows(before_FD * x_FD, packed.num_rows),
            self.conv.weight.squeeze(1),
            self.conv.bias,
        )
        return self.out_proj(after_FD * fill_rows(mixed_TD, len(x_FD))).unsqueeze(0)  # type: ignore[no-any-return]


class TreeShortConv(ShortConvOnRows, Lfm2ShortConv):  # type: ignore[misc]
    """Stands in for a `Lfm2ShortConv`."""
