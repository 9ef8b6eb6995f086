"""Which files a path means: itself, standard input, all that match a pattern, or the data files of a directory."""

import glob
from os import PathLike
from pathlib import Path

__all__ = ["ENDINGS", "STDIN", "ending_of", "files_at"]

STDIN = "-"
ENDINGS = ("", ".jsonl", ".ndjson", ".json", ".traj")
_IN_DIRECTORY = (*ENDINGS[1:], ".parquet", ".eval")


def ending_of(path: Path) -> str:
    """The ending that says what a file holds: that before .gz or .zst."""
    return Path(path.name.lower().removesuffix(".gz").removesuffix(".zst")).suffix


def files_at(item: str | PathLike[str]) -> list[Path]:
    """The files of one path, in the order of their names.

    Raises:
        ValueError: no such file, a pattern that matches none, a directory without data files.
    """
    path = Path(item)
    if str(item) == STDIN or path.is_file():
        return [path]
    if path.is_dir():
        found = sorted(each for each in path.iterdir() if each.is_file() and not each.name.startswith("."))
        files = [each for each in found if ending_of(each) in _IN_DIRECTORY]
        if not files:
            expected = f"files with one of the endings {', '.join(_IN_DIRECTORY)} (.gz, .zst)"
            action = f"for directories below it give a pattern, as '{path}/**/*.jsonl'"
            raise ValueError(f"{path}: expected {expected} in this directory, got none; {action}")
        return files
    if not path.exists() and glob.has_magic(str(path)):
        matching = [Path(name) for name in sorted(glob.glob(str(path), recursive=True)) if Path(name).is_file()]
        if not matching:
            raise ValueError(f"{path}: no file matches this pattern; check it")
        return matching
    if path.exists():  # a pipe or a device
        return [path]
    raise ValueError(f"{path}: no such file; check the path")
