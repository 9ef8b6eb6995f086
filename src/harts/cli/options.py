"""Options that several commands have: how data is read, workloads, output. Needs no torch."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal

import typer

from harts import formats
from harts.trajectory import Trajectory

__all__ = [
    "Data",
    "DataDir",
    "Fields",
    "Format",
    "Json",
    "Limit",
    "OptionalData",
    "Reasoning",
    "Rows",
    "Tokenizer",
    "parse_workloads",
    "read_data",
]

_DATA_HELP = (
    "JSON Lines or an array (plain, gzip, Zstandard) or Parquet: files, patterns, directories, - for stdin; "
    "several are read as one."
)

RowsChoice = Literal["trajectory", "turn"]
ReasoningChoice = Literal["keep", "drop"]

_READING = "Reading"

Data = Annotated[list[Path], typer.Argument(help=_DATA_HELP, show_default=False)]
OptionalData = Annotated[list[Path] | None, typer.Argument(help=_DATA_HELP, show_default=False)]
Rows = Annotated[
    RowsChoice,
    typer.Option(help="What a chat row becomes: one row, or one row a model call.", rich_help_panel=_READING),
]
Format = Annotated[
    formats.Format, typer.Option("--format", help="Whose field names the rows have.", rich_help_panel=_READING)
]
Fields = Annotated[
    str | None,
    typer.Option(
        help="Fields of rows under other names: token_ids=output.ids,loss_mask=mask; see docs/data.md.",
        rich_help_panel=_READING,
    ),
]
Tokenizer = Annotated[
    str | None,
    typer.Option(
        help="Directory of a transformers tokenizer for chat rows; without it ChatML in the Qwen vocabulary.",
        rich_help_panel=_READING,
    ),
]
Reasoning = Annotated[
    ReasoningChoice,
    typer.Option(help="Whether chat rows keep the reasoning of earlier turns.", rich_help_panel=_READING),
]
Limit = Annotated[
    int | None, typer.Option(min=1, help="Read this many trajectories at most.", rich_help_panel=_READING)
]
DataDir = Annotated[
    Path | None,
    typer.Option(help="Where the files of the real workloads are; without it HARTS_DATA and the usual places."),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]


def read_data(
    data: Sequence[Path],
    *,
    rows: RowsChoice,
    fmt: formats.Format,
    tokenizer: str | None,
    reasoning: ReasoningChoice,
    limit: int | None,
    fields: str | None,
) -> list[Trajectory]:
    """Reads the data arguments of a command with its reader options."""
    source: Path | list[Path] = data[0] if len(data) == 1 else list(data)
    return formats.read(
        source, rows=rows, fmt=fmt, tokenizer=tokenizer, reasoning=reasoning, limit=limit, fields=fields
    )


def parse_workloads(text: str) -> list[tuple[str, Mapping[str, int]]]:
    """Names and sizes from "star3,think:rollouts=2:turns=5".

    Raises:
        ValueError: something other than name, size and whole number.
    """
    found: list[tuple[str, Mapping[str, int]]] = []
    for item in text.split(","):
        name, *settings = item.strip().split(":")
        sizes: dict[str, int] = {}
        for setting in settings:
            size, _, value = setting.partition("=")
            if not size or not value.isdecimal():
                raise ValueError(
                    f"workloads: expected NAME or NAME:SIZE=NUMBER, several with commas between, got {item!r}"
                )
            sizes[size] = int(value)
        if not name:
            raise ValueError(f"workloads: expected names with commas between, got {text!r}")
        found.append((name, sizes))
    return found
