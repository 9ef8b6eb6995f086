"""One HTML page that shows a tree, its plan and an attention mask; nothing in it is loaded from elsewhere.

Everything that comes from data is JSON in a script element of its own, with `<`, `>` and `&` escaped, and reaches the
page as text nodes and canvas text only. A content security policy with hashes lets no other script run.
"""

import base64
import hashlib
import html
import json
import os
from importlib import resources
from typing import Any

import numpy as np
from numpy.typing import NDArray

from harts.explain.report import sizes_of
from harts.files import write_text
from harts.formats.decoding import Decoder
from harts.plan import Plan
from harts.tree import PrefixTree

__all__ = ["render_page", "write_page"]

_SCRIPTS = ("colours.js", "model.js", "tree.js", "plan.js", "mask.js", "main.js")
_TEXT_BUDGET = 4_000_000
"""Characters of text in a page, about; longer segments keep their start and end."""
_LEAST_TEXT = 400
_IDS_SHOWN = 200


def render_page(tree: PrefixTree, plan: Plan, *, title: str, decoder: Decoder | None = None) -> str:
    """The page as text.

    Args:
        tree: what to draw.
        plan: a plan of the same tree.
        title: what the data is called.
        decoder: makes the text of segments; None shows token ids.

    Raises:
        ValueError: the plan is of another tree.
    """
    plan.check_tree(tree)
    script = "\n".join(_asset(name) for name in _SCRIPTS)
    style = _asset("page.css")
    data = json.dumps(_data(tree, plan, title, decoder), ensure_ascii=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        data = data.replace(character, f"\\u{ord(character):04x}")
    policy = f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; base-uri 'none'"
    parts = {"title": html.escape(title), "policy": policy, "style": style, "script": script, "data": data}
    before, page = "", _asset("page.html")
    while "{{" in page:  # one pass from left to right: what was put in is not looked at again
        start, _, rest = page.partition("{{")
        name, _, page = rest.partition("}}")
        before += start + parts[name]
    return before + page


def write_page(path: str | os.PathLike[str], page: str) -> None:
    """Writes a page under a temporary name and renames it; errors as of `harts.files.replacing`."""
    write_text(path, page)


def _asset(name: str) -> str:
    return resources.files("harts.viz").joinpath(name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _data(tree: PrefixTree, plan: Plan, title: str, decoder: Decoder | None) -> dict[str, Any]:
    trained_T1 = np.append(0, np.cumsum(tree.trained_T))
    stop_S = tree.start_S + tree.length_S
    sizes = sizes_of(tree)
    return {
        "title": title,
        "sizes": {"calls": sizes.per_call, "prefix": sizes.prefix, "tree": sizes.tree},
        "segments": {
            "parent": tree.parent_S.tolist(),
            "length": tree.length_S.tolist(),
            "multiplicity": tree.multiplicity_S.tolist(),
            "trained": (trained_T1[stop_S] - trained_T1[tree.start_S]).tolist(),
            "text": _texts(tree, decoder),
        },
        "trained": _spans(tree.trained_T),
        "trajectories": {
            "id": [each.id for each in tree.trajectories],
            "group": [each.group for each in tree.trajectories],
            "end": tree.end_segment_B.tolist(),
            **_values(tree),
        },
        "plan": {
            "budget": plan.token_budget,
            "replicas": plan.num_replicas,
            "unit": plan.cost_model.unit,
            "makespan": plan.makespan,
            "bound": plan.lower_bound,
            "idle": plan.idle_fraction,
            "speedup": plan.speedup,
            "hints": list(plan.hints),
            "slots": [
                [
                    [one.unique_rows, one.recomputed_rows, one.replayed_rows, one.cost, list(one.trajectories)]
                    for one in slot
                ]
                for slot in plan.microbatches
            ],
        },
        "decoded": decoder is not None,
    }


def _values(tree: PrefixTree) -> dict[str, Any]:
    """What segments can be coloured by: the mean advantage of trained tokens, else the reward, of each trajectory."""
    given = [each.advantages is not None for each in tree.trajectories]
    if any(given):
        values: list[float | None] = []
        for each in tree.trajectories:
            if each.advantages is None:
                values.append(None)
            else:
                taken = each.advantages[each.loss_mask] if each.loss_mask.any() else each.advantages
                values.append(round(float(taken.mean()), 6))
        return {"value": values, "valueName": "advantage"}
    rewards = [each.reward for each in tree.trajectories]
    if any(reward is not None for reward in rewards):
        return {"value": rewards, "valueName": "reward"}
    return {"value": None, "valueName": None}


def _spans(flag_T: NDArray[np.bool_]) -> list[int]:
    """Starts and lengths of runs of True, in turn."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], flag_T, [False]]).astype(np.int8)))
    starts, stops = edges[::2], edges[1::2]
    return [int(value) for pair in zip(starts, stops - starts, strict=True) for value in pair]


def _texts(tree: PrefixTree, decoder: Decoder | None) -> list[Any]:
    """Text of each segment; [start, characters left out, end] where it is too long."""
    texts: list[Any] = []
    for start, length in zip(tree.start_S.tolist(), tree.length_S.tolist(), strict=True):
        ids = tree.token_ids_T[start : start + length]
        if decoder is None:
            shown = " ".join(map(str, ids[:_IDS_SHOWN].tolist()))
            texts.append(shown if length <= _IDS_SHOWN else [shown, length - _IDS_SHOWN, ""])
        else:
            texts.append(decoder.text(ids))
    if decoder is None:
        return texts
    most = _most_characters([len(text) for text in texts])
    return [_shortened(text, most) for text in texts]


def _most_characters(lengths: list[int]) -> int:
    """The longest text that may stay whole, so that all texts keep to the budget."""
    low, high = _LEAST_TEXT, max(lengths)
    while low < high:
        middle = (low + high + 1) // 2
        if sum(min(length, middle) for length in lengths) <= _TEXT_BUDGET:
            low = middle
        else:
            high = middle - 1
    return low


def _shortened(text: str, most: int) -> Any:
    if len(text) <= most:
        return text
    end = most // 4
    return [text[: most - end], len(text) - most, text[len(text) - end :]]
