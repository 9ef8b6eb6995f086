"""The README's table of families is what its script makes of the kept results, and these say what families are now."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from harts.models import PRESETS
from harts.models.describe import family_facts
from harts.models.tiny import tiny_config

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("families_script", ROOT / "benchmarks" / "families.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.pop(0)
    return module


def test_the_readme_has_the_table_of_the_kept_results(script: ModuleType) -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    expected = script.readme_with(script.table(script.read()))
    assert text == expected, "python benchmarks/families.py table"


def test_kept_results_say_of_each_family_what_it_is_now(script: ModuleType) -> None:
    for line in script.read():
        facts = family_facts(tiny_config(line["model"]))
        kept = line["family"]
        now = (facts.model_type, list(facts.mixers), list(facts.kernels), facts.router)
        then = (kept["model_type"], kept["mixers"], kept["kernels"], kept["router"])
        assert now == then, f"python benchmarks/families.py check {line['model']}"
        assert line["ok"] == (line["logprob_max_abs"] < 1e-10 and line["grad_max_rel"] < 1e-8)


def test_every_preset_has_its_own_line_and_none_is_left_out(script: ModuleType) -> None:
    lines = script.read()
    keys = [(line["model"], line["family"]["transformers"]) for line in lines]
    assert len(set(keys)) == len(keys)
    assert {line["model"] for line in lines} <= set(PRESETS)


def test_a_model_that_failed_is_no_part_of_the_table(script: ModuleType) -> None:
    lines = script.read()
    changed = [{**line, "ok": line["model"] != "tiny-glm4"} for line in lines]
    assert "`glm4`" in script.table(lines)
    assert "`glm4`" not in script.table(changed)
    newer = [{**line, "family": {**line["family"], "transformers": "9.8.7"}} for line in lines]
    assert "9.8.7" in script.table([*lines, *newer])
