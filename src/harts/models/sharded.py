"""Models whose parameters FSDP2 (`torch.distributed.fsdp.fully_shard`) shards over replicas.

FSDP gathers what it shards in hooks before the forward of each wrapped module and before the backward of what it gave,
the whole model being the root. So a sharded model is called as a whole, where an unsharded one's decoder is called
alone. Log-probs are computed while the head runs, when its weight is gathered, and go through the hooks as the output
of the head and of the model.

FSDP also copies every dataclass among a module's arguments, for each module anew. Layouts are known by identity and
routings are written to, so they travel sealed.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor

__all__ = [
    "Sealed",
    "check_gathered",
    "compute_device",
    "compute_dtype",
    "find_whole",
    "most",
    "process_groups",
    "run_whole",
    "unseal",
]

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Sealed(Generic[T_co]):
    """Carries an argument through FSDP as it is."""

    def __init__(self, value: T_co) -> None:
        self.value = value


def unseal(value: T | Sealed[T]) -> T:
    """What a mixer was called with, sealed or not."""
    return value.value if isinstance(value, Sealed) else value


def find_whole(model: nn.Module, text: nn.Module, head: nn.Module) -> nn.Module | None:
    """The module to call as a whole: the outermost that `fully_shard` was called on. None: nothing is sharded.

    Args:
        model: as given to `harts.logprobs`.
        text, head: its decoder and output embedding.

    Raises:
        ValueError: a part of the model is sharded, but not the whole, or the model is wrapped by FSDP1.
    """
    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        raise ValueError(
            "model: FullyShardedDataParallel (FSDP1) is not supported; shard with torch.distributed.fsdp.fully_shard"
        )
    whole = next((module for module in model.modules() if isinstance(module, FSDPModule)), None)
    if whole is None or {text, head} <= set(whole.modules()):
        return whole
    raise ValueError(
        f"model: expected fully_shard on the whole model, got one with only a {type(whole).__name__} and the like "
        "sharded; call fully_shard(model) behind its layers, and pass that model, not one inside it"
    )


def run_whole(
    whole: nn.Module, text: nn.Module, head: nn.Module, inputs: Mapping[str, Any], score: Callable[[Any], T]
) -> T:
    """Calls the whole model and returns what `score` makes of its decoder's output, while the head is gathered.

    Args:
        whole: from `find_whole`, a causal language model of transformers, perhaps with adapters.
        text: its decoder.
        head: the linear layer that is its head; it runs on a single row, whose logits are dropped.
        inputs: of the decoder.
        score: gives tensors, in a tuple or not.
    """
    decoded: list[Any] = []
    scored: list[T] = []

    def on_head(module: nn.Module, arguments: Any, output: Any) -> T:
        scored.append(score(decoded.pop()))
        return scored[0]

    handles = [  # prepended: FSDP's own hooks see what these give, before the model's mixed precision casts it
        text.register_forward_hook(lambda module, arguments, output: decoded.append(output)),
        head.register_forward_hook(on_head, prepend=True),
        whole.register_forward_hook(lambda module, arguments, output: scored[0], prepend=True),
    ]
    try:
        sealed = {name: Sealed(inputs[name]) for name in ("packed", "routing", "contexts") if name in inputs}
        whole(**{**inputs, **sealed}, logits_to_keep=1)
    finally:
        for handle in handles:
            handle.remove()
    return scored[0]


def check_gathered(weight_VD: Tensor) -> None:
    """Refuses a head whose weight is sharded while the head runs.

    Raises:
        ValueError: it is.
    """
    if isinstance(weight_VD, DTensor):
        raise ValueError(
            "model: expected the head's whole weight, got a sharded one; use no tensor parallelism for the head, and "
            "pass the model that fully_shard was called on, not one inside it"
        )


def compute_dtype(model: nn.Module) -> torch.dtype:
    """The dtype that a model's parameters have while it runs: that of FSDP2's mixed precision, if there is one."""
    for state in _states(model):
        if state._mp_policy.param_dtype is not None:
            return state._mp_policy.param_dtype  # type: ignore[no-any-return]
    return next(model.parameters()).dtype


def compute_device(model: nn.Module) -> torch.device:
    """The device that a model's parameters are on while it runs: with FSDP2's offloading they rest on the CPU."""
    for state in _states(model):
        return state._device  # type: ignore[no-any-return]
    return next(model.parameters()).device


def process_groups(whole: nn.Module | None) -> list[dist.ProcessGroup]:
    """Those that the parameters are sharded over, or replicated; empty where one process holds all.

    Args:
        whole: from `find_whole`.
    """
    for state in () if whole is None else _states(whole):
        if state._fsdp_param_group is not None:
            mesh = state._fsdp_param_group.mesh_info.mesh
            return mesh.get_all_groups() if mesh.size() > 1 else []
    return []


def most(value: int, groups: Sequence[dist.ProcessGroup], device: torch.device) -> int:
    """The largest value over all processes; every one of them calls this.

    Args:
        value: of this one.
        groups: from `process_groups`.
        device: where they talk.
    """
    if not groups:
        return value
    largest = torch.tensor(value, device=device)
    for group in groups:
        dist.all_reduce(largest, dist.ReduceOp.MAX, group)
    return int(largest)


def _states(model: nn.Module) -> Iterator[Any]:
    return (module._get_fsdp_state() for module in model.modules() if isinstance(module, FSDPModule))
