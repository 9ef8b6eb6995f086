"""Files to rows, one at a time: JSON Lines, plain, gzip or Zstandard, told apart by their first bytes, and Parquet."""

import gzip
import json
import math
import zlib
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, BinaryIO, cast

from harts.formats.rows import Row

__all__ = ["Source", "parts_of"]

Source = str | PathLike[str] | Iterable[Any]
"""A path, several paths, or an iterable of mappings (rows in memory)."""

_GZIP, _ZSTD, _PARQUET = b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"PAR1"
_ENDINGS = ("", ".jsonl", ".ndjson", ".json")
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
            raise ValueError(f"{name}: expected at least one row, came none; is this the right file?")

    empty = True
    for item in items:
        empty = False
        if isinstance(item, str | PathLike):
            yield rows(str(item), _file_rows(Path(item)))
        else:
            yield rows("source", _memory_rows(item, items))
    if empty:
        raise ValueError("source: expected a path or at least one row, came an empty sequence; is it used up?")


def _memory_rows(first: Any, rest: Iterator[Any]) -> Iterator[tuple[str, Any]]:
    yield "row 1", first
    for index, fields in enumerate(rest, 2):
        yield f"row {index}", fields


def _mapping(place: str, fields: Any) -> Mapping[str, Any]:
    if isinstance(fields, Mapping):
        return cast(Mapping[str, Any], fields)
    if hasattr(fields, "prompt_token_ids") and hasattr(fields, "outputs"):  # vLLM's RequestOutput itself
        return cast(Mapping[str, Any], vars(fields))
    raise ValueError(f"{place}: expected an object with named fields, came {type(fields).__name__}; see docs/data.md")


def _file_rows(path: Path) -> Iterator[tuple[str, Any]]:
    if not path.exists():
        raise ValueError(f"{path}: no such file; check the path")
    if path.is_dir():
        raise ValueError(f"{path}: expected a file, came a directory; pass the files in it")
    with path.open("rb") as file:
        magic = file.read(4)
        file.seek(0)
        if not magic:
            raise ValueError(f"{path}: expected at least one row, came an empty file; is this the right file?")
        if magic == _PARQUET:
            yield from _parquet_rows(path)
            return
        ending = Path(path.name.lower().removesuffix(".gz").removesuffix(".zst")).suffix
        if ending == ".parquet":
            raise ValueError(f"{path}: expected Parquet, came no 'PAR1' at its start; write or fetch the file again")
        if ending not in _ENDINGS:
            expected = "JSON Lines (.jsonl, .ndjson or .json, with .gz or .zst if compressed) or .parquet"
            raise ValueError(f"{path}: expected {expected}, came {ending}; convert it or rename it")
        yield from _json_rows(path, _lines(path, file, magic))


# -- JSON Lines -------------------------------------------------------------------------------------------------------


def _lines(path: Path, file: BinaryIO, magic: bytes) -> Iterator[bytes]:
    if magic.startswith(_GZIP):
        chunks: Iterator[bytes] = _gunzip(path, file)
    elif magic == _ZSTD:
        chunks = _unzstd(path, file)
    else:
        chunks = iter(lambda: file.read(_CHUNK), b"")
    rest: list[bytes] = []
    for chunk in chunks:
        *complete, last = chunk.split(b"\n")
        if complete:
            complete[0] = b"".join([*rest, complete[0]])
            yield from complete
            rest = []
        rest.append(last)
    yield b"".join(rest)


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


def _json_rows(path: Path, lines: Iterator[bytes]) -> Iterator[tuple[str, Any]]:
    for number, line in enumerate(lines, 1):
        place = f"{path}, line {number}"
        if number == 1:
            line = line.removeprefix(b"\xef\xbb\xbf")
        if not line.strip():
            continue
        odd_numbers: list[str] = []
        repeated: list[str] = []
        try:
            fields = json.loads(
                line, parse_constant=partial(_note, odd_numbers), object_pairs_hook=partial(_object, repeated)
            )
        except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
            hint = "one object a line is needed" if line.lstrip()[:1] != b"[" else "make the array one object a line"
            raise ValueError(f"{place}: broken JSON ({error}); {hint}") from error
        if repeated:
            row = Row(fields if isinstance(fields, dict) else {}, place, 0)
            raise row.error(repeated[0], "each field of an object once", "the same name twice", "remove one of them")
        if odd_numbers:
            _refuse_odd_number(place, fields, odd_numbers[0])
        yield place, fields


def _object(repeated: list[str], pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON; the standard library would keep the last of two values of one name."""
    fields = dict(pairs)
    if len(fields) < len(pairs):
        names = [name for name, _ in pairs]
        repeated.append(next(name for name in names if names.count(name) > 1))
    return fields


def _note(seen: list[str], name: str) -> float:
    seen.append(name)
    return float(name)


def _refuse_odd_number(place: str, fields: Any, name: str) -> None:
    field = (_path_of_odd_number(fields) or "").removeprefix(".")
    row = fields if isinstance(fields, dict) else {}
    raise Row(row, place, 0).error(field, "finite numbers", name, "JSON has no such number: use null, or drop the row")


def _path_of_odd_number(value: Any) -> str | None:
    if isinstance(value, float):
        return None if math.isfinite(value) else ""
    items: Iterable[tuple[str, Any]] = ()
    if isinstance(value, dict):
        items = ((f".{key}", item) for key, item in value.items())
    elif isinstance(value, list):
        items = ((f"[{index}]", item) for index, item in enumerate(value))
    for name, item in items:
        inner = _path_of_odd_number(item)
        if inner is not None:
            return name + inner
    return None


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
