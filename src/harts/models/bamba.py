"""Bamba's Mamba2 mixer on a tree."""

from transformers.models.bamba.modeling_bamba import BambaMixer

from harts.models.mamba2 import TreeMamba2

__all__ = ["TreeMamba2Mixer"]


class TreeMamba2Mixer(TreeMamba2, BambaMixer):  # type: ignore[misc]
    """Stands in for a `BambaMixer`."""
