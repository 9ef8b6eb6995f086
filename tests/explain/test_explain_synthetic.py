"""The doctor on made near misses: each is found, named, and its cost is what building the tree again gives."""

import copy
import json
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from harts.explain import Report, explain
from harts.formats import from_lists, read
from harts.formats.decoding import QwenDecoder
from harts.testing.trees import trajectories_strategy
from harts.trajectory import Trajectory
from harts.tree import PrefixTree

WORDS = [
    "north",
    "south",
    "door",
    "key",
    "lamp",
    "table",
    "open",
    "close",
    "look",
    "walk",
    "take",
    "drop",
    "green",
    "small",
    "old",
    "river",
    "stone",
    "bread",
    "cup",
]


def _prose(seed: int, words: int = 120) -> str:
    return " ".join(random.Random(seed).choices(WORDS, k=words))


def _tool(name: str) -> dict[str, Any]:
    properties = {"path": {"type": "string"}, "line": {"type": "integer"}}
    return {
        "type": "function",
        "function": {"name": name, "description": _prose(len(name), 30), "parameters": properties},
    }


def _row(name: str, *, group: str = "g", answer: str = "", system: str | None = None, **fields: Any) -> dict[str, Any]:
    messages = [
        {"role": "system", "content": _prose(0) if system is None else system},
        {"role": "user", "content": _prose(1)},
        {"role": "assistant", "content": answer or f"answer {name} {_prose(2, 10)}"},
    ]
    return {"group": group, "id": name, "messages": messages, **fields}


def _explain(source: list[dict[str, Any]], **options: Any) -> Report:
    trajectories = read(source, **options)
    report = explain(trajectories, decoder=QwenDecoder())
    assert report.sizes.tree == PrefixTree.build(trajectories).num_rows
    assert report.sizes.tree - report.tree_mended == sum(miss.rows for miss in report.misses)
    return report


def _only(report: Report) -> Any:
    assert len(report.misses) == 1, [(miss.kind, miss.rows) for miss in report.misses]
    return report.misses[0]


@pytest.mark.parametrize(
    ("kind", "first", "second"),
    [
        ("one character", "You are an agent. Be brief. ", "You are an agent.  Be brief. "),
        ("one character", "You are an agent! ", "You are an agent. "),
        ("whitespace", "You are an agent.\nBe brief.\n", "You are an agent.\n\n\n Be brief.\n"),
        ("letter case", "The format is flag and ", "The format is FLAG and "),
        ("timestamp", "Now it is 2024-05-01 10:22:03. ", "Now it is 2024-05-02 11:17:48. "),
        ("timestamp", "Today is Monday, ", "Today is Friday, "),
        (
            "identifier",
            "Session 7f3a91bc-2222-4a4a-8b8b-0123456789ab: ",
            "Session 00aa91bc-3333-4a4a-8b8b-abcdefabcdef: ",
        ),
        ("other words", "You serve the airline. ", "You serve the railway company. "),
        ("extra text", "You are an agent. " + _prose(77, 40), "You are an agent. "),
    ],
)
def test_a_difference_in_the_system_prompt(kind: str, first: str, second: str) -> None:
    rows = [_row("a", system=first + _prose(0)), _row("b", system=second + _prose(0), group="h")]
    rows.append(_row("c", system=first + _prose(0)))
    miss = _only(_explain(rows))
    assert miss.kind == kind
    assert miss.groups == ("g", "h")
    assert miss.example.run > 120  # the rest of the system prompt and the user's message
    same = copy.deepcopy(rows)
    same[1]["messages"][0]["content"] = first + _prose(0)
    by_hand = PrefixTree.build(read(rows)).num_rows - PrefixTree.build(read(same)).num_rows
    assert miss.rows == by_hand


def test_many_variants_of_one_timestamp_are_one_finding() -> None:
    rows = [_row(str(at), system=f"It is 12:{at:02}:00. {_prose(0)}") for at in range(12, 32)]
    report = _explain(rows)
    assert set(report.lost_by_kind) == {"timestamp"}
    same = [_row(str(at), system=f"It is 12:12:00. {_prose(0)}") for at in range(12, 32)]
    assert report.tree_mended == PrefixTree.build(read(same)).num_rows
    assert max(miss.variants for miss in report.misses) >= 8


