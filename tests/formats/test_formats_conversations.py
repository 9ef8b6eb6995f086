"""Conversations in the shapes that other tools write are the same tokens as our own chat rows."""

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harts.formats import read

USER, ANSWER = {"role": "user", "content": "Where?"}, {"role": "assistant", "content": "North."}
CALL = {"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
CALLING = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "1", "content": "a door"}


def same(row: dict[str, Any], messages: list[dict[str, Any]], **ours: Any) -> None:
    one, two = read([row])[0], read([{"messages": messages, **ours}])[0]
    assert np.array_equal(one.token_ids, two.token_ids)
    assert np.array_equal(one.loss_mask, two.loss_mask)


def test_openai_exports() -> None:
    answer = {**ANSWER, "refusal": None, "annotations": [], "audio": None, "function_call": None, "weight": 1}
    null_call = {**CALL, "function": {"name": "look", "arguments": None}}
    calling = {**CALLING, "tool_calls": [null_call], "refusal": None, "annotations": []}
    system = [{"type": "input_text", "text": "S"}, {"type": "text", "text": "T"}]
    theirs = [{"role": "developer", "content": system}, USER, calling, RESULT, answer]
    same(
        {"messages": theirs, "parallel_tool_calls": False},
        [{"role": "system", "content": "ST"}, USER, CALLING, RESULT, ANSWER],
    )
    same(
        {"messages": [USER, {**ANSWER, "weight": 0}, USER, {"role": "assistant", "content": None, "refusal": "No."}]},
        [USER, {**ANSWER, "ignore_loss": True}, USER, {"role": "assistant", "content": "No."}],
    )
    parts = [{"type": "refusal", "refusal": "No"}, {"type": "output_text", "text": ".", "annotations": []}]
    same({"messages": [USER, {**ANSWER, "content": parts}]}, [USER, {**ANSWER, "content": "No."}])


def test_prompt_and_completion(caplog: pytest.LogCaptureFixture) -> None:
    texts = [{"role": "user", "content": "The sky is"}, {"role": "assistant", "content": " blue."}]
    same({"prompt": "The sky is", "completion": " blue."}, texts, render="raw")
    shot = [USER, ANSWER, USER]
    same({"prompt": shot, "completion": [ANSWER]}, [USER, {**ANSWER, "ignore_loss": True}, USER, ANSWER])
    result = {"example_id": 4, "prompt": [USER], "completion": [CALLING, RESULT, ANSWER], "reward": 1.0, "answer": "x"}
    caplog.clear()
    with caplog.at_level(logging.WARNING, "harts.formats"):
        (one,) = read([result])
    assert (one.group, one.reward) == ("4", 1.0)
    assert ["not used: answer (read as chat" in message for message in caplog.messages] == [True]
    with pytest.raises(ValueError, match="field completion: expected prompt and completion as two texts, or two lists"):
        read([{"prompt": [USER], "completion": "x"}])


def test_sharegpt() -> None:
    turns = [
        {"from": "human", "value": "Where?"},
        {"from": "function_call", "value": '{"name": "look", "arguments": "{}"}'},
        {"from": "observation", "value": "a door"},
        {"from": "gpt", "value": "North."},
    ]
    system = {"role": "system", "content": "S"}
    same({"conversations": turns, "system": "S"}, [system, USER, CALLING, RESULT, ANSWER])
    with pytest.raises(ValueError, match=r"field conversations\[0\]\.from: expected one of human.* got 'narrator'"):
        read([{"conversations": [{"from": "narrator", "value": "x"}]}])
    with pytest.raises(ValueError, match=r"field conversations\[0\]\.value: expected a call as JSON"):
        read([{"conversations": [{"from": "function_call", "value": "look()"}]}])


def test_swe_agent_and_mini_swe_agent_files(tmp_path: Path) -> None:
    main = {"agent": "main", "message_type": "action"}
    thinking = [{"type": "thinking", "thinking": "I must look."}]
    history = [
        {"role": "user", "content": [{"type": "text", "text": "Where?", "cache_control": {}}], **main},
        {**ANSWER, **main, "is_demo": True},
        {"role": "user", "content": "Where?", **main},
        {**CALLING, **main, "thought": "", "action": "look", "thinking_blocks": thinking},
        {"role": "tool", "content": "a door", "tool_call_ids": ["1"], **main},
        {**ANSWER, **main, "thought": "North.", "action": ""},
    ]
    path = tmp_path / "a.traj"
    path.write_text(json.dumps({"trajectory": [{"action": "look"}], "history": history, "info": {}}, indent=2))
    ours = [
        USER,
        {**ANSWER, "ignore_loss": True},
        USER,
        {**CALLING, "reasoning_content": "I must look."},
        RESULT,
        ANSWER,
    ]
    (one,), (two,) = read(tmp_path), read([{"messages": ours}])
    assert np.array_equal(one.token_ids, two.token_ids)
    assert np.array_equal(one.loss_mask, two.loss_mask)
    mini = [{**message, "extra": {"cost": 0.1}, "timestamp": 1.5} for message in (USER, CALLING, RESULT, ANSWER)]
    mini.append({"role": "exit", "content": "Submitted", "extra": {}})
    row = {"info": {}, "messages": mini, "trajectory_format": "mini-swe-agent-1.1", "instance_id": "repo-7"}
    same(row, [USER, CALLING, RESULT, ANSWER])
    assert read([row])[0].group == "repo-7"
