"""The tables of docs/performance.md are those of the kept results."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("performance_tables", ROOT / "benchmarks" / "performance_tables.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_table_is_that_of_the_lines(script: ModuleType) -> None:
    page = script.PAGE.read_text(encoding="utf-8")
    for name, rows in script.tables().items():
        assert len(rows) >= 5
        assert script.put(page, name, rows) == page, f"table {name}: python benchmarks/performance_tables.py --write"
        assert script.put(page, name, rows[1:]) != page


def test_a_page_without_the_table_is_refused(script: ModuleType) -> None:
    with pytest.raises(ValueError, match="expected one table between markers named cpu"):
        script.put("| a |", "cpu", [])


def test_every_row_names_its_commit(script: ModuleType) -> None:
    for rows in script.tables().values():
        for row in rows:
            commits = row.removesuffix(" |").rpartition(" | ")[2]
            assert all(len(commit.split()[-1]) == 7 for commit in commits.split(", ")), row
