"""How the context of a piece reaches a mixer module: as the keyword argument `contexts=`, by layer."""

from collections.abc import Mapping
from typing import Any

from harts.mixers import Context
from harts.models.sharded import Sealed, unseal

__all__ = ["Contexts", "context_of"]

Contexts = Mapping[int, Context]
"""The context of every decoder layer, by its number."""


def context_of(module: Any, contexts: Contexts | Sealed[Contexts] | None) -> Context | None:
    """The context of a mixer module's layer; None for a whole tree."""
    found = unseal(contexts)
    return None if found is None else found[module.layer_idx]
