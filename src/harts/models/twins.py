"""Swapping a module for one of another class that shares its whole state: parameters, submodules, hooks, flags."""

from collections.abc import Mapping

from torch import nn
from torch.distributed.fsdp import FSDPModule

__all__ = ["swap", "swap_back"]


def swap(root: nn.Module, twins: Mapping[type[nn.Module], type[nn.Module]]) -> list[nn.Module]:
    """Replaces every module below `root` whose class is a key by one of the class beside it; returns the new ones.

    Raises:
        ValueError: `fully_shard` was called on one, which gave it another class and knows it by identity. Nothing was
            replaced.
    """
    for module in root.modules():
        kind = _kind(module)
        if kind in twins and type(module) is not kind:
            raise ValueError(
                f"model: a {kind.__name__} is sharded by itself and cannot be replaced any more; call harts.attach and "
                "harts.fuse before fully_shard, and do not undo them behind it"
            )
    made: list[nn.Module] = []
    for parent in list(root.modules()):
        for name, child in list(parent.named_children()):
            new = twins.get(type(child))
            if new is not None:
                twin = new.__new__(new)
                twin.__dict__ = child.__dict__
                setattr(parent, name, twin)
                made.append(twin)
    return made


def swap_back(root: nn.Module) -> None:
    """Replaces every twin whose class says in `stands_for` what it stands for."""
    kinds = set(map(_kind, root.modules()))
    swap(root, {kind: kind.stands_for for kind in kinds if hasattr(kind, "stands_for")})


def _kind(module: nn.Module) -> type[nn.Module]:
    """The class of a module before `fully_shard` was called on it."""
    return type(module).__bases__[-1] if isinstance(module, FSDPModule) else type(module)
