"""Session logs of Claude Code and Codex, line by line as the tools write them, are the conversations they hold."""

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harts.formats import read
from harts.formats.decoding import QwenDecoder, decoder_for

USER = {"role": "user", "content": "Where?"}


def call(id: str, name: str = "look", **arguments: Any) -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def result(id: str, text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": id, "content": text}


def written(path: Path, lines: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def same(path: Path, *conversations: list[dict[str, Any]], rows: Any = "trajectory") -> list[str]:
    """The file's trajectories are those of these messages; returns their ids."""
    theirs = read(path, rows=rows)
    ours = [one for number, each in enumerate(conversations) for one in read(
        [{"id": str(number), "messages": each}], rows=rows)]  # fmt: skip
    assert len(theirs) == len(ours)
    for one, two in zip(theirs, ours, strict=True):
        assert np.array_equal(one.token_ids, two.token_ids)
        assert np.array_equal(one.loss_mask, two.loss_mask)
    return [one.id for one in theirs]


# -- Claude Code ------------------------------------------------------------------------------------------------------


def event(uuid: str, parent: str | None, content: Any, reply: str = "", **more: Any) -> dict[str, Any]:
    """A line of `~/.claude/projects/*/*.jsonl`: a user's message, or a block of the reply of that id."""
    message: dict[str, Any] = {"role": "user", "content": content}
    if reply:
        usage = {"input_tokens": 5, "output_tokens": 7}
        message = {"model": "claude-x", "id": reply, "type": "message", "role": "assistant", "content": content}
        message |= {"stop_reason": None, "stop_sequence": None, "usage": usage}
    fields = {"parentUuid": parent, "isSidechain": False, "userType": "external", "cwd": "/home/me", "sessionId": "s1"}
    fields |= {"version": "2.0.49", "gitBranch": "main", "type": "assistant" if reply else "user"}
    return fields | {"message": message, "uuid": uuid, "timestamp": "2026-01-01T00:00:00.000Z"} | more


def text(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value}


def use(id: str, **given: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": id, "name": "look", "input": given}


def given_back(id: str, content: Any) -> dict[str, Any]:
    return {"tool_use_id": id, "type": "tool_result", "content": content}


SIDE_BY_SIDE = [
    {"type": "file-history-snapshot", "messageId": "m0", "snapshot": {}, "isSnapshotUpdate": False},
    event("u1", None, "Where?"),
    event("a1", "u1", [{"type": "thinking", "thinking": "I must look.", "signature": "x"}], "msg_1"),
    event("a2", "a1", [text("Looking.")], "msg_1"),
    event("a3", "a2", [use("t1", at="north")], "msg_1"),
    event("a4", "a3", [use("t2", at="south")], "msg_1"),
    event("u2", "a4", [given_back("t2", [text("a wall")])], toolUseResult={"durationMs": 1}),
    event("u3", "a3", [given_back("t1", "a door")], toolUseResult={"durationMs": 1}),
    event("a5", "u2", [text("North.")], "msg_2"),
    {"type": "system", "subtype": "turn_duration", "uuid": "y1", "parentUuid": "a5", "sessionId": "s1"},
    event("u4", "y1", [text("Thanks")]),
    event("a6", "u4", [text("Gladly.")], "msg_3"),
]
REPLIES = [
    USER,
    {
        "role": "assistant",
        "content": "Looking.",
        "reasoning_content": "I must look.",
        "tool_calls": [call("t1", at="north"), call("t2", at="south")],
    },
    result("t1", "a door"),
    result("t2", "a wall"),
    {"role": "assistant", "content": "North."},
    {"role": "user", "content": "Thanks"},
    {"role": "assistant", "content": "Gladly."},
]


def test_blocks_of_one_reply_and_calls_side_by_side(tmp_path: Path) -> None:
    path = written(tmp_path / "s1.jsonl", SIDE_BY_SIDE)
    assert same(path, REPLIES) == ["s1"]
    assert same(path, REPLIES, rows="turn") == ["s1/turn0", "s1/turn1", "s1/turn2"]
    (one,) = read(path)
    assert (one.group, dict(one.meta)) == ("s1", {"model": "claude-x"})
    assert isinstance(decoder_for(path), QwenDecoder)
    assert np.array_equal(read(path, fmt="claude-code")[0].token_ids, one.token_ids)


def test_a_rewound_session_trains_what_it_shares_once(tmp_path: Path) -> None:
    path = written(
        tmp_path / "s1.jsonl", [*SIDE_BY_SIDE, event("u5", "y1", "Sure?"), event("a7", "u5", [text("Yes.")], "m4")]
    )
    old = [{**message, "ignore_loss": True} if message["role"] == "assistant" else message for message in REPLIES[:5]]
    other = [*old, {"role": "user", "content": "Sure?"}, {"role": "assistant", "content": "Yes."}]
    assert same(path, REPLIES, other) == ["s1", "s1/1"]
    assert len(read(path, rows="turn")) == 4


def test_compacted_sessions_and_subagents(tmp_path: Path) -> None:
    boundary = {"type": "system", "subtype": "compact_boundary", "uuid": "b", "parentUuid": None, "sessionId": "s1"}
    agent: dict[str, Any] = {"isSidechain": True, "agentId": "7f"}
    lines = [
        {"type": "summary", "summary": "Doors", "leafUuid": "a1"},
        event("u1", None, "Where?"),
        event("a1", "u1", [text("North.")], "m1"),
        event("v1", None, "Look for doors.", **agent),
        event("w1", "v1", [text("None.")], "m2", **agent),
        {**boundary, "logicalParentUuid": "a1"},
        event("u2", "b", "We spoke of doors.", isCompactSummary=True),
        event("a2", "u2", [text("So we did.")], "m3"),
        event("e1", "a2", [text("API Error")], "m4", isApiErrorMessage=True),
    ]
    lines[-1]["message"]["model"] = "<synthetic>"
    assert same(
        written(tmp_path / "s1.jsonl", lines),
        [USER, {"role": "assistant", "content": "North."}],
        [{"role": "user", "content": "Look for doors."}, {"role": "assistant", "content": "None."}],
        [{"role": "user", "content": "We spoke of doors."}, {"role": "assistant", "content": "So we did."}],
    ) == ["s1", "s1/7f", "s1/1"]


def test_what_of_a_session_cannot_be_read_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "s.jsonl"
    written(path, [event("u1", "a1", "Where?"), event("a1", "u1", [text("North.")], "m")])
    with pytest.raises(ValueError, match="field parentUuid: expected an earlier event"):
        read(path)
    written(path, [{**event("u1", None, "x"), "message": None}, event("a1", "u1", [text("North.")], "m")])
    with pytest.raises(ValueError, match=r"line 1: .*field message: expected an object"):
        read(path)
    attached = {"type": "attachment", "uuid": "x", "parentUuid": "u1", "sessionId": "s1", "attachment": {}}
    written(path, [event("u1", None, "Where?"), attached, event("a1", "x", [text("North.")], "m")])
    with caplog.at_level(logging.WARNING, "harts.formats"):
        assert same(path, [USER, {"role": "assistant", "content": "North."}]) == ["s1"]
    assert "present and not used: attachment (read as claude-code" in caplog.messages[0]
    written(path, [event("u1", None, "Where?")])
    with pytest.raises(ValueError, match="expected a trained token, got none in 0 trajectories"):
        read(path)


def test_an_image_ends_a_conversation(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
    before = [event("u1", None, "Where?"), event("a1", "u1", [text("Looking."), use("t1", at="north")], "m1")]
    seen = [event("u2", "a1", [given_back("t1", [image])]), event("a2", "u2", [text("A cat.")], "m2")]
    plain = [event("u3", None, "Again?"), event("a3", "u3", [text("North.")], "m3")]
    path = written(tmp_path / "s.jsonl", [*before, *seen, *plain])
    looking = {"role": "assistant", "content": "Looking.", "tool_calls": [call("t1", at="north")]}
    again = [{"role": "user", "content": "Again?"}, {"role": "assistant", "content": "North."}]
    with caplog.at_level(logging.WARNING, "harts.formats"):
        assert same(path, [USER, looking], again) == ["s1", "s1/1"]
    assert "line 3: present and not used: image and what follows it (read as claude-code" in caplog.messages[0]
    more = [event("u4", "a1", "Well?"), event("a4", "u4", [text("West.")], "m4")]
    shown = [event("u5", "a4", [image, text("This?")]), event("a5", "u5", [text("A cat.")], "m5")]
    before[1]["message"]["content"] = [text("Looking.")]
    written(path, [*before, *more, *shown])
    told = [USER, {"role": "assistant", "content": "Looking."}, {"role": "user", "content": "Well?"}]
    assert same(path, [*told, {"role": "assistant", "content": "West."}]) == ["s1"]


# -- Codex ------------------------------------------------------------------------------------------------------------


def line(kind: str, **payload: Any) -> dict[str, Any]:
    return {"timestamp": "2026-01-01T00:00:00.000Z", "type": kind, "payload": payload}


def item(kind: str, **fields: Any) -> dict[str, Any]:
    return line("response_item", type=kind, **fields)


def says(role: str, value: str) -> dict[str, Any]:
    kind = "output_text" if role == "assistant" else "input_text"
    return item("message", role=role, content=[{"type": kind, "text": value}])


def asks(value: str) -> list[dict[str, Any]]:
    return [says("user", value), line("event_msg", type="user_message", message=value, images=[])]


META = line("session_meta", id="c1", cwd="/home/me", originator="codex_cli_rs", base_instructions={"text": "Be brief."})
SYSTEM = {"role": "system", "content": "Be brief."}
PATCH = "*** Begin Patch\n*** End Patch"
SESSION = [
    META,
    says("developer", "Sandboxed."),
    *asks("Where?"),
    line("turn_context", model="gpt-x", cwd="/home/me"),
    item("reasoning", summary=[{"type": "summary_text", "text": "**Looking**"}], content=None, encrypted_content="x"),
    item("function_call", name="shell", arguments='{"command": ["ls"]}', call_id="c1"),
    item("custom_tool_call", name="apply_patch", input=PATCH, call_id="c2", status="completed"),
    item("function_call_output", call_id="c1", output="a door"),
    item("custom_tool_call_output", call_id="c2", output=[{"type": "input_text", "text": "done"}]),
    item("ghost_snapshot", ghost_commit={}),
    item("reasoning", summary=[], content=[{"type": "reasoning_text", "text": "I know."}]),
    says("assistant", "North."),
    line("event_msg", type="token_count", info=None),
]
TOLD: list[dict[str, Any]] = [
    SYSTEM,
    {"role": "system", "content": "Sandboxed."},
    USER,
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "shell", "arguments": '{"command": ["ls"]}'}},
            call("c2", "apply_patch", input=PATCH),
        ],
    },
    result("c1", "a door"),
    result("c2", "done"),
    {"role": "assistant", "content": "North.", "reasoning_content": "I know."},
]


