"""The short convolution of LFM2's mixtures of experts on a tree."""

from transformers.models.lfm2_moe.modeling_lfm2_moe import Lfm2MoeShortConv

from harts.models.lfm2 import ShortConvOnRows

__all__ = ["TreeShortConv"]


class TreeShortConv(ShortConvOnRows, Lfm2MoeShortConv):  # type: ignore[misc]
    """Stands in for a `Lfm2MoeShortConv`."""
