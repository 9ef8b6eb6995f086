"""Logs of inspect_ai (archives and JSON), episodes of rLLM, results of verifiers: files in those tools' shapes."""

import json
import logging
import struct
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard

from harts.formats import read
from harts.formats.decoding import QwenDecoder, decoder_for
from harts.trajectory import Trajectory

USER, ANSWER = {"role": "user", "content": "Where?"}, {"role": "assistant", "content": "North."}
PARAMETERS = {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]}
TOOL = {"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": PARAMETERS}}
CALL = {"id": "1", "type": "function", "function": {"name": "look", "arguments": {"at": "north"}}}


def same(one: Trajectory, **row: Any) -> None:
    """A trajectory is the one of our chat row."""
    (two,) = read([row])
    assert np.array_equal(one.token_ids, two.token_ids)
    assert np.array_equal(one.loss_mask, two.loss_mask)
    assert (one.reward, one.group) == (two.reward, two.group)


# -- inspect_ai -------------------------------------------------------------------------------------------------------

SAMPLE: dict[str, Any] = {
    "id": 7,
    "epoch": 2,
    "input": "Where?",
    "target": "North.",
    "messages": [
        {"id": "a", "content": "attachment://f0", "source": "input", "role": "user"},
        {
            "id": "b",
            "source": "generate",
            "role": "assistant",
            "model": "openai/x",
            "content": [
                {"type": "reasoning", "reasoning": "I must look.", "redacted": False},
                {"type": "text", "text": "Looking.", "citations": []},
            ],
            "tool_calls": [{"id": "1", "function": "look", "arguments": {"at": "north"}, "view": {}}],
        },
        {
            "id": "c",
            "role": "tool",
            "content": "",
            "tool_call_id": "1",
            "function": "look",
            "error": {"type": "timeout", "message": "timed out"},
        },
        {"id": "d", "source": "generate", "role": "assistant", "content": "North."},
    ],
    "scores": {"match": {"value": "C", "answer": "North."}},
    "attachments": {"f0": "Where?", "f1": "Looks."},
    "events": [
        {"event": "sample_init"},
        {
            "event": "model",
            "tools": [{"name": "look", "description": "attachment://f1", "parameters": PARAMETERS, "options": None}],
        },
    ],
    "model_usage": {},
}
OURS = [
    USER,
    {"role": "assistant", "content": "Looking.", "reasoning_content": "I must look.", "tool_calls": [CALL]},
    {"role": "tool", "content": "timed out", "tool_call_id": "1"},
    ANSWER,
]
HEADER = {"version": 2, "status": "success", "eval": {"task": "doors", "eval_id": "E1", "model": "openai/x"}}


def archive(path: Path, *samples: dict[str, Any], header: str = "header.json") -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("_journal/summaries/1.json", "[]")
        file.writestr(header, json.dumps(HEADER))
        for sample in samples:
            file.writestr(f"samples/{sample['id']}_epoch_{sample['epoch']}.json", json.dumps(sample))
    return path


