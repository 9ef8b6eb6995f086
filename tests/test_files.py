"""Files appear whole or not at all, and errors name the file that was asked for."""

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from harts.cost import CostModel
from harts.files import replacing, write_text
from harts.formats import write
from harts.plan import Plan, make_plan
from harts.testing.trees import AWKWARD
from harts.tree import PrefixTree
from harts.viz.page import write_page

TREE = PrefixTree.build(AWKWARD["comb"])
WRITERS: dict[str, Callable[[Path], None]] = {
    "plan.json": lambda path: make_plan(TREE, token_budget=900).save(path),
    "cost.json": lambda path: CostModel.of_rows().save(path),
    "page.html": lambda path: write_page(path, "<p>é</p>"),
    "rows.jsonl": lambda path: write(path, AWKWARD["comb"]),
}


@pytest.mark.parametrize("name", WRITERS)
def test_a_failed_write_leaves_the_old_file_and_no_other(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / name
    path.write_text("old")

    def full(self: Path, target: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self), None, str(target))

    with monkeypatch.context() as broken:
        broken.setattr(Path, "replace", full)
        broken.setattr(os, "replace", full)
        with pytest.raises(OSError, match="No space left on device") as caught:
            WRITERS[name](path)
    assert caught.value.filename == str(path)
    assert "tmp" not in str(caught.value).replace(str(tmp_path), "")
    assert path.read_text() == "old"
    assert [file.name for file in tmp_path.iterdir()] == [name]
    WRITERS[name](path)
    assert path.read_text() != "old"
    assert [file.name for file in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize("name", WRITERS)
def test_a_folder_that_is_not_there_is_named(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"no/{name}: expected a file in a folder that exists, got no folder .*/no;"):
        WRITERS[name](tmp_path / "no" / name)
    (tmp_path / name).mkdir()
    with pytest.raises(ValueError, match=f"{name}: expected the name of a file, got a folder"):
        WRITERS[name](tmp_path / name)


def test_a_name_too_long_is_an_error_about_that_name(tmp_path: Path) -> None:
    path = tmp_path / ("x" * 250)  # with the ending of a temporary name it is too long
    with pytest.raises(OSError, match="name too long") as caught:
        write_text(path, "text")
    assert caught.value.filename == str(path)


def test_what_the_writer_raises_comes_through(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="must be str"), replacing(tmp_path / "a") as temporary:
        temporary.open("w").write(3)  # type: ignore[arg-type]
    with pytest.raises(FileNotFoundError, match="other"), replacing(tmp_path / "a"):
        (tmp_path / "other").read_text()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("load", "command"), [(CostModel.load, "harts calibrate"), (Plan.load, "harts plan -o")])
def test_files_that_cannot_be_read_are_named(load: Callable[[Path], object], command: str, tmp_path: Path) -> None:
    for content, got in ((None, "got no such file"), ("{", "expected JSON"), (json.dumps({"format": "x"}), "format")):
        path = tmp_path / "it.json"
        if content is not None:
            path.write_text(content)
        with pytest.raises(ValueError, match=rf"it\.json: .*{got}.*; write one with {command}"):
            load(path)
    with pytest.raises(ValueError, match="got a folder"):
        load(tmp_path)


def test_a_cost_model_of_another_model_names_its_file(tmp_path: Path) -> None:
    path = tmp_path / "cost.json"
    CostModel(time=CostModel.of_rows().time, unit="rows", model="one").save(path)
    with pytest.raises(ValueError, match=r"cost\.json: cost model: expected one of two, got one of one"):
        CostModel.load(path, model="two")


def test_temporary_files_of_killed_processes_go_with_the_next_write(tmp_path: Path) -> None:
    killed = subprocess.Popen(
        [sys.executable, "-c", _WRITES_FOR_EVER, str(tmp_path / "a.txt")], stdout=subprocess.PIPE, text=True
    )
    assert killed.stdout is not None
    assert killed.stdout.readline() == "writing\n"
    (left,) = tmp_path.iterdir()
    write_text(tmp_path / "a.txt", "while it runs")
    assert left.exists()
    killed.kill()
    killed.communicate()
    write_text(tmp_path / "b.txt", "another file's")
    assert left.exists()
    write_text(tmp_path / "a.txt", "new")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a.txt", "b.txt"]


_WRITES_FOR_EVER = """
import sys, time
from harts.files import replacing
with replacing(sys.argv[1]) as temporary:
    temporary.write_text("half")
    print("writing", flush=True)
    time.sleep(600)
"""
