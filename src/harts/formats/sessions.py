"""Session logs of coding agents: files whose lines are events of one session, not rows. They become chat rows.

One module a tool: claude_code, codex. The first line that says which decides; then the whole file is held in memory.
"""

from collections.abc import Iterable, Iterator
from itertools import chain

from harts.formats import claude_code, codex
from harts.formats.rows import Row
from harts.formats.unused import Unused

__all__ = ["TOOLS", "rows_of"]

TOOLS = {"claude-code": claude_code, "codex": codex}


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
        yield first
        yield from rows
        return
    unused = Unused(name, (), ())
    yield from TOOLS[name].conversations(list(chain([first], rows)), unused)
