"""Token mixers: one file each, beside an op of `harts.ops`."""

from harts.mixers.attention import Attention, SlidingAttention
from harts.mixers.context import Context, Wanted
from harts.mixers.gated_delta_rule import GatedDeltaRule
from harts.mixers.kimi_delta_attention import KimiDeltaAttention
from harts.mixers.latent import LatentAttention
from harts.mixers.lightning import LightningAttention
from harts.mixers.mamba2 import Mamba2
from harts.mixers.protocol import Mixer
from harts.mixers.short_conv import ShortConv
from harts.mixers.store import Exchange, Store

__all__ = [
    "MIXERS",
    "Attention",
    "Context",
    "Exchange",
    "GatedDeltaRule",
    "KimiDeltaAttention",
    "LatentAttention",
    "LightningAttention",
    "Mamba2",
    "Mixer",
    "ShortConv",
    "SlidingAttention",
    "Store",
    "Wanted",
]

MIXERS: tuple[type[Mixer], ...] = (
    Attention,
    SlidingAttention,
    LatentAttention,
    GatedDeltaRule,
    KimiDeltaAttention,
    LightningAttention,
    Mamba2,
    ShortConv,
)
"""Every mixer; the laws of `tests/mixers` run over them."""