@pytest.mark.parametrize("header", ["header.json", "_journal/start.json", "start.json"])
def test_an_archive_of_samples(header: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = archive(tmp_path / "log.eval", SAMPLE, {**SAMPLE, "epoch": 1, "uuid": "U"}, header=header)
    with caplog.at_level(logging.WARNING, "harts.formats"):
        one, two = read(tmp_path)
    same(one, messages=OURS, tools=[TOOL], reward=1.0, group="doors/7")
    assert (one.id, two.id) == ("E1/7/epoch2", "U")
    assert ["not used: input, model_usage, target (read as chat" in message for message in caplog.messages] == [True]
    assert isinstance(decoder_for(path), QwenDecoder)
    assert [each.id for each in read(path, fmt="inspect", rows="turn", limit=2)] == [
        "E1/7/epoch2/turn0",
        "E1/7/epoch2/turn1",
    ]


def test_members_in_zstandard_which_newer_versions_write(tmp_path: Path) -> None:
    plain, packed = archive(tmp_path / "a.eval", SAMPLE), tmp_path / "b.eval"
    with zipfile.ZipFile(packed, "w") as file:  # stored; then the bytes that say so become those of Zstandard
        names = ("header.json", "samples/7_epoch_2.json")
        for name, value in zip(names, (HEADER, SAMPLE), strict=True):
            text = json.dumps(value).encode()
            halves = (text[:50], text[50:])  # several frames in a row
            file.writestr(name, b"".join(zstandard.compress(half) for half in halves))
    data = bytearray(packed.read_bytes())
    for signature, offset in ((b"PK\x03\x04", 8), (b"PK\x01\x02", 10)):
        at = data.find(signature)
        while at >= 0:
            struct.pack_into("<H", data, at + offset, 93)
            at = data.find(signature, at + 1)
    packed.write_bytes(data)
    assert np.array_equal(read(plain)[0].token_ids, read(packed)[0].token_ids)
    start = data.index(b"samples/7")
    data[start + 60] ^= 0xFF
    packed.write_bytes(data)
    with pytest.raises(ValueError, match=r"b\.eval, samples/7_epoch_2\.json: "):
        read(packed)


def test_a_log_in_json_and_examples_in_the_input(tmp_path: Path) -> None:
    path = tmp_path / "log.json"
    path.write_text(json.dumps({**HEADER, "samples": [SAMPLE, {**SAMPLE, "id": "8"}]}, indent=2))
    one, two = read(path)
    same(one, messages=OURS, tools=[TOOL], reward=1.0, group="doors/7")
    assert two.id == "E1/8/epoch2"
    shot = {**SAMPLE, "messages": [{**ANSWER, "source": "input"}, USER, {**ANSWER, "source": "generate"}], "events": []}
    shot["scores"] = {"a": {"value": 0.25}, "b": {"value": 1}}
    same(read([shot])[0], messages=[{**ANSWER, "ignore_loss": True}, USER, ANSWER], group="7")


@pytest.mark.parametrize(
    ("value", "reward"), [("C", 1.0), ("I", 0.0), ("P", 0.5), ("N", 0.0), (0.25, 0.25), (True, 1.0), ("x", None)]
)
def test_rewards(value: Any, reward: float | None) -> None:
    assert read([{**SAMPLE, "scores": {"match": {"value": value}}}])[0].reward == reward


def test_archives_that_cannot_be_read(tmp_path: Path) -> None:
    path = archive(tmp_path / "log.eval", SAMPLE)
    whole = path.read_bytes()
    path.write_bytes(whole[:-40])
    with pytest.raises(ValueError, match=r"log\.eval: the archive is truncated or damaged"):
        read(path)
    archive(path)
    with pytest.raises(ValueError, match="expected an archive of inspect_ai with header"):
        read(path)
    parts = [{"type": "tool_use", "name": "web_search", "id": "1", "arguments": "{}", "result": "", "tool_type": "x"}]
    archive(path, {**SAMPLE, "messages": [USER, {**ANSWER, "content": parts}]})
    with pytest.raises(
        ValueError, match=r"samples/7_epoch_2\.json: .*messages\[1\]\.content\[0\]: .*call of web_search"
    ):
        read(path)
    archive(path, {**SAMPLE, "messages": [{**USER, "content": [{"type": "image", "image": "x"}]}, ANSWER]})
    with pytest.raises(ValueError, match="HARTS reads text only"):
        read(path)


# -- rLLM -------------------------------------------------------------------------------------------------------------


def step(**fields: Any) -> dict[str, Any]:
    """As Step.to_dict writes it."""
    empty = {"prompt_ids": [], "response_ids": [], "logprobs": [], "chat_completions": [], "observation": None}
    empty |= {"thought": "", "action": None, "model_response": "", "model_output": None, "info": {}}
    return empty | {"reward": 0.0, "done": False, "mc_return": 0.0, "advantage": None, "weight_version": 3} | fields


TOKENS = step(prompt_ids=[1, 2], response_ids=[3, 4], logprobs=[-0.5, -0.25], advantage=[1.0, 0.5], reward=0.25)
EPISODE: dict[str, Any] = {
    "id": "q7:1",
    "task": {"question": "Where?"},
    "termination_reason": "env_done",
    "is_correct": True,
    "trajectories": [
        {"uid": "u", "name": "solver", "task": None, "steps": [TOKENS, TOKENS], "reward": 1.0, "info": {}},
        {"uid": "v", "name": "judge", "task": None, "steps": [TOKENS], "reward": None, "info": {}},
    ],
    "metrics": {},
    "info": {},
}


def test_episodes_of_token_rows(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "episodes.jsonl"
    path.write_text(json.dumps(EPISODE) + "\n")
    with caplog.at_level(logging.WARNING, "harts.formats"):
        one, two, three = read(path)
    assert "not used: info, is_correct, metrics, task, termination_reason (read as rllm" in caplog.messages[0]
    assert (one.token_ids.tolist(), one.loss_mask.tolist()) == ([1, 2, 3, 4], [False, False, True, True])
    assert one.logprobs is not None
    assert one.advantages is not None
    assert (one.logprobs.tolist(), one.advantages.tolist()) == ([0, 0, -0.5, -0.25], [0, 0, 1.0, 0.5])
    assert [(each.id, each.group, each.reward) for each in (one, two, three)] == [
        ("q7:1/0/step0", "q7:solver", 1.0),
        ("q7:1/0/step1", "q7:solver", 1.0),
        ("q7:1/1/step0", "q7:judge", 0.25),
    ]
    assert decoder_for(path) is None
    output = {"prompt_ids": [1], "completion_ids": [2], "logprobs": [-1.0]}
    group = {"group_id": "q7:solver", "trajectories": [{"name": "solver", "steps": [step(model_output=output)]}]}
    (four,) = read([group], fmt="rllm")
    assert (four.group, four.token_ids.tolist()) == ("q7:solver", [1, 2])
    (five, six) = read([{"uid": "u", "name": "solver", "steps": [TOKENS, TOKENS], "reward": 0.5}])
    assert (five.id, six.id, six.reward) == ("u/0/step0", "u/0/step1", 0.5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"response_ids": []}, "field trajectories[0].steps[1].response_ids: expected token ids"),
        ({"logprobs": [-1.0]}, "field logprobs: expected one value per response token (2)"),
        ({"advantage": [1.0]}, "field advantages: expected one value per response token (2)"),
    ],
)
def test_bad_steps(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        read([{"id": "e", "trajectories": [{"name": "a", "steps": [TOKENS, {**TOKENS, **change}]}]}])
    assert message in str(caught.value)


def test_episode_logs_in_messages(tmp_path: Path) -> None:
    path = tmp_path / "episode_hash0_idq7_1.json"
    turns = [[USER, {**ANSWER, "reasoning": "I know."}], [USER, ANSWER, USER, {**ANSWER, "reasoning": ""}]]
    steps = [{"observation": None, "reward": 0.0, "chat_completions": turn, "timing": {}} for turn in turns]
    episode = {
        "training_step": 1,
        "episode_id": "q7:1",
        "trajectories": [{"name": "solver", "uid": "u", "steps": steps}],
    }
    path.write_text(json.dumps(episode, indent=2) + "\n")
    one, two = read(path)
    same(one, messages=[USER, {**ANSWER, "reasoning_content": "I know."}], group="q7:solver", reward=0.0)
    same(two, messages=[USER, {**ANSWER, "ignore_loss": True}, USER, ANSWER], group="q7:solver", reward=0.0)
    assert isinstance(decoder_for(path), QwenDecoder)
    assert len(read(path, fmt="rllm")) == 2


# -- results.jsonl of verifiers ---------------------------------------------------------------------------------------


def test_results_of_verifiers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    calling = {
        "role": "assistant",
        "content": "",
        "tool_calls": [json.dumps(CALL)],
        "reasoning_content": "I must look.",
    }
    found = {"role": "tool", "content": "a door", "tool_call_id": "1"}
    row = {"example_id": 4, "prompt": [USER], "completion": [calling, found, ANSWER], "reward": 1.0, "timing": {}}
    row |= {"is_completed": True, "is_truncated": False, "metrics": {"doors": 1.0}, "doors": 1.0, "error": None}
    row["tool_defs"] = [{"name": "look", "description": "Looks.", "parameters": PARAMETERS, "strict": None}]
    path = tmp_path / "results.jsonl"
    path.write_text(json.dumps(row) + "\n" + json.dumps(row | {"completion": [ANSWER]}) + "\n")
    with caplog.at_level(logging.WARNING, "harts.formats"):
        one, _ = read(path)
    assert "not used: doors, is_completed, is_truncated, metrics, timing (read as chat" in caplog.messages[0]
    ours = [USER, {**calling, "tool_calls": [CALL]}, found, ANSWER]
    same(one, messages=ours, tools=[TOOL], reward=1.0, group="4")
    row["completion"] = [{**calling, "tool_calls": ["look()"]}]
    with pytest.raises(ValueError, match=r"field completion\[0\]\.tool_calls: expected calls as objects or JSON"):
        read([row])
    text = {
        "prompt": [{"role": "text", "content": "The sky is"}],
        "completion": [{"role": "text", "content": " blue."}],
    }
    texts = [{"role": "user", "content": "The sky is"}, {"role": "assistant", "content": " blue."}]
    same(read([text])[0], messages=texts, render="raw", group="row0")
