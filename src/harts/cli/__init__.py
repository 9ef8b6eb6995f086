"""The command line: one module a command, imported only when that command runs.

`harts.cli.NAME` holds the function `NAME`. Results go to standard output (`--json`: one JSON document), everything else
to standard error. Exit codes: 0 well; 1 a law does not hold; 2 bad input or usage; 130 interrupted; 141 the reader of
the output went away (128 + SIGPIPE, as shells say it).
"""

import functools
import importlib
import importlib.metadata
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup

__all__ = ["COMMANDS", "app", "main"]

COMMANDS: Mapping[str, str] = MappingProxyType(
    {
        "inspect": "Count what a data set shares: tokens, rows, segments, chains.",
        "show": "Draw the prefix tree of a data set.",
        "plan": "Cut a data set into microbatches and place them on replicas.",
        "check": "Compare a model on a tree with separate rows.",
        "calibrate": "Time a model and write its cost model.",
        "train": "Train a model.",
        "bench": "Time a tree against packed separate rows.",
    }
)
"""Commands and what `harts --help` says of them."""

_PIPE_CLOSED = 141


class _LazyCommand(TyperCommand):
    """Stands for a command in the list of commands; running it imports the real one."""

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        assert self.name is not None
        with _exit_codes():  # importing torch takes seconds, in which people press Ctrl-C
            function = getattr(importlib.import_module(f"harts.cli.{self.name}"), self.name)
        real = typer.Typer(add_completion=False)
        real.command(self.name)(_with_exit_codes(function))
        return typer.main.get_command(real).make_context(info_name, args, parent=parent, **extra)


class _Commands(TyperGroup):
    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        for name, text in COMMANDS.items():
            self.add_command(_LazyCommand(name=name, callback=None, help=text))


@contextmanager
def _exit_codes() -> Iterator[None]:
    """Turns errors of the user's making into one line and an exit code; others keep their traceback."""
    from harts.cli.output import complain

    try:
        yield
    except KeyboardInterrupt:
        complain("interrupted")
        raise typer.Exit(130) from None
    except BrokenPipeError:  # the reader of our output went away, as `head` does
        _leave_pipe()
    except (ValueError, OSError) as error:
        complain(str(error))
        raise typer.Exit(2) from None


def _leave_pipe(*_: Any) -> NoReturn:
    """Ends quietly: what is still to be flushed goes nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    raise SystemExit(_PIPE_CLOSED)


def _with_exit_codes(function: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(function)  # typer reads the options off its signature
    def run(*args: Any, **kwargs: Any) -> None:
        with _exit_codes():
            function(*args, **kwargs)

    return run


app = typer.Typer(cls=_Commands, add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(importlib.metadata.version("harts"))
        raise typer.Exit


@app.callback()
def _harts(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """HARTS trains language models on agent trajectories that share history: every distinct token runs once."""


def main() -> None:
    """Entry point of the command `harts`."""
    from rich.console import Console

    # Its own exits with 1, which says that a law does not hold.
    Console.on_broken_pipe = _leave_pipe  # type: ignore[assignment, method-assign]
    try:
        app()
    except SystemExit as end:
        try:
            sys.stdout.flush()  # short results are still in the buffer
        except BrokenPipeError:
            if not end.code:
                _leave_pipe()
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise
