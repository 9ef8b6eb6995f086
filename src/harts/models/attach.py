"""Puts the tree ops into a transformers model, in place and reversibly."""

from collections import Counter
from dataclasses import dataclass
from typing import Any

from torch import nn

from harts.cost import expert_sizes
from harts.models.attention import PREFIX, register
from harts.models.configs import check_adapters, check_config
from harts.models.families import FAMILIES
from harts.models.family import Family, layer_types
from harts.models.refused import REASONS, check_version
from harts.models.router_hooks import install, uninstall
from harts.models.seams import check_around, find_head
from harts.models.twins import swap, swap_back
from harts.models.watch import install_watch, uninstall_watch

__all__ = ["Backbone", "attach", "detach", "find_backbone"]


@dataclass(frozen=True)
class Backbone:
    """The parts of a model that HARTS calls.

    Attributes:
        inner: the causal language model, behind wrappers.
        text: the decoder: token ids to final hidden states.
        head: the output embedding.
        config: its text config.
        family: how to attach to it.
    """

    inner: nn.Module
    text: nn.Module
    head: nn.Module
    config: Any
    family: Family

    @property
    def attached(self) -> bool:
        """Whether `attach` was called on this very model; models can share a config."""
        return bool(getattr(self.text, _MARK, False)) and self.tree_attention

    @property
    def tree_attention(self) -> bool:
        """Whether the config names the tree version of an attention implementation."""
        return str(self.config._attn_implementation).startswith(PREFIX)

    def has_experts(self, layer: int) -> bool:
        """Whether the config makes this decoder layer a mixture of experts."""
        experts = None if self.family.router is None else expert_sizes(self.config)
        return experts is not None and experts.layers[layer]


_MARK = "_harts_attached"


def attach(model: nn.Module) -> nn.Module:
    """Makes a supported transformers model able to run on trees; everything else it does stays as it was.

    Mixers other than attention are replaced by ours, which share their parameters and submodules (state dict names,
    hooks, LoRA layers and optimisers see the same model), and a tree version of the model's attention implementation
    is registered. Works before or after LoRA (peft) is added, and with gradient checkpointing. Attaching twice is fine.

    Args:
        model: a causal language model of one of the supported families, possibly wrapped by peft.

    Returns:
        The same model.

    Raises:
        ValueError: the model, one of its options (a type of layer, length-dependent rotary scaling, dropping of tokens,
            router noise, expert dropout) or a wrapper of its mixers is not supported. The message names what is.
    """
    backbone = find_backbone(model)
    check_around(model, backbone.inner, backbone.text)
    find_head(backbone.head)
    check_config(backbone.config, backbone.family.layers, has_router=backbone.family.router is not None)
    if not getattr(backbone.text, _MARK, False):
        _check_layers(backbone)
        twins = backbone.family.twins()
        swap(backbone.text, twins)
        theirs = {kind for kinds in backbone.family.mixer_classes().values() for kind in kinds}
        mixers = theirs | {twins[kind] for kind in theirs if kind in twins}
        install(backbone.text, mixers, backbone.family.router_class())
        install_watch(backbone.text, mixers)
        setattr(backbone.text, _MARK, True)
    if not backbone.tree_attention:
        backbone.config._attn_implementation = register(backbone.config._attn_implementation or "eager")
    return model


def detach(model: nn.Module) -> nn.Module:
    """Undoes `attach`; parameters keep what training made of them. Returns the same model.

    Raises:
        ValueError: `fully_shard` was called on one of its mixers by itself.
    """
    backbone = find_backbone(model)
    if getattr(backbone.text, _MARK, False):
        swap_back(backbone.text)  # what harts.models.fuse put in
        swap(backbone.text, {ours: theirs for theirs, ours in backbone.family.twins().items()})
        uninstall(backbone.text)
        uninstall_watch(backbone.text)
        delattr(backbone.text, _MARK)
    if backbone.tree_attention:
        backbone.config._attn_implementation = backbone.config._attn_implementation.removeprefix(PREFIX)
    return model


def find_backbone(model: nn.Module) -> Backbone:
    """Finds decoder, head and config behind the usual wrappers.

    Raises:
        ValueError: no supported model in there.
    """
    inner: Any = model
    while not hasattr(inner, "get_decoder") or hasattr(inner, "get_base_model"):
        if hasattr(inner, "get_base_model"):  # peft, which also passes on what it does not have itself
            check_adapters(inner)
            inner = inner.get_base_model()
        elif isinstance(getattr(inner, "module", None), nn.Module):  # DDP
            inner = inner.module
        else:
            raise ValueError(_unsupported(type(inner).__name__))
    config = inner.config.get_text_config()
    family = FAMILIES.get(config.model_type)
    head = inner.get_output_embeddings()
    if family is None:
        raise ValueError(_unsupported(f"model_type {config.model_type!r}", REASONS.get(config.model_type, "")))
    check_version(config.model_type, family.since)
    if head is None:
        raise ValueError(f"model: expected a causal language model with a head, got {type(inner).__name__}")
    return Backbone(inner, inner.get_decoder(), head, config, family)


def _unsupported(what: str, reason: str = "") -> str:
    what = f"{what} is not supported: {reason}" if reason else f"{what} is not supported"
    return f"model: {what}; HARTS knows {', '.join(FAMILIES)} (see docs/adding-a-model.md)"


def _check_layers(backbone: Backbone) -> None:
    """Counts the mixers found against the config, so that none is missed."""
    types = layer_types(backbone.config)
    classes = backbone.family.mixer_classes()
    expected = Counter({kind: 0 for kinds in classes.values() for kind in kinds})
    expected.update(kind for name in types for kind in classes[name])
    router = backbone.family.router_class()
    if router is not None:
        expected[router] = sum(map(backbone.has_experts, range(len(types))))
    for kind, count in expected.items():
        found = [module for module in backbone.text.modules() if type(module) is kind]
        if len(found) != count:
            raise ValueError(
                f"model: expected {count} modules {kind.__name__} from its config, found {len(found)}; attach before "
                "other libraries replace the mixers"
            )
        if any("forward" in vars(module) for module in found):
            raise ValueError(
                f"model: the forward of a {kind.__name__} was overridden (by a device_map hook, perhaps); load the "
                "model without it"
            )
