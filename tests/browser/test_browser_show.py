"""The page of `harts show` in a real Chromium. `make test-browser` installs it."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from chromium import Chromium, executable

from harts.formats import read
from harts.formats.decoding import QwenDecoder
from harts.plan import make_plan
from harts.testing.trees import AWKWARD
from harts.testing.workloads import workload
from harts.tree import PrefixTree
from harts.viz import render_page, write_page

pytestmark = pytest.mark.skipif(
    executable() is None, reason="no Chromium on this machine: make test-browser installs it"
)

TIMES = "\u00d7"
EVIL = "</script><script>window.hacked = 1</script><img src=x onerror='window.hacked = 2'>"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    started = Chromium(tmp_path_factory.mktemp("chromium"))
    yield started
    started.close()


@pytest.fixture
def opened(browser: Chromium, tmp_path: Path) -> Any:
    def open_page(tree: PrefixTree, *, decoder: Any = None, replicas: int = 2, title: str = "page") -> Chromium:
        longest = max(map(len, tree.trajectories))
        plan = make_plan(tree, token_budget=2 * longest, num_replicas=replicas)
        write_page(tmp_path / "page.html", render_page(tree, plan, title=title, decoder=decoder))
        browser.errors.clear()
        browser.requests.clear()
        browser.mouse("mouseMoved", 1, 1)
        browser.open((tmp_path / "page.html").as_uri())
        browser.wait("window.harts && window.harts.view.lastPaint !== undefined")
        return browser

    return open_page


@pytest.fixture(scope="module")
def tau() -> PrefixTree:
    return PrefixTree.build(read(Path(__file__).parents[2] / "examples" / "data" / "tau-airline.jsonl.gz"))


def _middle(browser: Chromium, segment: int) -> tuple[float, float]:
    """Where on the screen the middle of a segment's bar is."""
    box = browser.run(
        f"(() => {{ const b = harts.view.box({segment}), r = harts.view.canvas.getBoundingClientRect();"
        " return [r.left + b.x + b.w / 2, r.top + b.y + b.h / 2]; })()"
    )
    return box[0], box[1]


def _text(browser: Chromium, id: str) -> str:
    return str(browser.run(f"document.getElementById('{id}').textContent"))


def test_loads_without_errors_or_requests_and_shows_text_on_hover(opened: Any, tau: PrefixTree) -> None:
    browser = opened(tau, decoder=QwenDecoder(), title="tau-airline")
    assert _text(browser, "title") == "tau-airline"
    assert f"{tau.num_rows:,} tokens" in _text(browser, "sizes")
    assert browser.run("document.getElementById('tip').hidden")
    browser.mouse("mouseMoved", *_middle(browser, 0))
    browser.frames()
    tip = _text(browser, "tip")
    assert f"{tau.length_S[0]:,} tokens {TIMES} {tau.num_trajectories}" in tip
    hovered = tip.split("…")[1].replace("▏", "")
    assert hovered[:60] in QwenDecoder().text(tau.token_ids_T[: tau.length_S[0]])
    browser.mouse("mouseMoved", 1, 1)
    browser.frames()
    assert browser.run("document.getElementById('tip').hidden")
    assert browser.errors == []
    assert len(browser.requests) == 1  # the page itself


def test_click_lights_a_path_and_the_panel_has_its_text(opened: Any, tau: PrefixTree) -> None:
    browser = opened(tau, decoder=QwenDecoder())
    leaf = int(tau.end_segment_B[0])
    browser.click(*_middle(browser, leaf))
    browser.frames()
    assert browser.run("harts.view.selected") == leaf
    assert sorted(browser.run("[...harts.view.lit]")) == _path(tau, leaf)
    start, length = int(tau.start_S[leaf]), int(tau.length_S[leaf])
    text = QwenDecoder().text(tau.token_ids_T[start : start + length])
    assert text[:2000] in _text(browser, "panel")
    assert tau.trajectories[0].id in _text(browser, "panel")
    assert browser.errors == []


def test_keyboard_search_zoom_and_colours(opened: Any, tau: PrefixTree) -> None:
    browser = opened(tau, decoder=QwenDecoder())
    browser.key("/", "/")
    assert browser.run("document.activeElement.id") == "find"
    wanted = tau.trajectories[7].id
    browser.call("Input.insertText", text=wanted)
    browser.key("Enter", "\r")
    assert browser.run("harts.view.selected") == int(tau.end_segment_B[7])
    assert wanted in _text(browser, "panel")
    browser.wait("harts.view.view.kx > harts.view.whole.kx * 1.01")
    browser.run("document.getElementById('tree').focus()")
    browser.key("0", "0")
    browser.wait("Math.abs(harts.view.view.kx / harts.view.whole.kx - 1) < 1e-6")
    browser.key("Escape")
    assert browser.run("harts.view.selected") == -1
    browser.key("ArrowRight")
    browser.key("ArrowRight")
    first = int(tau.parent_S.tolist().index(0))
    assert browser.run("harts.view.selected") == first
    browser.key("ArrowLeft")
    assert browser.run("harts.view.selected") == 0
    browser.key("+", "+")
    assert browser.run("harts.view.view.kx > harts.view.whole.kx")
    before = browser.run("harts.view.fill(0).css")
    browser.run("[...document.querySelectorAll('#colour button')].find(b => b.textContent === 'reward').click()")
    assert browser.run("harts.view.colour") == "value"
    assert browser.run("harts.view.fill(0).css") != before
    browser.run("document.getElementById('theme').click()")
    theme = browser.run("document.documentElement.dataset.theme")
    browser.run("document.getElementById('theme').click()")
    assert {theme, browser.run("document.documentElement.dataset.theme")} == {"light", "dark"}
    assert browser.errors == []