def test_a_session_of_codex(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = written(tmp_path / "rollout-x.jsonl", SESSION)
    with caplog.at_level(logging.WARNING, "harts.formats"):
        assert same(path, TOLD) == ["c1"]
    assert "present and not used: reasoning without its text (read as codex" in caplog.messages[0]
    assert same(path, TOLD, rows="turn") == ["c1/turn0", "c1/turn1"]
    assert isinstance(decoder_for([path]), QwenDecoder)
    assert len(read(tmp_path, fmt="codex")) == 1


def test_histories_that_were_compacted_or_rolled_back(tmp_path: Path) -> None:
    kept = [says("user", "Where?")["payload"], says("assistant", "Doors.")["payload"]]
    lines = [
        *SESSION,
        *asks("And now?"),
        says("assistant", "West."),
        line("event_msg", type="thread_rolled_back", num_turns=1),
        *asks("Sure?"),
        says("assistant", "Yes."),
        line("compacted", message="Doors.", replacement_history=kept),
        *asks("Go on."),
        says("assistant", "Done."),
    ]
    old = [{**message, "ignore_loss": True} if message["role"] == "assistant" else message for message in TOLD]
    first = [*TOLD, {"role": "user", "content": "And now?"}, {"role": "assistant", "content": "West."}]
    second = [*old, {"role": "user", "content": "Sure?"}, {"role": "assistant", "content": "Yes."}]
    third = [SYSTEM, USER, {"role": "assistant", "content": "Doors.", "ignore_loss": True}]
    third += [{"role": "user", "content": "Go on."}, {"role": "assistant", "content": "Done."}]
    assert same(written(tmp_path / "r.jsonl", lines), first, second, third) == ["c1", "c1/1", "c1/2"]


def test_lines_that_codex_does_not_have_or_no_text(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = written(tmp_path / "r.jsonl", [META, {"type": "message", "role": "user", "content": []}])
    with pytest.raises(ValueError, match=r"line 2: .*field type: expected a line of type compacted, .* got 'message'"):
        read(path)
    image = item("message", role="user", content=[{"type": "input_image", "image_url": "x"}])
    written(
        path, [META, line("new_thing"), *asks("Where?"), says("assistant", "North."), image, says("assistant", "x")]
    )
    with caplog.at_level(logging.WARNING, "harts.formats"):
        assert same(path, [SYSTEM, USER, {"role": "assistant", "content": "North."}]) == ["c1"]
    assert ["lines of type new_thing" in caplog.messages[0], "input_image and what" in caplog.messages[1]] == [True] * 2
