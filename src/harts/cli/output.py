"""What commands print: results to standard output, progress and complaints to standard error."""

import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rich.console import Console, ConsoleOptions
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from harts.escapes import escaped

__all__ = ["PlainConsole", "complain", "emit", "finite", "key_values", "marked", "number", "table", "watch"]


class PlainConsole(Console):
    """A console on which text is only text: what comes from data, paths and errors is shown as it is.

    Every command prints through one. No string is markup (`Text` has styles), and what a terminal would obey is shown
    as an escape.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(markup=False, **settings)

    def render_str(self, text: str, **settings: Any) -> Text:
        """A string as text; here rich would drop some control characters without a trace."""
        return super().render_str(escaped(text, keep="\n"), **settings)

    def render(self, renderable: Any, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        """Segments with control and bidirectional characters of texts as escapes; rich's own controls stay."""
        for segment in super().render(renderable, options):
            if segment.control or segment.text.isprintable():
                yield segment
            else:
                yield Segment(escaped(segment.text, keep="\n"), segment.style)


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
    console = PlainConsole()
    if not console.is_terminal:
        console = PlainConsole(width=200)  # a file or pipe has no width of its own
    render(console)


def complain(message: str) -> None:
    """Prints an error to standard error, in one line where it is one."""
    PlainConsole(stderr=True, soft_wrap=True).print(marked("error:", "bold red", message), highlight=False)


@contextmanager
def watch(title: str) -> Iterator[Callable[[str], None]]:
    """Shows on standard error what is being done; the function given tells it.

    On a terminal one line is overwritten; elsewhere the title is a line, and every message one below it.
    """
    console = PlainConsole(stderr=True, soft_wrap=True)
    if console.is_terminal:
        with console.status(Text(title)) as status:
            yield lambda message: status.update(Text(escaped(f"{title}: {message}")))
    else:
        console.print(f"{title}:", highlight=False)
        yield lambda message: console.print(f"  {message}", highlight=False)


def table(title: str, *columns: str, left: int = 1) -> Table:
    """An empty table; the first `left` columns hold words, the others numbers."""
    made = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for index, column in enumerate(columns):
        made.add_column(column, justify="left" if index < left else "right", overflow="fold", header_style="dim")
    return made


def key_values(title: str, values: Mapping[str, str]) -> Table:
    """A table of names and values."""
    made = table(title, "", "", left=2)
    made.show_header = False
    for name, value in values.items():
        made.add_row(name, value)
    return made


def marked(word: str, style: str, text: str = "") -> Text:
    """A word in a style, and text after it."""
    return Text.assemble((word, style), escaped(" " + text, keep="\n") if text else "")


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
