"""What `attach` has to know of a family of transformers models."""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from harts.mixers import Attention, Mixer
from harts.models.routers import Router

__all__ = ["Family", "Layer", "layer_types"]


@dataclass(frozen=True)
class Layer:
    """One type of decoder layer, as `layer_types` of a config names it.

    Attributes:
        module: "module:Class" of its token mixer.
        mixer: what that is on a tree.
        twin: "module:Class" of ours that takes its place; None where it runs as it is, through transformers' attention
            interface.
        beside: another mixer of the same layer, which reads its context under other names; None without one.
    """

    module: str
    mixer: type[Mixer]
    twin: str | None = None
    beside: "Layer | None" = None

    def mixers(self) -> list["Layer"]:
        """It and those beside it."""
        return [self, *(() if self.beside is None else self.beside.mixers())]


@dataclass(frozen=True, kw_only=True)
class Family:
    """What `attach` has to know of one `model_type`.

    Attributes:
        layers: its types of decoder layers; None for one without a token mixer, whose rows do not see each other.
        mask: what to hand the backbone as `attention_mask` so that it builds none of its own; None: nothing for each
            type of layer.
        router: that of its mixture-of-experts layers; None without any.
        fused: "module:NAME" of the classes, a tuple, that `harts.models.fuse` swaps in; None where nothing is fused.
        block: "module:Class" of the decoder layers and of ours that takes their place, where some have experts and no
            mixer in front of them; None without such.
        since: first version of transformers whose layers hand the mixers what they need; "" for all that HARTS takes.
    """

    layers: Mapping[str, Layer | None]
    mask: Callable[[torch.device], Any] | None = None
    router: Router | None = None
    fused: str | None = None
    block: tuple[str, str] | None = None
    since: str = ""

    def mixer_classes(self) -> dict[str, list[type[nn.Module]]]:
        """The classes of the mixers in each type of layer."""
        return {kind: [_load(each.module) for each in self._mixers(kind)] for kind in self.layers}

    def twins(self) -> dict[type[nn.Module], type[nn.Module]]:
        """Classes of ours by those whose place they take."""
        every = [each for kind in self.layers for each in self._mixers(kind)]
        pairs = [(each.module, each.twin) for each in every if each.twin is not None]
        pairs += [] if self.block is None else [self.block]
        return {_load(theirs): _load(ours) for theirs, ours in pairs}

    def mixer_types(self) -> list[type[Mixer]]:
        """Every mixer that a layer may have."""
        return list(dict.fromkeys(each.mixer for kind in self.layers for each in self._mixers(kind)))

    def mixers(self, config: Any) -> list[tuple[Mixer, ...]]:
        """The mixers of each decoder layer."""
        types = layer_types(config)
        of_type = {
            kind: tuple(each.mixer.from_config(config) for each in self._mixers(kind)) for kind in dict.fromkeys(types)
        }
        return [of_type[kind] for kind in types]

    def attention_of(self, config: Any, layer: int) -> Attention:
        """The attention of one decoder layer that has some."""
        mixers = (each.mixer.from_config(config) for each in self._mixers(layer_types(config)[layer]))
        return next(each for each in mixers if isinstance(each, Attention))

    def _mixers(self, kind: str) -> list[Layer]:
        layer = self.layers[kind]
        return [] if layer is None else layer.mixers()

    def attention_mask(self, device: torch.device) -> Any:
        """What to hand the backbone as `attention_mask`."""
        return dict.fromkeys(self.layers) if self.mask is None else self.mask(device)

    def router_class(self) -> type[nn.Module] | None:
        """The class of the routers."""
        return None if self.router is None else _load(self.router.module)

    def fused_classes(self) -> dict[type[nn.Module], type[nn.Module]]:
        """The classes named by `fused`, by those that they stand for."""
        return {} if self.fused is None else {twin.stands_for: twin for twin in _load(self.fused)}


def _load(path: str) -> Any:
    module, name = path.split(":")
    return getattr(importlib.import_module(module), name)


def layer_types(config: Any) -> list[str]:
    """The type of each decoder layer of a text config.

    Where the config names none, a window is every layer's, as transformers masks them.
    """
    every = "sliding_attention" if getattr(config, "sliding_window", None) else "full_attention"
    return list(getattr(config, "layer_types", None) or [every] * config.num_hidden_layers)
