"""Trajectories to a file in our own schema."""

import contextlib
import gzip
import json
from collections.abc import Iterable, Iterator
from os import PathLike
from pathlib import Path
from typing import BinaryIO

from harts.files import replacing
from harts.formats.harts import fields_of
from harts.trajectory import Trajectory

__all__ = ["write"]

_ENDINGS = (".jsonl", ".jsonl.gz", ".jsonl.zst")


def write(path: str | PathLike[str], trajectories: Iterable[Trajectory]) -> None:
    """Write JSON Lines, compressed as the ending says (.jsonl, .jsonl.gz, .jsonl.zst).

    The file appears whole or not at all: it is written under a temporary name beside it and renamed. The same
    trajectories give the same bytes.

    Raises:
        ValueError: another ending, no such folder, no trajectory, an id that is empty or used twice, meta that JSON
            cannot hold.
    """
    path = Path(path)
    if not path.name.endswith(_ENDINGS):
        raise ValueError(f"{path}: expected an ending of {', '.join(_ENDINGS)}, got {path.suffix!r}; rename it")
    seen: set[str] = set()
    with replacing(path) as temporary:
        with _opened(temporary, path.suffix) as stream:
            for trajectory in trajectories:
                if not trajectory.id or trajectory.id in seen:
                    got = "the same twice" if trajectory.id else "none"
                    raise ValueError(f"trajectory {trajectory.name}, field id: expected a unique name, got {got}")
                seen.add(trajectory.id)
                stream.write(_line(trajectory))
        if not seen:
            raise ValueError(f"{path}: expected at least one trajectory, got none; such a file could not be read")


def _line(trajectory: Trajectory) -> bytes:
    try:
        text = json.dumps(fields_of(trajectory), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"trajectory {trajectory.name}, field meta: expected what JSON can hold, got {error}; convert it before"
        ) from error
    return text.encode() + b"\n"


@contextlib.contextmanager
def _opened(path: Path, suffix: str) -> Iterator[BinaryIO]:
    with path.open("wb") as file:
        if suffix == ".gz":
            with gzip.GzipFile("", "wb", fileobj=file, mtime=0) as stream:
                yield stream  # type: ignore[misc]
        elif suffix == ".zst":
            import zstandard

            with zstandard.ZstdCompressor().stream_writer(file, closefd=False) as stream:
                yield stream
        else:
            yield file