def test_tools_and_keys_in_another_order() -> None:
    tools = [_tool(name) for name in ("open_file", "search", "edit_lines")]
    swapped = [tools[1], tools[2], tools[0]]
    assert _only(_explain([_row("a", tools=tools), _row("b", tools=swapped)])).kind == "reordered"
    turned = copy.deepcopy(tools)
    turned[1] = {"function": dict(reversed(tools[1]["function"].items())), "type": "function"}
    miss = _only(_explain([_row("a", tools=tools), _row("b", tools=turned)]))
    assert miss.kind == "reordered"
    assert miss.example.run > 100


def test_two_differences_behind_each_other_are_both_found() -> None:
    first, second = _prose(0).rsplit(" table ", 1)
    rows = [_row("a", system=f"Agent. {first} table {second}"), _row("b", system=f"Agent.  {first} TABLE {second}")]
    assert set(_explain(rows).lost_by_kind) == {"one character", "letter case"}


def _turns(*contents: str) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = [{"role": "system", "content": _prose(0)}]
    for at, content in enumerate(contents):
        messages.append({"role": "user" if at % 2 == 0 else "assistant", "content": content})
    return messages


def test_dropped_reasoning() -> None:
    messages = _turns("hello", _prose(3), "more", _prose(4), "again", _prose(5))
    for at, message in enumerate(messages[2::2]):
        message["reasoning_content"] = _prose(10 + at)
    report = _explain([{"group": "g", "id": "a", "messages": messages}], rows="turn", reasoning="drop")
    assert set(report.lost_by_kind) == {"dropped reasoning"}
    kept = read([{"group": "g", "id": "a", "messages": messages}], rows="turn")
    assert report.tree_mended == PrefixTree.build(kept).num_rows


def _two_states(before: list[dict[str, Any]], after: list[dict[str, Any]]) -> list[dict[str, Any]]:
    later = [{**message, "ignore_loss": True} if message["role"] == "assistant" else message for message in after[:-1]]
    return [
        {"group": "g", "id": "early", "messages": before},
        {"group": "g", "id": "late", "messages": [*later, after[-1]]},
    ]


def test_elided_observation() -> None:
    messages = _turns("go", "call", _prose(20, 300), "second call " + _prose(3), _prose(21, 200), "done")
    elided = copy.deepcopy(messages)
    elided[3]["content"] = "[output left out]"
    assert _only(_explain(_two_states(messages, [*elided, *_turns("now", "end")[1:]]))).kind == "elided observation"


def test_rewritten_response() -> None:
    messages = _turns("go", "I look.  \n\n" + _prose(3), "fine", _prose(4))
    stripped = copy.deepcopy(messages)
    stripped[2]["content"] = "I look.\n" + _prose(3)
    report = _explain(_two_states(messages, [*stripped, *_turns("now", "end")[1:]]))
    assert _only(report).kind == "rewritten response"


def test_summarised_history_and_dropped_turns() -> None:
    messages = _turns("go", _prose(2), _prose(3), _prose(4), _prose(5), _prose(6), _prose(7, 200), _prose(8))
    summary = [messages[0], {"role": "user", "content": "Summary: " + _prose(9, 50)}, *messages[6:]]
    report = _explain(_two_states(messages, [*summary, *_turns("now", "end")[1:]]))
    assert _only(report).kind == "summarised history"
    cut = [*messages[:2], *messages[6:]]
    report = _explain(_two_states(messages, [*cut, *_turns("now", "end")[1:]]))
    assert set(report.lost_by_kind) == {"dropped turns"}


def test_retokenised_text() -> None:
    decoder = QwenDecoder()
    (row,) = read([_row("a", answer=_prose(2, 60))])
    response = np.flatnonzero(row.loss_mask)
    start = int(response[20])
    piece = decoder.pieces(row.token_ids[start : start + 1])[0]  # one token said with two
    table = {decoder.piece(token): token for token in range(50_000)}
    halves = next(
        (table[piece[:cut]], table[piece[cut:]])
        for cut in range(1, len(piece))
        if piece[:cut] in table and piece[cut:] in table
    )
    other = np.concatenate([row.token_ids[:start], halves, row.token_ids[start + 1 :], row.token_ids[1:50]])
    mask = np.zeros(len(other), np.bool_)
    mask[-20:] = True
    again = Trajectory(token_ids=other, loss_mask=mask, group="g", id="later")
    report = explain([row, again], decoder=decoder)
    miss = _only(report)
    assert (miss.kind, miss.rows) == ("retokenised", len(row) - start + 1)
    assert report.tree_mended == len(other) - 1
    blind = explain([row, again])
    assert not blind.decoded
    assert blind.misses[0].example.text_a is None