def test_a_microbatch_has_its_mask(opened: Any, tau: PrefixTree) -> None:
    browser = opened(tau, decoder=QwenDecoder(), replicas=3)
    plan = make_plan(tau, token_budget=2 * max(map(len, tau.trajectories)), num_replicas=3)
    browser.run("harts.plan.choose(0, 2)")
    browser.frames()
    members = plan.microbatches[0][2].trajectories
    sub = PrefixTree.build([tau.trajectories[index] for index in members])
    assert browser.run("harts.mask.rows") == sub.num_rows
    assert browser.run("harts.mask.pairs") == int((sub.depth_T + 1).sum())
    side = int(browser.run("document.getElementById('mask').width"))
    pixels = browser.run(
        "(() => { const c = document.getElementById('mask').getContext('2d'), n = c.canvas.width;"
        " return [...c.getImageData(0, 0, n, n).data].filter((_, at) => at % 4 === 0); })()"
    )
    empty = pixels[side - 1]  # top right: the first row sees only itself
    share = sum(value != empty for value in pixels) / len(pixels)
    assert share == pytest.approx(float((sub.depth_T + 1).sum()) / sub.num_rows**2, abs=0.02)
    assert f"{sub.num_rows:,} rows" in _text(browser, "maskline")
    browser.run("document.getElementById('plan').focus()")
    browser.key("ArrowUp")
    assert "slot 0, replica 1" in _text(browser, "maskline")
    assert browser.errors == []


def test_untrusted_text_does_not_run(opened: Any) -> None:
    rows = [
        {
            "group": EVIL,
            "id": f"{EVIL}{at}",
            "messages": [{"role": "user", "content": EVIL}, {"role": "assistant", "content": f"{at}{EVIL}"}],
        }
        for at in range(3)
    ]
    tree = PrefixTree.build(read(rows))
    browser = opened(tree, decoder=QwenDecoder(), title=EVIL)
    browser.mouse("mouseMoved", *_middle(browser, 1))
    browser.click(*_middle(browser, 1))
    browser.frames()
    assert EVIL in _text(browser, "panel")
    assert _text(browser, "title") == EVIL
    assert browser.run("window.hacked") is None
    assert browser.run("document.images.length") == 0
    assert browser.errors == []
    assert len(browser.requests) == 1


def test_3000_segments_respond(opened: Any) -> None:
    """Counted in frames and in bars drawn; the one bound in time is wide, for machines that others use too."""
    trajectories = [
        trajectory for seed in range(4) for trajectory in workload("thin", rows=512, seed=seed, vocab_size=30_000)
    ]
    named = [
        type(one)(token_ids=one.token_ids, loss_mask=one.loss_mask, group=one.group, id=f"{at}/{one.id}")
        for at, one in enumerate(trajectories)
    ]
    tree = PrefixTree.build(named)
    assert tree.num_segments >= 3_000
    browser = opened(tree)
    spot = browser.run(
        "(() => { const r = harts.view.canvas.getBoundingClientRect();"
        " return [r.left + r.width / 4, r.top + r.height / 2]; })()"
    )
    for delta in (-300, -300, -300, 200, -400):
        browser.mouse("mouseWheel", *spot, deltaX=0, deltaY=delta)
        before = browser.run("harts.view.view.ky")
        browser.frames()
        assert browser.run("harts.view.frame") == 0, "not drawn within two frames"
        assert before == browser.run("harts.view.view.ky")
    zoomed = browser.run("harts.view.drawn")
    assert 0 < zoomed < tree.num_segments / 2, "what cannot be seen is drawn all the same"
    browser.mouse("mouseMoved", spot[0] + 3, spot[1])
    browser.frames()
    hovered = browser.run("harts.view.hover")
    assert hovered >= 0
    assert f"{tree.length_S[hovered]:,} tokens {TIMES} {tree.multiplicity_S[hovered]}" in _text(browser, "tip")
    browser.run("document.getElementById('fit').click()")
    browser.wait("Math.abs(harts.view.view.ky / harts.view.whole.ky - 1) < 1e-6")
    browser.frames()
    assert browser.run("harts.view.drawn") == tree.num_segments
    paints = browser.run(
        "(() => { const t = []; for (let i = 0; i < 9; i++) { harts.view.paint(); t.push(harts.view.lastPaint); }"
        " return t; })()"
    )
    assert sorted(paints)[4] < 250, f"all {tree.num_segments} segments take {json.dumps(paints)} ms"
    assert browser.errors == []


@pytest.mark.parametrize("name", ["single token", "duplicates", "caterpillar", "prefix of another", "forest"])
def test_awkward_trees_are_drawn(opened: Any, name: str) -> None:
    tree = PrefixTree.build(AWKWARD[name])
    browser = opened(tree, replicas=3)
    assert browser.run("harts.view.drawn") == tree.num_segments
    for segment in {0, tree.num_segments - 1}:
        browser.run(f"harts.choose({segment}); harts.view.show({segment})")
        browser.frames(3)
    assert browser.errors == []


def _path(tree: PrefixTree, segment: int) -> list[int]:
    """Segments from the root down to and including one."""
    path = [segment]
    while tree.parent_S[path[0]] >= 0:
        path.insert(0, int(tree.parent_S[path[0]]))
    return path
