"""JSON to rows, with line numbers in every error: one object a line, or one document (an array, an indented object)."""

import codecs
import json
import math
import re
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from harts.formats.rows import Row

__all__ = ["json_rows"]

_BOMS = ((codecs.BOM_UTF8, "utf-8"), (codecs.BOM_UTF16_LE, "utf-16-le"), (codecs.BOM_UTF16_BE, "utf-16-be"))
_SURROGATE = re.compile("[\ud800-\udfff]")


def json_rows(path: Path, chunks: Iterator[bytes]) -> Iterator[tuple[str, Any]]:
    """Places and values: of each line, or of each element of a file that is one array.

    Args:
        chunks: the file's bytes, in UTF-8 or, with a byte-order mark, UTF-16.

    Raises:
        ValueError: broken JSON or text, a name twice in one object, NaN or Infinity, half a surrogate pair; with the
            line (in an array, the element).
    """
    lines = _lines(_utf8(path, chunks))
    first = True
    for number, (line, complete) in enumerate(lines, 1):
        if not line.strip():
            continue
        if first and (line.lstrip()[:1] == b"[" or line.strip() == b"{"):  # no row begins so: one document
            rest = (b"\n" + more for more, _ in lines)
            yield from _document(path, number, b"".join(chain([line], rest)))
            return
        first = False
        place = f"{path}, line {number}"
        yield place, _loads(place, line, "one object a line is needed" if complete else _CUT)


_CUT = "the file ends within this line: was it cut off? Fetch it again, or remove the line"


def _document(path: Path, first: int, text: bytes) -> Iterator[tuple[str, Any]]:
    value = _loads(f"{path}, line {first}", text, "the whole file is read as one array or object")
    if isinstance(value, list):
        for index, element in enumerate(value, 1):
            yield f"{path}, element {index}", element
    else:
        yield f"{path}, line {first}", value


def _utf8(path: Path, chunks: Iterator[bytes]) -> Iterator[bytes]:
    """The same text in UTF-8, without a byte-order mark."""
    start = b""
    for chunk in chunks:
        start += chunk
        if len(start) >= 3:
            break
    bom, encoding = next((each for each in _BOMS if start.startswith(each[0])), (b"", "utf-8"))
    pieces = chain([start[len(bom) :]], chunks)
    if encoding == "utf-8":
        if b"\0" in start[:4]:
            raise ValueError(
                f"{path}, line 1: expected UTF-8, or UTF-16 with a byte-order mark, got zero bytes; convert"
            )
        yield from pieces
        return
    decoder = codecs.getincrementaldecoder(encoding)()
    lines = 1
    try:
        for piece in pieces:
            text = decoder.decode(piece)
            lines += text.count("\n")
            yield text.encode()
        decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}, at or after line {lines}: broken UTF-16 ({error}); write the file again") from error


def _lines(chunks: Iterator[bytes]) -> Iterator[tuple[bytes, bool]]:
    """Lines, and whether a line break ends them."""
    rest: list[bytes] = []
    for chunk in chunks:
        *complete, last = chunk.split(b"\n")
        if complete:
            complete[0] = b"".join([*rest, complete[0]])
            for line in complete:
                yield line, True
            rest = []
        rest.append(last)
    yield b"".join(rest), False


def _loads(place: str, line: bytes, hint: str) -> Any:
    odd_numbers: list[str] = []
    repeated: list[str] = []
    try:
        text = line.decode()  # by itself: json.loads lets half a surrogate pair through
        fields = json.loads(
            text, parse_constant=partial(_note, odd_numbers), object_pairs_hook=partial(_object, repeated)
        )
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{place}: broken JSON ({error}); {hint}") from error
    row = Row(fields if isinstance(fields, dict) else {}, place, 0)
    if repeated:
        raise row.error(repeated[0], "each field of an object once", "the same name twice", "remove one of them")
    if odd_numbers:
        field = (_path_to(fields, _is_odd_number) or "").removeprefix(".")
        action = "JSON has no such number: use null, or drop the row"
        raise row.error(field, "finite numbers", odd_numbers[0], action)
    if "\\ud" in text or "\\uD" in text:
        found = _path_to(fields, _has_surrogate)
        if found is not None:
            got = "half a surrogate pair, which is no character"
            raise row.error(found.removeprefix("."), "text", got, "write the character whole, or drop the row")
    return fields


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


def _is_odd_number(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def _has_surrogate(value: Any) -> bool:
    if isinstance(value, dict):
        return any(_SURROGATE.search(name) for name in value)
    return isinstance(value, str) and _SURROGATE.search(value) is not None


def _path_to(value: Any, wanted: Any) -> str | None:
    """Where the first wanted value is, as .messages[0].content."""
    if wanted(value):
        return ""
    items: Iterable[tuple[str, Any]] = ()
    if isinstance(value, dict):
        items = ((f".{key}", item) for key, item in value.items())
    elif isinstance(value, list):
        items = ((f"[{index}]", item) for index, item in enumerate(value))
    for name, item in items:
        inner = _path_to(item, wanted)
        if inner is not None:
            return name + inner
    return None