def test_sampled_differences_are_no_misses() -> None:
    report = _explain([_row("a", answer="yes " + _prose(3)), _row("b", answer="no " + _prose(3))])
    assert report.misses == ()
    assert report.groups[0].partings == {"sampled": 1}
    first, second = read([_row("a", answer="yes " + _prose(3)), _row("b", answer="no " + _prose(3))])
    assert report.groups[0].first_parting == int(
        np.argmax(first.token_ids[: len(second)] != second.token_ids[: len(first)])
    )


def test_exact_duplicates_and_the_three_sizes() -> None:
    messages = _turns("go", _prose(2), "on", _prose(3))
    rows = [{"group": "g", "id": name, "messages": messages} for name in "abc"]
    report = _explain([*rows, {"group": "g", "id": "d", "messages": messages[:3]}])
    assert report.duplicates == (("a", "b", "c"),)
    assert report.num_duplicates == report.groups[0].duplicates == 2
    long, short = (len(one) for one in read([rows[0], {"group": "g", "id": "d", "messages": messages[:3]}]))
    sizes = report.sizes
    assert (sizes.calls, sizes.distinct_calls) == (7, 2)
    assert (sizes.per_call, sizes.per_distinct_call) == (3 * long + 4 * short, long + short)
    assert (sizes.prefix, sizes.tree) == (long, long)
    assert report.misses == ()


def test_turns_and_conversations_have_the_same_sizes() -> None:
    messages = _turns("go", _prose(2), "on", _prose(3), "and on", _prose(4))
    rows = [{"group": "g", "id": "a", "messages": messages}]
    assert explain(read(rows)).sizes == explain(read(rows, rows="turn")).sizes


def test_other_merge_keys_part_on_purpose() -> None:
    ids = list(range(100, 160))
    mask = [0] * 50 + [1] * 10
    same = from_lists([ids, ids], [mask, mask], id=["a", "b"])
    parted = [
        Trajectory(token_ids=one.token_ids, loss_mask=one.loss_mask, id=one.id, merge_keys=np.full(60, at))
        for at, one in enumerate(same)
    ]
    report = explain(parted, decoder=QwenDecoder())
    assert (report.sizes.tree, report.misses, report.duplicates) == (120, (), ())


def test_recorded_routes_part_rows_too() -> None:
    ids, mask = list(range(100, 140)), [0] * 30 + [1] * 10
    routes = np.zeros((40, 2, 1), np.int16)
    other = routes.copy()
    other[20] = 3
    rows = [
        Trajectory(token_ids=np.array(ids), loss_mask=np.array(mask), id=name, routes=given)
        for name, given in (("a", routes), ("b", other), ("c", routes))
    ]
    report = explain(rows, decoder=QwenDecoder())
    assert (report.sizes.tree, report.misses, report.duplicates) == (60, (), (("a", "c"),))
    assert report.groups[0].partings == {"keys": 1}


@settings(deadline=None, max_examples=40)
@given(trajectories_strategy(max_length=300, vocab_size=3, trained_share=0.2))
def test_costs_add_up_on_random_trees(trajectories: list[Trajectory]) -> None:
    report = explain(trajectories)
    assert report.sizes.tree == PrefixTree.build(trajectories).num_rows
    assert report.sizes.prefix == PrefixTree.build(trajectories, share="prefix").num_rows
    assert report.sizes.tree - report.tree_mended == sum(miss.rows for miss in report.misses)
    assert all(miss.rows > 0 for miss in report.misses)
    assert json.loads(json.dumps(report.to_json()))["sizes"]["tree"] == report.sizes.tree


def test_no_trajectory_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        explain([])
