"""Whether every mixer ran on the tree: one that is called without `packed=` would run on all rows as one sequence.

A hook or a forward that somebody put on the decoder or a layer may keep the keyword arguments to itself. So each mixer
notes that it ran with the layout of the pass that is under way.
"""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import nn

from harts.layout import PackedTree
from harts.models.sharded import unseal

__all__ = ["install_watch", "mixers_run_on", "uninstall_watch"]

_UNDER_WAY: ContextVar[tuple[PackedTree, set[nn.Module]] | None] = ContextVar("harts_pass", default=None)
_HANDLES = "_harts_watch_handles"


def install_watch(text: nn.Module, mixer_classes: Collection[type[nn.Module]]) -> None:
    """Registers a hook on every mixer; outside `mixers_run_on` it does nothing."""
    mixers = [module for module in text.modules() if type(module) in mixer_classes]
    setattr(text, _HANDLES, [mixer.register_forward_pre_hook(_note, with_kwargs=True) for mixer in mixers])


def uninstall_watch(text: nn.Module) -> None:
    """Removes what `install_watch` registered."""
    for handle in text.__dict__.pop(_HANDLES, []):
        handle.remove()


@contextmanager
def mixers_run_on(packed: PackedTree, text: nn.Module) -> Iterator[None]:
    """Raises ValueError behind a forward of the decoder in which a mixer did not run on `packed`."""
    ran: set[nn.Module] = set()
    token = _UNDER_WAY.set((packed, ran))
    try:
        yield
    finally:
        _UNDER_WAY.reset(token)
    expected = len(vars(text)[_HANDLES])
    if len(ran) < expected:
        raise ValueError(
            f"model: expected its {expected} mixers to run on the tree, {len(ran)} did; a hook or a forward that was "
            "set on the decoder or its layers does not hand on the keyword arguments packed= and kernels="
        )


def _note(mixer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    under_way = _UNDER_WAY.get()
    if under_way is not None and unseal(kwargs.get("packed")) is under_way[0]:
        under_way[1].add(mixer)
