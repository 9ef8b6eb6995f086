"""Sizes of memory as people write them: 8_000_000_000, "60GiB", "auto"."""

import os
import re

import torch

from harts.models.memory.meter import allocated_bytes

__all__ = ["Memory", "format_bytes", "parse_memory"]

Memory = int | str
"""Bytes, a number with a unit, or "auto"."""

_UNITS = {
    unit.lower(): factor
    for power, letter in enumerate("KMGT", start=1)
    for unit, factor in ((f"{letter}B", 1000**power), (f"{letter}iB", 1024**power))
} | {"b": 1}
_AUTO_SHARE = 0.9
"""Of what is free: the rest is for the allocator's gaps and for what a loss keeps."""


def parse_memory(memory: Memory, device: torch.device, resident: int) -> int:
    """Bytes.

    Args:
        memory: bytes, "60GiB" or "60 GB" (1024 and 1000 to the power), or "auto": 0.9 of what is free on the device,
            beside what the process has there already.
        device: where the model computes.
        resident: bytes that lie there already.

    Raises:
        ValueError: not a positive size, an unknown unit, or more than the device has.
    """
    has, free = _device_bytes(device)
    if memory == "auto":
        return resident + int(_AUTO_SHARE * free)
    size = _read(memory)
    if size > has:
        raise ValueError(
            f"memory: expected at most the {format_bytes(has)} of {device}, got {memory!r}; ask for less, or 'auto'"
        )
    return size


def format_bytes(size: float) -> str:
    """E.g. 61.4 GiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def _read(memory: object) -> int:
    size = 0
    if isinstance(memory, int) and not isinstance(memory, bool):
        size = memory
    elif isinstance(memory, str):
        found = re.fullmatch(r"\s*(\d+(?:\.\d*)?)\s*([a-zA-Z]+)\s*", memory)
        factor = _UNITS.get(found[2].lower()) if found else None
        if found and factor:
            size = int(float(found[1]) * factor)
    if size < 1:
        raise ValueError(
            f"memory: expected a positive number of bytes, a number with a unit (B, KB, KiB, ... TiB) such as '60GiB', "
            f"or 'auto', got {memory!r}"
        )
    return size


def _device_bytes(device: torch.device) -> tuple[int, int]:
    """All there is, and what is free: on a GPU with what the allocator holds and does not use."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return total, free + torch.cuda.memory_reserved(device) - allocated_bytes(device)
    page = os.sysconf("SC_PAGE_SIZE")
    return page * os.sysconf("SC_PHYS_PAGES"), page * os.sysconf("SC_AVPHYS_PAGES")
