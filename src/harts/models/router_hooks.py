"""Hooks on mixers and routers: a router runs as its forward's `Routing` says.

A router only sees hidden states. So the token mixer of its layer, which sees the forward's keyword arguments, notes the
pass it belongs to for the router that runs after it, in the same thread: activation recomputation runs both again,
perhaps in another thread, and gives the same experts.
"""

from collections.abc import Collection
from contextvars import ContextVar
from typing import Any

from torch import Tensor, nn

from harts.models.routing import Routing
from harts.models.sharded import Sealed, unseal

__all__ = ["announce", "install", "moe_layers", "uninstall"]

_CURRENT: ContextVar[tuple[Routing, int] | None] = ContextVar("harts_routing", default=None)
_HANDLES = "_harts_routing_handles"


def moe_layers(text: nn.Module, router_class: type[nn.Module] | None) -> dict[int, int]:
    """Decoder layers that have a router -> their place among those."""
    if router_class is None:
        return {}
    layers = [i for i, layer in enumerate(_layers(text)) if any(type(m) is router_class for m in layer.modules())]
    return {layer: place for place, layer in enumerate(layers)}


def install(text: nn.Module, mixer_classes: Collection[type[nn.Module]], router_class: type[nn.Module] | None) -> None:
    """Registers the hooks on mixers and routers; without `routing=` in a forward they do nothing."""
    if router_class is None:
        return
    handles: list[Any] = []
    for module in text.modules():
        if type(module) in mixer_classes:
            handles.append(module.register_forward_pre_hook(_announce, with_kwargs=True))
        elif type(module) is router_class:
            handles.append(module.register_forward_hook(_route))
    setattr(text, _HANDLES, handles)


def uninstall(text: nn.Module) -> None:
    """Removes what `install` registered."""
    for handle in text.__dict__.pop(_HANDLES, []):
        handle.remove()


def _layers(text: Any) -> Collection[nn.Module]:
    return text.layers  # type: ignore[no-any-return]


def _announce(mixer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    announce(mixer.layer_idx, kwargs.pop("routing", None))
    return args, kwargs


def announce(layer: int, routing: Routing | Sealed[Routing] | None) -> None:
    """Says which decoder layer the next router is of; called inside the layer, so that recomputation says it again."""
    found = unseal(routing)
    _CURRENT.set(None if found is None else (found, layer))


def _route(router: nn.Module, args: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> Any:
    current = _CURRENT.get()
    if current is None:
        return None
    _CURRENT.set(None)
    routing, layer = current
    return routing.route(layer, router, args, output)
