"""Rows under the field names of vLLM, SGLang, TRL and verl: the response is trained, the masks are honoured."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from harts import Trajectory
from harts.formats import read, write


def check(one: Trajectory, ids: list[int], mask: list[int], logprobs: list[float] | None = None) -> None:
    assert one.token_ids.tolist() == ids
    assert one.loss_mask.astype(int).tolist() == mask
    assert (one.logprobs is None) == (logprobs is None)
    if logprobs is not None:
        assert one.logprobs is not None
        assert one.logprobs.tolist() == pytest.approx(logprobs)


# -- vLLM -------------------------------------------------------------------------------------------------------------


@dataclass
class Logprob:
    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass
class CompletionOutput:
    index: int
    token_ids: tuple[int, ...]
    logprobs: list[dict[int, Logprob]] | None = None


@dataclass
class RequestOutput:
    request_id: str
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = True


VLLM: dict[str, Any] = {
    "request_id": "7",
    "prompt": "ab",
    "prompt_token_ids": [1, 2],
    "outputs": [
        {
            "index": 0,
            "text": "c",
            "token_ids": [3],
            "logprobs": [{"3": {"logprob": -0.5, "rank": 2}, "9": {"logprob": -0.1}}],
        },
        {"index": 1, "text": "de", "token_ids": [4, 5], "logprobs": None, "finish_reason": "stop"},
    ],
    "finished": True,
}


def test_vllm_request_outputs() -> None:
    one, two = read([VLLM])
    check(one, [1, 2, 3], [0, 0, 1], [0, 0, -0.5])
    check(two, [1, 2, 4, 5], [0, 0, 1, 1])
    assert [(t.group, t.id) for t in (one, two)] == [("7", "7/0"), ("7", "7/1")]
    flat = {**VLLM, "reward": 1, "group": "task", "temperature": 0.8}
    flat["outputs"] = [{"token_ids": [3], "logprobs": [-0.5]}]
    columns = {"start_indices": [0], "end_indices": [2], "token_ids": [9, 3], "logprobs": [-0.1, -0.5], "ranks": [1, 2]}
    (again,) = read([{**flat, "outputs": [{"token_ids": [3], "logprobs": columns}]}])
    check(again, [1, 2, 3], [0, 0, 1], [0, 0, -0.5])
    (three,) = read([flat])
    check(three, [1, 2, 3], [0, 0, 1], [0, 0, -0.5])
    assert (three.group, three.reward, three.temperature) == ("task", 1.0, 0.8)


def test_vllm_objects_themselves() -> None:
    output = CompletionOutput(0, (3, 4), [{3: Logprob(-0.5)}, {4: Logprob(-1.5), 3: Logprob(-0.2)}])
    (one,) = read([RequestOutput("r", [1, 2], [output])])
    check(one, [1, 2, 3, 4], [0, 0, 1, 1], [0, 0, -0.5, -1.5])


def test_vllm_openai_responses() -> None:
    chat_choice = {"index": 0, "token_ids": [3], "logprobs": {"content": [{"token": "c", "logprob": -0.5}]}}
    chat = {"id": "chatcmpl-1", "object": "chat.completion", "prompt_token_ids": [1, 2], "choices": [chat_choice]}
    completion_choice = {"index": 0, "prompt_token_ids": [1, 2], "token_ids": [3]}
    completion_choice["logprobs"] = {"tokens": ["c"], "token_logprobs": [-0.5]}
    completion = {"id": "cmpl-1", "object": "text_completion", "choices": [completion_choice]}
    for response in (chat, completion):
        (one,) = read([response])
        check(one, [1, 2, 3], [0, 0, 1], [0, 0, -0.5])
        assert one.id == f"{response['id']}/0"


BAD_VLLM = [
    ({"loss_mask": [1]}, "loss_mask", "expected no mask, got an unknown one"),
    ({"prompt_token_ids": None}, "prompt_token_ids", "ask the server for return_token_ids"),
    ({"outputs": []}, "outputs", "a list of outputs"),
    ({"outputs": [{"text": "c"}]}, "outputs[0].token_ids", "got none"),
    ({"outputs": [{"token_ids": [3.5]}]}, "outputs[0].token_ids", "integer token ids"),
    ({"outputs": [{"token_ids": [3], "logprobs": [-1.0, -2.0]}]}, "outputs[0].logprobs", "response token (1), got 2"),
    ({"outputs": [{"token_ids": [3], "logprobs": [{"9": {"logprob": -1}}]}]}, "outputs[0].logprobs", "sampled token 3"),
    ({"outputs": [{"token_ids": [3], "logprobs": [None]}]}, "logprobs", "null at position 2"),
]


@pytest.mark.parametrize(("change", "name", "message"), BAD_VLLM)
def test_bad_vllm_rows(change: dict[str, Any], name: str, message: str) -> None:
    refused({**VLLM, "id": "v", **change}, "vllm", name, message)


def refused(row: dict[str, Any], fmt: Any, name: str, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        read([row], fmt=fmt)
    assert str(caught.value).startswith("row 1: trajectory '")
    assert f"field {name}: expected " in str(caught.value)
    assert message in str(caught.value)


# -- SGLang -----------------------------------------------------------------------------------------------------------

SGLANG: dict[str, Any] = {
    "text": "cd",
    "output_ids": [3, 4],
    "input_ids": [1, 2],
    "meta_info": {
        "id": "s1",
        "prompt_tokens": 2,
        "completion_tokens": 2,
        "output_token_logprobs": [[-0.5, 3, None], [-1.5, 4, None]],
    },
}


def test_sglang_generate() -> None:
    (one,) = read([SGLANG])
    check(one, [1, 2, 3, 4], [0, 0, 1, 1], [0, 0, -0.5, -1.5])
    assert (one.id, one.group) == ("s1", "s1")
    without = {
        "id": "x",
        "output_ids": [3],
        "input_ids": [1],
        "meta_info": {"id": "s"},
        "sampling_params": {"temperature": 0.6},
    }
    (two,) = read([without])
    check(two, [1, 3], [0, 1])
    assert (two.id, two.temperature) == ("x", 0.6)


def test_sglang_prompt_from_its_logprobs() -> None:
    info = {**SGLANG["meta_info"], "input_token_logprobs": [[None, 1, "a"], [-2.0, 2, "b"]]}
    (one,) = read([{"meta_info": info}])
    check(one, [1, 2, 3, 4], [0, 0, 1, 1], [0, 0, -0.5, -1.5])


BAD_SGLANG = [
    ({"input_ids": None}, "input_ids", "got none"),
    (
        {"input_ids": None, "meta_info": {"prompt_tokens": 9, "input_token_logprobs": [[0, 1, ""]]}},
        "input_ids",
        "1 of 9",
    ),
    ({"output_ids": [3, 5]}, "output_ids", "other ids"),
    ({"output_ids": None, "meta_info": {"id": "s"}}, "output_ids", "ask for return_logprob"),
    ({"meta_info": {"output_token_logprobs": [-0.5]}}, "meta_info.output_token_logprobs", "[logprob, token id, text]"),
    ({"meta_info": []}, "meta_info", "an object"),
]


@pytest.mark.parametrize(("change", "name", "message"), BAD_SGLANG)
def test_bad_sglang_rows(change: dict[str, Any], name: str, message: str) -> None:
    refused({**SGLANG, **change}, "sglang", name, message)


# -- TRL --------------------------------------------------------------------------------------------------------------

TRL: dict[str, Any] = {
    "prompt_ids": [1, 2],
    "completion_ids": [3, 4, 5],
    "env_mask": [1, 0, 1],
    "logprobs": [-0.5, 0.0, -1.5],
    "advantages": 2.0,
}


def test_trl_rollout_rows_and_batches() -> None:
    (one,) = read([TRL])
    check(one, [1, 2, 3, 4, 5], [0, 0, 1, 0, 1], [0, 0, -0.5, 0, -1.5])
    assert one.advantages is not None
    assert one.advantages.tolist() == [2.0] * 5
    batch = {name: [value, value] for name, value in TRL.items()} | {"id": ["a", "b"], "reward": [0.0, 1.0]}
    two, three = read(batch)
    assert (two.id, two.reward, three.id, three.reward) == ("a", 0.0, "b", 1.0)
    assert two.token_ids.tolist() == three.token_ids.tolist() == one.token_ids.tolist()
    nested = {**TRL, "logprobs": [[-0.5, -0.1], [0.0, 0.0], [-1.5, -9.0]]}
    assert read([nested])[0].logprobs.tolist() == one.logprobs.tolist()  # type: ignore[union-attr]


def test_trl_padded_training_batch() -> None:
    batch = {
        "prompt_ids": torch.tensor([[0, 1, 2], [6, 7, 8]]),
        "prompt_mask": torch.tensor([[0, 1, 1], [1, 1, 1]]),
        "completion_ids": torch.tensor([[3, 4, 5, 0], [9, 0, 0, 0]]),
        "completion_mask": torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0]]),
        "tool_mask": torch.tensor([[1, 0, 1, 1], [1, 1, 1, 1]]),
        "sampling_per_token_logps": torch.tensor([[-0.5, 0, -1.5, 9.0], [-2.0, 9.0, 9.0, 9.0]]),
        "old_per_token_logps": torch.full((2, 4), 7.0),
        "ref_per_token_logps": torch.tensor([[-0.25, 0, -1.25, 9.0], [-2.5, 9.0, 9.0, 9.0]]),
        "advantages": torch.tensor([1.0, -1.0]),
        "num_items_in_batch": torch.tensor(4),
    }
    one, two = read([batch])
    check(one, [1, 2, 3, 4, 5], [0, 0, 1, 0, 1], [0, 0, -0.5, 0, -1.5])
    check(two, [6, 7, 8, 9], [0, 0, 0, 1], [0, 0, 0, -2.0])
    assert one.ref_logprobs is not None
    assert one.ref_logprobs.tolist() == [0, 0, -0.25, 0, -1.25]
    assert two.advantages is not None
    assert two.advantages.tolist() == [-1.0] * 4
    masked_out = {**batch, "completion_mask": torch.tensor([[1, 1, 1, 0], [0, 0, 0, 0]])}
    check(read([masked_out])[1], [6, 7, 8], [0, 0, 0], [0, 0, 0])


def test_trl_async_rows() -> None:
    row = {"input_ids": [1, 2, 3], "completion_mask": [0, 1, 1], "old_log_probs": [0.0, -0.5, -1.0], "advantage": 0.5}
    (one,) = read([{**row, "group_id": 3}])
    check(one, [1, 2, 3], [0, 1, 1], [0, -0.5, -1.0])
    assert one.group == "3"
    assert one.advantages is not None
    assert one.advantages.tolist() == [0.5] * 3


BAD_TRL = [
    ({"completion_maks": [1, 0, 1], "reward_mask": [1]}, "reward_mask", "expected one of the masks attention_mask"),
    ({"prompt_ids": None}, "prompt_ids", "got none"),
    ({"env_mask": [1, 0]}, "env_mask", "completion token (3), got shape [2]"),
    ({"env_mask": [1, 2, 0]}, "env_mask", "0/1"),
    ({"logprobs": [-0.5]}, "logprobs", "completion token (3), got shape [1]"),
    ({"advantages": [1.0]}, "advantages", "(3), got shape [1]"),
    ({"completion_ids": [3, 4.5, 5]}, "completion_ids", "integer"),
    ({"prompt_ids": [1, 2, 3], "prompt_mask": [1, 0, 1]}, "prompt_mask", "a hole at position 1"),
]


@pytest.mark.parametrize(("change", "name", "message"), BAD_TRL)
def test_bad_trl_rows(change: dict[str, Any], name: str, message: str) -> None:
    refused({**TRL, **change}, "trl", name, message)


# -- verl -------------------------------------------------------------------------------------------------------------

VERL: dict[str, Any] = {
    "uid": "u",
    "prompts": [0, 0, 1, 2],
    "responses": [3, 4, 5, 0],
    "attention_mask": [0, 0, 1, 1, 1, 1, 1, 0],
    "response_mask": [1, 0, 1, 0],
    "rollout_log_probs": [-0.5, 0.0, -1.5, 0.0],
    "old_log_probs": [7.0, 7.0, 7.0, 7.0],
    "ref_log_prob": [-0.25, 0.0, -1.25, 0.0],
    "advantages": [1.0, 0.0, 2.0, 0.0],
    "token_level_scores": [0.0, 0.0, 1.0, 0.0],
    "input_ids": [0, 0, 1, 2, 3, 4, 5, 0],
    "position_ids": [0, 0, 0, 1, 2, 3, 4, 5],
    "data_source": "x",
}


def verl_is_right(one: Trajectory) -> None:
    check(one, [1, 2, 3, 4, 5], [0, 0, 1, 0, 1], [0, 0, -0.5, 0, -1.5])
    assert one.ref_logprobs is not None
    assert one.ref_logprobs.tolist() == [0, 0, -0.25, 0, -1.25]
    assert one.advantages is not None
    assert one.advantages.tolist() == [0, 0, 1, 0, 2]
    assert (one.group, one.reward) == ("u", 1.0)


def test_verl_padded_rows_batches_and_files(tmp_path: Path) -> None:
    verl_is_right(read([VERL])[0])
    batch = {name: [value] * 2 if isinstance(value, str) else np.array([value] * 2) for name, value in VERL.items()}
    for one in read([batch]):
        verl_is_right(one)
    (tmp_path / "x.jsonl").write_text(json.dumps(VERL))
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pyarrow.Table.from_pylist([VERL]), tmp_path / "x.parquet")
    for name in ("x.jsonl", "x.parquet"):
        (one,) = read(tmp_path / name)
        verl_is_right(one)
        write(tmp_path / "ours.jsonl", [one])
        verl_is_right(read(tmp_path / "ours.jsonl")[0])


def test_verl_agent_loop_output() -> None:
    row = {"prompt_ids": [1, 2], "response_ids": [3, 4, 5], "response_mask": [1, 0, 1], "reward_score": 0.5}
    (one,) = read([{**row, "response_logprobs": [-0.5, 0.0, -1.5]}])
    check(one, [1, 2, 3, 4, 5], [0, 0, 1, 0, 1], [0, 0, -0.5, 0, -1.5])
    assert one.reward == 0.5


BAD_VERL = [
    ({"loss_mask": [1, 0, 1, 0]}, "loss_mask", "expected one of the masks attention_mask, response_mask"),
    ({"prompts": None}, "prompts", "(or prompt_ids), got none"),
    ({"attention_mask": [1] * 7}, "attention_mask", "prompt and response token (8), got shape [7]"),
    ({"attention_mask": [0, 0, 1, 0, 1, 1, 1, 0]}, "attention_mask", "a hole at position 3"),
    ({"response_mask": [1, 0, 1]}, "response_mask", "response token (4), got shape [3]"),
    ({"rollout_log_probs": [0.0]}, "rollout_log_probs", "response token (4), got shape [1]"),
    ({"rollout_log_probs": [0.0, 0.0, float("nan"), 0.0]}, "logprobs", "nan at position 4"),
]


@pytest.mark.parametrize(("change", "name", "message"), BAD_VERL)
def test_bad_verl_rows(change: dict[str, Any], name: str, message: str) -> None:
    refused({**VERL, **change}, "verl", name, message)


def test_padding_without_an_attention_mask_is_not_guessed() -> None:
    refused({**VERL, "attention_mask": None}, "verl", "attention_mask", "got none")
