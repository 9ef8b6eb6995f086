"""docs/planning.md says what the kept results say, and gives commands for files that everybody has."""

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_the_speed_table_is_that_of_the_results() -> None:
    lines = (ROOT / "benchmarks" / "results" / "plan_speed.jsonl").read_text().splitlines()
    results = [json.loads(line) for line in lines]
    expected = [f"| {one['rows']:,} | {one['trajectories']:,} | {one['best_cpu_s']:.2f} |" for one in results]
    page = (ROOT / "docs" / "planning.md").read_text()
    table = page.partition("**Speed.**")[2].partition("| --- | --- | --- |\n")[2].partition("\n\n")[0]
    assert table.splitlines() == expected


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("*.md")), ids=lambda page: page.name)
def test_commands_name_files_that_are_here(page: Path) -> None:
    text = page.read_text()
    assert "shared/data" not in text
    for name in re.findall(r"examples/data/[\w.-]*\w", text):
        assert (ROOT / name).exists(), name
