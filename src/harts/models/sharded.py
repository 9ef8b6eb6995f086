"""Models whose parameters FSDP2 (`torch.distributed.fsdp.fully_shard`) shards over replicas.

FSDP gathers what it shards in hooks around the forward of each wrapped module, the whole model being the root. So a
sharded model is called as a whole, where an unsharded one's decoder is called alone, and its final hidden states are
picked up on the way; the head that the whole model runs behind them gets a single row.

FSDP also copies every dataclass among a module's arguments, for each module anew. Layouts are known by identity and
routings are written to, so they travel sealed.
"""

from collections.abc import Mapping
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor

__all__ = ["Sealed", "check_gathered", "compute_dtype", "is_sharded", "run_whole", "unseal"]

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Sealed(Generic[T_co]):
    """Carries an argument through FSDP as it is."""

    def __init__(self, value: T_co) -> None:
        self.value = value


def unseal(value: T | Sealed[T]) -> T:
    """What a mixer was called with, sealed or not."""
    return value.value if isinstance(value, Sealed) else value


def is_sharded(model: nn.Module) -> bool:
    """Whether `fully_shard` was called on the whole model.

    Raises:
        ValueError: the model is wrapped by FSDP1.
    """
    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        raise ValueError(
            "model: FullyShardedDataParallel (FSDP1) is not supported; shard with torch.distributed.fsdp.fully_shard"
        )
    return isinstance(model, FSDPModule)


def run_whole(model: nn.Module, text: nn.Module, inputs: Mapping[str, Any]) -> Any:
    """Calls the whole model and returns what its decoder gave.

    Args:
        model: sharded, a causal language model of transformers, perhaps with adapters.
        text: its decoder.
        inputs: of the decoder.
    """
    kept: list[Any] = []
    handle = text.register_forward_hook(lambda module, arguments, output: kept.append(output))
    try:
        sealed = {name: Sealed(inputs[name]) for name in ("packed", "routing") if name in inputs}
        model(**{**inputs, **sealed}, logits_to_keep=1)
    finally:
        handle.remove()
    (output,) = kept
    return output


def check_gathered(weight_VD: Tensor) -> None:
    """Refuses a head whose weight is sharded when it is needed, behind the forward of the whole model.

    Raises:
        ValueError: it is.
    """
    if isinstance(weight_VD, DTensor):
        raise ValueError(
            "model: expected the head's whole weight behind the model's forward, came a sharded one; call fully_shard "
            "on the whole model (which keeps its own parameters until the backward) but not on the head, and use no "
            "tensor parallelism"
        )


def compute_dtype(model: nn.Module) -> torch.dtype:
    """The dtype that a model's parameters have while it runs: that of FSDP2's mixed precision, if there is one."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            policy: Any = module._get_fsdp_state()._mp_policy
            if policy.param_dtype is not None:
                return policy.param_dtype  # type: ignore[no-any-return]
    return next(model.parameters()).dtype
