"""The doctor on the real data: published sizes, the differences that are known to be there, and time."""

import functools
import time
from pathlib import Path

import pytest

from harts.explain import Report, explain
from harts.formats import read
from harts.formats.decoding import decoder_for

# From the statistics beside the data: tokens of one row a call, ratio with equal calls once, unique tokens.
PUBLISHED = {
    "taubench-airline": (13_912_467, 18.88, 735_376),
    "mint": (21_306_176, 6.05, 3_520_323),
    "toolbench-dfsdt": (1_332_016, 10.36, 63_084),
    "pi-sessions": (45_901_383, 106.95, 429_202),
    "sweagent-demos": (1_250_267, 7.27, 171_737),
    "openhands-mswe": (1_701_801, 22.56, 75_444),
    "atropos-rubiks": (52_945, 3.93, 8_402),
    "lats-webshop": (112_672, 5.99, 13_969),
    "reflexion-react": (473_413, 2.15, 79_178),
}
DUPLICATES = {"atropos-rubiks": 8, "lats-webshop": 31, "mint": 24, "reflexion-react": 224}
_SECONDS = 30


@functools.cache
def _report(data_dir: Path, name: str) -> Report:
    path = data_dir / f"{name}.jsonl.gz"
    trajectories = read(path, fmt="chat")
    decoder = decoder_for(path, fmt="chat")
    start = time.process_time()
    report = explain(trajectories, decoder=decoder)
    assert time.process_time() - start < _SECONDS
    assert report.sizes.tree - report.tree_mended == sum(miss.rows for miss in report.misses)
    return report


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_sizes_and_duplicates(data_dir: Path, name: str) -> None:
    report = _report(data_dir, name)
    per_call, ratio, unique = PUBLISHED[name]
    sizes = report.sizes_by_group
    assert (sizes.per_call, sizes.tree) == (per_call, unique)
    assert round(sizes.per_distinct_call / sizes.tree, 2) == ratio
    assert report.num_duplicates == DUPLICATES.get(name, 0)
    if name == "reflexion-react":  # answers of the environment to the same questions: all partings are sampled
        assert report.misses == ()


def test_the_bundled_tree_search() -> None:
    """Needs no other data: the file lies beside the examples."""
    report = _report(Path(__file__).parents[2] / "examples" / "data", "lats-webshop")
    assert report.num_duplicates == 31
    assert (report.sizes.calls, report.sizes.distinct_calls) == (96, 65)
    assert (report.sizes.per_call, report.sizes.prefix, report.sizes.tree) == (112_672, 83_693, 11_859)
    assert report.sizes_by_group.tree == 13_969
    assert report.tree_mended == 6_441


def test_one_character_of_the_system_prompt(data_dir: Path) -> None:
    report = _report(data_dir, "sweagent-demos")
    (miss,) = (one for one in report.misses if one.example.depth == 16 and one.kind == "one character")
    assert miss.example.before is not None
    assert miss.example.before.endswith("top CTF player")
    assert {miss.example.text_a, miss.example.text_b} == {".\n", ". \n"}
    assert len(miss.groups) == 9
    assert miss.rows > 100


def test_kept_turns_behind_a_summary(data_dir: Path) -> None:
    report = _report(data_dir, "pi-sessions")
    assert set(report.lost_by_kind) == {"summarised history"}
    assert report.lost_by_kind["summarised history"] > 35_000


def test_a_newline_lost_between_sampling_and_context(data_dir: Path) -> None:
    report = _report(data_dir, "atropos-rubiks")
    rewritten = [miss for miss in report.misses if miss.kind == "rewritten response"]
    assert len(rewritten) == 2
    assert all(
        (miss.example.text_a or "").replace("\n", "") == (miss.example.text_b or "").replace("\n", "")
        for miss in rewritten
    )
