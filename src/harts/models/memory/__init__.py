"""How much memory a tree takes in pieces, and the pieces that fit into a given memory."""

from harts.models.memory.choose import Choice, choose_one_sweep, choose_two_sweeps
from harts.models.memory.sizes import Memory, format_bytes, parse_memory

__all__ = ["Choice", "Memory", "choose_one_sweep", "choose_two_sweeps", "format_bytes", "parse_memory"]
