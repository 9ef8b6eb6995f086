"""Which source a row is from: the table of readers, in the order in which they are asked."""

from types import MappingProxyType
from typing import Any, Literal

from harts.formats import atropos, chat, harts, rllm, sglang, slime, trl, verifiers, verl, vllm
from harts.formats.rows import Row

__all__ = ["MODULES", "Format", "format_of"]

# fmt: off
Format = Literal[
    "auto", "harts", "chat", "claude-code", "codex", "inspect",
    "vllm", "sglang", "verifiers", "trl", "verl", "slime", "atropos", "rllm",
]
# fmt: on

# In this order: a row of tokens may have messages beside them, and vLLM's own fields are the most telling. verifiers'
# rows have TRL's names, so they are told apart first.
MODULES: MappingProxyType[str, Any] = MappingProxyType(
    {
        "slime": slime,  # before ours: it has a loss_mask too
        "harts": harts,
        "vllm": vllm,
        "sglang": sglang,
        "verifiers": verifiers,
        "trl": trl,
        "verl": verl,
        "atropos": atropos,
        "rllm": rllm,
        "chat": chat,
    }
)


def format_of(row: Row) -> str:
    """The name of the first reader that knows a row's fields.

    Raises:
        ValueError: none does.
    """
    for name, module in MODULES.items():
        if module.matches(row):
            return name
    fields = ", ".join(map(str, row.fields)) or "none"
    if {"input", "output", "score"} <= row.fields.keys():
        fields += " (text that verl dumps: it has no token ids)"
    raise ValueError(
        f"{row.place}: expected token_ids, messages, or the fields of {', '.join(MODULES)}, got the fields {fields}; "
        "rename them or pass fmt="
    )
