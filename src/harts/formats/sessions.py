"""Files whose lines are not rows yet: session logs of coding agents, whole logs of inspect_ai, episodes in messages.

The first line decides. Lines of a session are events (one module a tool: claude_code, codex): the whole file is held in
memory. A log of inspect_ai becomes a row a sample, an episode of rLLM without token ids a chat row a step.
"""

from collections.abc import Iterable, Iterator
from itertools import chain

from harts.formats import claude_code, codex, inspect_ai, rllm
from harts.formats.rows import Row
from harts.formats.unused import Unused

__all__ = ["SPREAD", "TOOLS", "rows_of"]

TOOLS = {"claude-code": claude_code, "codex": codex}
SPREAD = frozenset({*TOOLS, "inspect", "rllm"})
"""Formats whose rows are spread first; what becomes of them is told by their fields."""

_SPLITS = ((inspect_ai.is_log, inspect_ai.samples_of), (rllm.is_chat, rllm.chat_rows))


def rows_of(part: Iterable[Row], fmt: str = "auto") -> Iterator[Row]:
    """The rows of a file: its own, or, where its lines are events of a session, a chat row a conversation.

    Args:
        part: the rows of one file, in its order.
        fmt: as `harts.formats.read` takes it; the name of a tool says that the lines are its events.

    Raises:
        ValueError: events that are not what the tool writes.
    """
    rows = iter(part)
    first = next(rows, None)
    if first is None:
        return
    name = fmt if fmt in TOOLS else None
    if fmt == "auto":
        name = next((tool for tool, module in TOOLS.items() if module.matches(first)), None)
    if name is None:
        split = next((split for known, split in _SPLITS if fmt in ("auto", *SPREAD) and known(first)), None)
        for row in chain([first], rows):
            yield from [row] if split is None else split(row)
        return
    unused = Unused(name, (), ())
    yield from TOOLS[name].conversations(list(chain([first], rows)), unused)
