"""Attention on a tree through transformers' attention interface.

`attach` renames a model's attention implementation, "sdpa" say, to "harts_sdpa". That one runs on the tree when the
forward pass carries a `packed=`, and hands everything else to the implementation it was made from, with its mask.
"""

import dataclasses
import sys
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from harts.layout import PackedTree
from harts.mixers import Attention
from harts.models.families import FAMILIES
from harts.models.pieces import Contexts, context_of
from harts.models.row_floor import cut_rows, fill_rows
from harts.models.sharded import Sealed, unseal
from harts.ops.kernels import Kernels

__all__ = ["PREFIX", "register"]

PREFIX = "harts_"


def register(original: str) -> str:
    """Registers the tree version of an attention implementation and returns its name."""
    name = PREFIX + original

    def tree_attention(
        module: nn.Module,
        query: Tensor,  # [1, heads, F, size]: F rows, the T of the tree and dummy ones
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        packed: PackedTree | Sealed[PackedTree] | None = None,
        kernels: Kernels | None = None,
        contexts: Contexts | Sealed[Contexts] | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        packed = unseal(packed)
        if packed is None:
            return _original(original, module)(module, query, key, value, attention_mask, **kwargs)
        q_THD, k_TGD, v_TGV = (cut_rows(x[0].transpose(0, 1), packed.num_rows) for x in (query, key, value))
        mixer, context = _mixer_of(module, kwargs), context_of(module, contexts)
        sinks = [kwargs["s_aux"]] if kwargs.get("s_aux") is not None else []
        out_THV = mixer.forward(packed, kernels or Kernels(), context, q_THD, k_TGD, v_TGV, *sinks)
        return fill_rows(out_THV, query.shape[2]).unsqueeze(0), None

    AttentionInterface.register(name, tree_attention)
    if original in ALL_MASK_ATTENTION_FUNCTIONS:
        AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS[original])
    return name


def _mixer_of(module: Any, kwargs: dict[str, Any]) -> Attention:
    """What an attention module is: its window as its layer's type says, by which transformers masks."""
    mixer = FAMILIES[module.config.model_type].attention_of(module.config, module.layer_idx)
    return dataclasses.replace(mixer, scale=kwargs["scaling"], softcap=kwargs.get("softcap"))


def _original(name: str, module: nn.Module) -> Callable[..., tuple[Tensor, Tensor | None]]:
    if name == "eager":  # not in the interface: each modeling file has its own
        files = [sys.modules[kind.__module__] for kind in type(module).__mro__]
        return next(file.eager_attention_forward for file in files if hasattr(file, "eager_attention_forward"))  # type: ignore[no-any-return]
    return ALL_ATTENTION_FUNCTIONS[name]  # type: ignore[no-any-return]
