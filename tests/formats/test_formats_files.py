"""Files as people have them: encodings, cut-off lines, arrays, patterns, directories, standard input."""

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import zstandard

from harts.formats import read
from harts.formats.decoding import decoder_for


def row(name: str) -> dict[str, Any]:
    return {"group": "gä", "id": name, "token_ids": [1, 2, 3], "loss_mask": [0, 1, 1]}


LINES = "\n".join(json.dumps(row(name), ensure_ascii=False) for name in "ab")


def ids(source: Any) -> list[str]:
    return [trajectory.id for trajectory in read(source)]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
@pytest.mark.parametrize("newline", ["\n", "\r\n"])
@pytest.mark.parametrize("pack", [bytes, zstandard.compress])
def test_encodings(encoding: str, newline: str, pack: Any, tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(pack(LINES.replace("\n", newline).encode(encoding)))
    one, two = read(path)
    assert (one.id, two.id, two.group) == ("a", "b", "gä")
    path.write_bytes(("\ufeff" + LINES).encode("utf-16-be"))
    assert ids(path) == ["a", "b"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ((LINES[:-20]).encode(), "line 2: broken JSON ("),
        ((LINES[:-20]).encode(), "the file ends within this line"),
        (LINES.encode("utf-16-le"), "line 1: expected UTF-8, or UTF-16 with a byte-order mark"),
        (LINES.encode("utf-16")[:-1], "broken UTF-16"),
        (
            rb'{"id": "z", "messages": [{"role": "user", "content": "\ud800!"}]}',
            "line 1: trajectory 'z', field messages[0]",
        ),
        (b'{"id": "\xed\xa0\x80"}', "line 1: broken JSON"),
        (b'[{"id": "z"}, {"id": NaN}]', "finite numbers"),
    ],
)
def test_what_is_refused_by_its_line(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(content)
    with pytest.raises(ValueError) as caught:
        read(path)
    assert str(path) in str(caught.value)
    assert message in str(caught.value)


def test_whole_surrogate_pairs_are_characters(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(json.dumps({**row("a"), "group": "\U0001f600"}))
    assert "\\ud83d" in path.read_text()
    assert read(path)[0].group == "\U0001f600"


def test_an_array_and_an_indented_object(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    for indent in (None, 2):
        path.write_text(json.dumps([row("a"), row("b")], indent=indent))
        assert ids(path) == ["a", "b"]
    path.write_text(json.dumps(row("a"), indent=2))
    assert ids(path) == ["a"]
    path.write_text("[]")
    with pytest.raises(ValueError, match="expected at least one row, got none"):
        read(path)
    path.write_text(json.dumps([row("a"), {**row("b"), "token_ids": [1]}]))
    with pytest.raises(ValueError, match=r"x\.json, element 2: trajectory 'b'"):
        read(path)


def test_patterns_and_directories(tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    for name in ("b", "a"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row(name)))
    (tmp_path / "below" / "c.jsonl").write_text(json.dumps(row("c")))
    (tmp_path / "notes.txt").write_text("no data")
    assert ids(tmp_path) == ["a", "b"]
    assert ids(str(tmp_path / "*.jsonl")) == ["a", "b"]
    assert ids(str(tmp_path / "**" / "*.jsonl")) == ["a", "b", "c"]
    assert ids([tmp_path / "b.jsonl", tmp_path / "below"]) == ["b", "c"]
    with pytest.raises(ValueError, match="no file matches this pattern"):
        read(str(tmp_path / "*.parquet"))


@pytest.mark.parametrize("pack", [bytes, zstandard.compress])
def test_standard_input(pack: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Stdin:
        buffer = io.BufferedReader(io.BytesIO(pack(LINES.encode())))  # type: ignore[arg-type]

    monkeypatch.setattr(sys, "stdin", Stdin)
    assert ids("-") == ["a", "b"]
    assert decoder_for(["-"]) is None
    with pytest.raises(ValueError, match="-: expected at least one row, got an empty file"):
        read("-")
