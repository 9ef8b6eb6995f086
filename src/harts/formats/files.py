"""Files to rows, one at a time: JSON Lines, plain, gzip or Zstandard, Parquet, archives of inspect_ai.

The first bytes decide which, not the name.
"""

import gzip
import sys
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from io import BufferedReader, RawIOBase
from os import PathLike
from pathlib import Path
from typing import Any, BinaryIO, cast

from harts.formats.inspect_ai import archive_rows
from harts.formats.json_rows import json_rows
from harts.formats.places import ENDINGS, STDIN, ending_of, files_at
from harts.formats.rows import Row

__all__ = ["Source", "parts_of"]

Source = str | PathLike[str] | Iterable[Any]
"""A path, several paths (each a file, "-" for stdin, a pattern or a directory), or an iterable of
mappings (rows in memory)."""

_GZIP, _ZSTD, _PARQUET, _ZIP = b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"PAR1", b"PK\x03\x04"
_CHUNK = 1 << 20


def parts_of(source: Source) -> Iterator[Iterator[Row]]:
    """The parts of a source, each an iterator over its rows: one part a file, one for rows in memory.

    Raises:
        ValueError: no such file, an unknown ending, an empty, truncated or broken file (with the line), a row that is
            no object, a name twice in one object, NaN or Infinity anywhere in a row.
    """
    items = iter([source] if isinstance(source, str | PathLike | Mapping) else source)
    number = 0

    def rows(name: str, placed: Iterator[tuple[str, Any]]) -> Iterator[Row]:
        nonlocal number
        start = number
        for place, fields in placed:
            yield Row(_mapping(place, fields), place, number)
            number += 1
        if number == start:
            raise ValueError(f"{name}: expected at least one row, got none; is this the right file?")

    empty = True
    for item in items:
        empty = False
        if isinstance(item, str | PathLike):
            for path in files_at(item):
                yield rows(str(path), _file_rows(path))
        else:
            yield rows("source", _memory_rows(item, items))
    if empty:
        raise ValueError("source: expected a path or at least one row, got an empty sequence; is it used up?")


def _memory_rows(first: Any, rest: Iterator[Any]) -> Iterator[tuple[str, Any]]:
    yield "row 1", first
    for index, fields in enumerate(rest, 2):
        yield f"row {index}", fields


def _mapping(place: str, fields: Any) -> Mapping[str, Any]:
    if isinstance(fields, Mapping):
        return cast(Mapping[str, Any], fields)
    if hasattr(fields, "prompt_token_ids") and hasattr(fields, "outputs"):  # vLLM's RequestOutput itself
        return cast(Mapping[str, Any], vars(fields))
    raise ValueError(f"{place}: expected an object with named fields, got {type(fields).__name__}; see docs/data.md")


def _file_rows(path: Path) -> Iterator[tuple[str, Any]]:
    with nullcontext(sys.stdin.buffer) if str(path) == STDIN else path.open("rb") as opened:
        file = opened if isinstance(opened, BufferedReader) else BufferedReader(cast(RawIOBase, opened))
        magic = file.peek(4)[:4]
        if not magic:
            raise ValueError(f"{path}: expected at least one row, got an empty file; is this the right file?")
        if magic in (_PARQUET, _ZIP):
            if str(path) == STDIN:
                got = "Parquet" if magic == _PARQUET else "an archive"
                raise ValueError(f"{path}: expected JSON Lines, got {got}; give its path, it cannot be piped")
            yield from _parquet_rows(path) if magic == _PARQUET else archive_rows(path)
            return
        ending = "" if str(path) == STDIN else ending_of(path)
        if ending == ".parquet":
            raise ValueError(f"{path}: expected Parquet, got no 'PAR1' at its start; write or fetch the file again")
        if ending not in ENDINGS:
            expected = "JSON Lines (.jsonl, .ndjson or .json, with .gz or .zst if compressed) or .parquet"
            raise ValueError(f"{path}: expected {expected}, got {ending}; convert it or rename it")
        yield from json_rows(path, _chunks(path, file, magic))


# -- Compressed files -------------------------------------------------------------------------------------------------


def _chunks(path: Path, file: BinaryIO, magic: bytes) -> Iterator[bytes]:
    if magic.startswith(_GZIP):
        return _gunzip(path, file)
    if magic == _ZSTD:
        return _unzstd(path, file)
    return iter(lambda: file.read(_CHUNK), b"")


def _gunzip(path: Path, file: BinaryIO) -> Iterator[bytes]:
    try:
        with gzip.open(file) as stream:
            while chunk := stream.read(_CHUNK):
                yield chunk
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"{path}: the gzip stream is truncated or damaged ({error}); fetch the file again") from error


def _unzstd(path: Path, file: BinaryIO) -> Iterator[bytes]:
    import zstandard

    decompressor = zstandard.ZstdDecompressor()
    frame = decompressor.decompressobj()
    fed = False
    try:
        while chunk := file.read(_CHUNK):
            while chunk:
                yield frame.decompress(chunk)
                fed, chunk = not frame.eof, frame.unused_data
                if frame.eof:
                    frame = decompressor.decompressobj()
    except zstandard.ZstdError as error:
        raise ValueError(f"{path}: the Zstandard stream is damaged ({error}); fetch the file again") from error
    if fed:  # a frame began and did not end: zstandard itself says nothing here
        raise ValueError(f"{path}: the Zstandard stream is truncated; fetch the file again")


# -- Parquet ----------------------------------------------------------------------------------------------------------


def _parquet_rows(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        from pyarrow import ArrowInvalid, parquet
    except ImportError as error:
        raise ValueError(f"{path}: Parquet needs pyarrow; pip install 'harts[parquet]'") from error
    try:
        number = 0
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=64):
                names = batch.schema.names
                for index in range(batch.num_rows):
                    number += 1
                    cells = (_cell(column[index]) for column in batch.columns)
                    yield f"{path}, row {number}", {k: v for k, v in zip(names, cells, strict=True) if v is not None}
    except (ArrowInvalid, OSError) as error:
        raise ValueError(f"{path}: broken Parquet ({error}); write or fetch the file again") from error


def _cell(scalar: Any) -> Any:
    """A cell as Python: flat number lists as numpy arrays; a null member of a struct is an absent one."""
    values = getattr(scalar, "values", None)
    if values is not None and hasattr(values, "null_count") and not values.null_count:
        array = values.to_numpy(zero_copy_only=False)
        if array.dtype.kind in "iufb":
            return array
    return _without_nulls(scalar.as_py())


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list) and value and isinstance(value[0], dict | list):
        return [_without_nulls(item) for item in value]
    return value
