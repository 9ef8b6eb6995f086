"""What commands print: results to standard output, progress and complaints to standard error."""

import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from harts.viz.escapes import escaped

__all__ = ["complain", "emit", "finite", "key_values", "number", "table", "watch"]


def emit(document: Mapping[str, Any], as_json: bool, render: Callable[[Console], None]) -> None:
    """Prints a result: as one JSON document, or by `render` for people.

    Args:
        document: all of the result, of plain types.
        as_json: which of the two.
        render: prints to the console that it is given.
    """
    if as_json:
        sys.stdout.write(json.dumps(finite(document), indent=2) + "\n")
        return
    console = Console()
    if not console.is_terminal:
        console = Console(width=200)  # a file or pipe has no width of its own
    render(console)


def complain(message: str) -> None:
    """Prints an error to standard error, in one line where it is one."""
    Console(stderr=True, soft_wrap=True).print(f"[bold red]error:[/] {_plain(message)}", highlight=False)


@contextmanager
def watch(title: str) -> Iterator[Callable[[str], None]]:
    """Shows on standard error what is being done; the function given tells it.

    On a terminal one line is overwritten; elsewhere every message is a line.
    """
    console = Console(stderr=True, soft_wrap=True)
    if console.is_terminal:
        with console.status(escape(title)) as status:
            yield lambda message: status.update(f"{escape(title)}: {_plain(message)}")
    else:
        yield lambda message: console.print(f"{escape(title)}: {_plain(message)}", highlight=False)


def table(title: str, *columns: str, left: int = 1) -> Table:
    """An empty table; the first `left` columns hold words, the others numbers. No title is markup."""
    made = Table(
        title=_plain(title), title_justify="left", title_style="bold", box=None, pad_edge=False, padding=(0, 2, 0, 0)
    )
    for index, column in enumerate(columns):
        made.add_column(column, justify="left" if index < left else "right", overflow="fold", header_style="dim")
    return made


def key_values(title: str, values: Mapping[str, str]) -> Table:
    """A table of names and values."""
    made = table(title, "", "", left=2)
    made.show_header = False
    for name, value in values.items():
        made.add_row(_plain(name), _plain(value))
    return made


def _plain(message: str) -> str:
    """A message as it is: no part of it is markup, and a terminal obeys none of its characters but the line's end."""
    return escape(escaped(message, keep="\n"))


def number(value: float | None, digits: int = 2) -> str:
    """A number for people: integers with thousands separators, small and large ones with an exponent."""
    if value is None:
        return "-"
    if isinstance(value, int):
        return f"{value:,}"
    if value != 0 and math.isfinite(value) and not 1e-3 <= abs(value) < 1e6:
        return f"{value:.1e}"
    return f"{value:.{digits}f}"


def finite(value: Any) -> Any:
    """JSON has no NaN and no infinity: they become null."""
    if isinstance(value, Mapping):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
