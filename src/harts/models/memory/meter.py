"""Bytes of tensors that live, and the most that lived at once."""

import weakref
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["Meter", "allocated_bytes", "parameter_bytes"]


def allocated_bytes(device: torch.device) -> int:
    """What tensors take on a GPU; 0 on a CPU, where nobody counts."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def parameter_bytes(model: nn.Module) -> int:
    """Of parameters, buffers and the gradients that there are."""
    held = [*model.parameters(), *model.buffers()]
    grads = [each.grad for each in model.parameters() if each.grad is not None]
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in [*held, *grads]}
    return sum(storages.values())


class Meter:
    """Measures what is allocated inside its `with`: by the allocator's own numbers on a GPU, else by watching every op.

    On a CPU, what ops hold only while they run is not seen.

    Args:
        device: whose memory.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._watch = None if device.type == "cuda" else _Watch()
        self._start = 0

    def __enter__(self) -> Self:
        if self._watch is not None:
            self._watch.__enter__()  # type: ignore[no-untyped-call]
        self._start = self.now
        self.restart()
        return self

    def __exit__(self, *error: Any) -> None:
        if self._watch is not None:
            self._watch.__exit__(*error)  # type: ignore[no-untyped-call]

    @property
    def now(self) -> int:
        """Bytes that live, more than at the start."""
        if self._watch is not None:
            return self._watch.now - self._start
        return allocated_bytes(self._device) - self._start

    @property
    def peak(self) -> int:
        """The most of `now` since the start or since `restart`."""
        if self._watch is not None:
            return self._watch.peak - self._start
        return torch.cuda.max_memory_allocated(self._device) - self._start

    def restart(self) -> None:
        """Lets the peak begin anew at what lives now."""
        if self._watch is not None:
            self._watch.peak = self._watch.now
        else:
            torch.cuda.reset_peak_memory_stats(self._device)


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the storages of all tensors that ops give."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for each in tree_leaves((args, kwargs)):
            if isinstance(each, Tensor):
                self._note(each.untyped_storage(), 0)  # was there before: views of it are no news
        given = func(*args, **kwargs)
        for each in tree_leaves(given):
            if isinstance(each, Tensor):
                self._note(each.untyped_storage(), each.untyped_storage().nbytes())
        return given

    def _note(self, storage: torch.UntypedStorage, size: int) -> None:
        key = storage._cdata
        if key in self._seen:
            return
        self._seen.add(key)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.now -= size
