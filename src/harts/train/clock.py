"""Times what a device does between two points of a program, without waiting for it at either."""

import time

import torch

__all__ = ["Mark"]


class Mark:
    """A point in the work of a device.

    Args:
        device: "cpu", "cuda", ...; on a CUDA device the point behind all kernels launched so far on its current stream.
    """

    def __init__(self, device: str) -> None:
        self._event: torch.cuda.Event | None = None
        self._time = time.perf_counter()
        if device.startswith("cuda"):
            with torch.cuda.device(torch.device(device)):
                self._event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
                self._event.record()

    def seconds_since(self, earlier: "Mark") -> float:
        """Seconds from an earlier mark on the same device to this one, once the device has come here."""
        if self._event is None or earlier._event is None:
            return self._time - earlier._time
        self._event.synchronize()
        return float(earlier._event.elapsed_time(self._event)) / 1e3
