"""The HTML page: nothing from data can become markup, nothing is loaded, the same input gives the same page."""

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harts.explain import explain
from harts.formats import from_lists, read
from harts.formats.decoding import QwenDecoder
from harts.plan import make_plan
from harts.testing.workloads import workload
from harts.trajectory import Trajectory
from harts.tree import PrefixTree
from harts.viz import render_page, write_page
from harts.viz.page import _LEAST_TEXT, _TEXT_BUDGET

EVIL = [
    "</script><script>window.hacked = 1</script>",
    "<!--<script>",
    "]]><img src=x onerror=alert(1)>",
    "{{data}} {{script}}",
    "\u2028\u2029\x00\ud83d\ude00 &amp; \"quotes\" 'single' \\u003c",
]


def _page(tree: PrefixTree, *, title: str = "test", decoder: Any = None, replicas: int = 2) -> str:
    longest = max(map(len, tree.trajectories))
    plan = make_plan(tree, token_budget=2 * longest, num_replicas=replicas)
    return render_page(tree, plan, title=title, decoder=decoder)


class _Elements(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: dict[str, list[str]] = {}
        self._open = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._open = dict(attrs).get("id") or tag

    def handle_data(self, data: str) -> None:
        self.text.setdefault(self._open, []).append(data)


def _parse(page: str) -> tuple[_Elements, dict[str, Any]]:
    elements = _Elements()
    elements.feed(page)
    return elements, json.loads("".join(elements.text["data"]))


@pytest.fixture
def evil_tree() -> PrefixTree:
    rows = [
        {
            "group": evil,
            "id": f"{evil} {at}",
            "messages": [{"role": "user", "content": evil}, {"role": "assistant", "content": f"{evil} {at}"}],
        }
        for evil in EVIL
        for at in range(2)
    ]
    return PrefixTree.build(read(rows))


def test_untrusted_text_stays_text(evil_tree: PrefixTree) -> None:
    harmless = PrefixTree.build(from_lists([[1, 2, 3]], [[0, 1, 1]], id=["a"]))
    page = _page(evil_tree, title=EVIL[0] + EVIL[3], decoder=QwenDecoder())
    elements, data = _parse(page)
    expected, _ = _parse(_page(harmless))
    policy = next(attrs for tag, attrs in elements.tags if "http-equiv" in attrs)
    assert policy == next(attrs for tag, attrs in expected.tags if "http-equiv" in attrs)
    assert elements.tags == expected.tags
    assert data["title"] == EVIL[0] + EVIL[3]
    assert data["trajectories"]["id"] == [each.id for each in evil_tree.trajectories]
    texts = "".join(text if isinstance(text, str) else "" for text in data["segments"]["text"])
    assert "</script><script>window.hacked = 1" in texts
    assert page.count("</script>") == 2
    assert "{{" not in page.replace("{{data}} {{script}}", "")


def test_nothing_is_loaded_and_hashes_fit(evil_tree: PrefixTree) -> None:
    page = _page(evil_tree, decoder=QwenDecoder())
    policy = re.search(r'content="(default-src[^"]*)"', page)
    assert policy is not None
    for tag in ("script", "style"):
        (inner,) = re.findall(rf"<{tag}>(.*?)</{tag}>", page, flags=re.DOTALL)
        assert f"'sha256-{base64.b64encode(hashlib.sha256(inner.encode()).digest()).decode()}'" in policy[1]
        assert not re.search(r"https?://|//cdn|@import|url\(|fetch\(|XMLHttp|innerHTML|insertAdjacent|eval\(", inner)
    assert "default-src 'none'" in policy[1]
    elements, _ = _parse(page)
    assert not any(
        {"src", "href", "action"} & attrs.keys() or any(name.startswith("on") for name in attrs)
        for _, attrs in elements.tags
    )


def test_the_data_is_the_trees_and_the_plans() -> None:
    trajectories = workload("search", scale=0.05, depth=4)
    tree = PrefixTree.build(trajectories)
    _, data = _parse(_page(tree))
    assert data["segments"]["parent"] == tree.parent_S.tolist()
    assert sum(data["segments"]["length"]) == data["sizes"]["tree"] == tree.num_rows
    assert sum(data["segments"]["trained"]) == int(tree.trained_T.sum()) == sum(data["trained"][1::2])
    flags = np.zeros(tree.num_rows, np.bool_)
    for start, length in zip(data["trained"][::2], data["trained"][1::2], strict=True):
        flags[start : start + length] = True
    assert np.array_equal(flags, tree.trained_T)
    assert data["trajectories"]["valueName"] == "advantage"
    assert data["trajectories"]["end"] == tree.end_segment_B.tolist()
    members = sorted(index for slot in data["plan"]["slots"] for one in slot for index in one[4])
    assert members == list(range(len(trajectories)))
    assert sum(one[0] for slot in data["plan"]["slots"] for one in slot) == tree.num_rows
    assert not data["decoded"]


def test_rewards_stand_in_for_advantages_and_may_be_absent(tau_file: Path) -> None:
    tau = PrefixTree.build(read(tau_file, limit=4))
    _, data = _parse(_page(tau, decoder=QwenDecoder()))
    assert data["trajectories"]["valueName"] == "reward"
    assert data["trajectories"]["value"] == [each.reward for each in tau.trajectories]
    joined = "".join(text for text in data["segments"]["text"] if isinstance(text, str))
    assert "Airline Agent Policy" in joined
    _, bare = _parse(_page(PrefixTree.build(from_lists([[1, 2]], [[0, 1]], id=["a"]))))
    assert (bare["trajectories"]["value"], bare["segments"]["text"]) == (None, ["1 2"])


def test_the_three_sizes_are_the_doctors(tau_file: Path) -> None:
    untrained = Trajectory(token_ids=np.arange(9, dtype=np.int32), loss_mask=np.zeros(9, np.bool_), id="untrained")
    batch = [*read(tau_file, rows="turn", limit=30), untrained]
    _, data = _parse(_page(PrefixTree.build(batch)))
    sizes = explain(batch).sizes
    assert data["sizes"] == {"calls": sizes.per_call, "prefix": sizes.prefix, "tree": sizes.tree}
    assert sizes.per_call > sizes.prefix > sizes.tree


def test_long_text_keeps_its_ends_and_says_what_is_missing() -> None:
    ids = [list(range(at, at + 5_000)) for at in range(3)]
    tree = PrefixTree.build(from_lists(ids, [[0] * 4_999 + [1]] * 3, id=["a", "b", "c"]))
    _, data = _parse(_page(tree))
    shown, left_out, end = data["segments"]["text"][0]
    assert (len(shown.split()), left_out, end) == (200, 4_800, "")

    class Wordy(QwenDecoder):
        def piece(self, token_id: int) -> bytes:
            return b"a character " * 200

    _, data = _parse(_page(tree, decoder=Wordy()))
    start, left_out, end = data["segments"]["text"][0]
    assert len(start) + left_out + len(end) == 5_000 * 2_400
    assert len(start) + len(end) >= _LEAST_TEXT
    assert sum(len(text[0]) + len(text[2]) for text in data["segments"]["text"]) <= _TEXT_BUDGET


def test_the_same_page_again_and_a_plan_of_other_data_refused(tmp_path: Path) -> None:
    tree = PrefixTree.build(workload("star3", scale=0.01))
    page = _page(tree)
    assert page == _page(PrefixTree.build(workload("star3", scale=0.01)))
    write_page(tmp_path / "page.html", page)
    assert (tmp_path / "page.html").read_text(encoding="utf-8") == page
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]
    other = PrefixTree.build(workload("star3", scale=0.01, seed=1))
    with pytest.raises(ValueError, match="plan this data again"):
        render_page(other, make_plan(tree, token_budget=500), title="x")
