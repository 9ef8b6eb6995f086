"""Rows of verifiers and prime-rl, which have TRL's names with another meaning; fields that no reader uses."""

import logging
from pathlib import Path
from typing import Any

import pytest

from harts.formats import read

ROW: dict[str, Any] = {
    "prompt_ids": [1, 2],
    "prompt_mask": [0, 0],
    "completion_ids": [3, 4, 5, 6],
    "completion_mask": [1, 0, 1, 0],
    "completion_logprobs": [-0.5, 0.0, -0.25, 0.0],
}


def test_the_prompt_and_the_tail_are_kept_and_log_probabilities_read() -> None:
    (one,) = read([{**ROW, "example_id": 7, "advantage": 0.5, "reward": 1.0, "completion_temperatures": [0.7] * 4}])
    assert one.token_ids.tolist() == [1, 2, 3, 4, 5, 6]
    assert one.loss_mask.astype(int).tolist() == [0, 0, 1, 0, 1, 0]
    assert one.logprobs is not None
    assert one.logprobs.tolist() == [0, 0, -0.5, 0, -0.25, 0]
    assert (one.group, one.reward, one.temperature) == ("7", 1.0, pytest.approx(0.7))


def test_batches_and_rollouts_of_steps() -> None:
    batch = {name: [value, value] for name, value in ROW.items()}
    one, two = read([{**batch, "rewards": [0.0, 1.0]}])
    assert (one.reward, two.reward) == (0.0, 1.0)
    assert one.token_ids.tolist() == two.token_ids.tolist() == [1, 2, 3, 4, 5, 6]
    steps = [{"tokens": ROW, "advantage": 1.0}, {"tokens": {**ROW, "prompt_ids": [1, 9]}, "reward": 0.5}]
    first, second = read([{"example_id": 3, "id": "a", "reward": 1.0, "trajectory": steps}])
    assert [(t.id, t.group, t.reward) for t in (first, second)] == [("a/step0", "3", 1.0), ("a/step1", "3", 0.5)]
    assert second.token_ids.tolist() == [1, 9, 3, 4, 5, 6]
    assert first.advantages is not None
    assert first.advantages[2] == 1.0


def test_rows_without_log_probabilities_go_by_name() -> None:
    row = {name: value for name, value in ROW.items() if name != "completion_logprobs"}
    with pytest.raises(ValueError, match=r"field prompt_mask: .* 0 at all of them; .*--format verifiers"):
        read([row])
    (one,) = read([{**row, "prompt_mask": [0, 1]}], fmt="verifiers")
    assert one.loss_mask.astype(int).tolist() == [0, 1, 1, 0, 1, 0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt_mask": [0, 1]}, "field prompt_mask: expected 0 "),
        ({"completion_logprobs": [-1.0]}, "field completion_logprobs: expected one value per completion token"),
        ({"completion_temperatures": [0.5, 1.0, 1.0, 1.0]}, "field completion_temperatures: expected one temperature"),
        ({"tool_mask": [1, 1, 1, 1]}, "field tool_mask: expected one of the masks"),
        ({"completion_ids": None, "trajectory": [{"tokens": None}]}, "field trajectory[0].tokens: expected"),
    ],
)
def test_bad_rows(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        read([{**ROW, **change}], fmt="verifiers")
    assert message in str(caught.value)


def test_verl_rows_whose_mask_takes_the_prompt_are_refused() -> None:
    row = {"prompts": [1, 2], "responses": [3], "attention_mask": [0, 0, 1]}
    with pytest.raises(ValueError, match=r"field attention_mask: .*0 at all of them"):
        read([row])


def test_fields_that_are_not_used_are_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows: list[dict[str, Any]] = [
        {"prompt_ids": [1], "completion_ids": [2], "logprobs": [-1.0], "old_per_token_logps": [-2.0], "text": "x"},
        {"prompt_ids": [1], "completion_ids": [2], "text": "y", "score\x1b": 1, "nothing": None},
    ]
    with caplog.at_level(logging.WARNING, "harts.formats"):
        read(rows)
    first, second = caplog.messages
    assert first.startswith("row 1: present and not used: old_per_token_logps, text (read as trl")
    assert second.startswith(r"row 2: present and not used: score\x1b (read as trl")
    caplog.clear()
    with caplog.at_level(logging.WARNING, "harts.formats"):
        read([{**ROW, "is_truncated": False}], limit=1)
    assert "not used: is_truncated (read as verifiers" in caplog.messages[0]
