"""Swapping a module for one of another class that shares its whole state: parameters, submodules, hooks, flags."""

from collections.abc import Mapping

from torch import nn

__all__ = ["swap", "swap_back"]


def swap(root: nn.Module, twins: Mapping[type[nn.Module], type[nn.Module]]) -> list[nn.Module]:
    """Replaces every module below `root` whose class is a key by one of the class beside it; returns the new ones."""
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
    kinds = {type(module) for module in root.modules()}
    swap(root, {kind: kind.stands_for for kind in kinds if hasattr(kind, "stands_for")})
