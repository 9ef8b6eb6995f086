"""The input contract: what `Trajectory` takes, makes of it, and refuses."""

from typing import Any

import numpy as np
import pytest
import torch

from harts import Trajectory

OK: dict[str, Any] = {"id": "a/0", "group": "a", "token_ids": [5, 6, 7], "loss_mask": [0, 1, 1]}


def make(**changes: Any) -> Trajectory:
    return Trajectory(**{**OK, **changes})


def test_fields_have_the_promised_types() -> None:
    trajectory = make(
        logprobs=[0, -1, -2.5], ref_logprobs=[0.0, -1.0, -2.0], advantages=2, reward=1, merge_keys=[0, 1, 1]
    )
    assert trajectory.token_ids.dtype == np.int32
    assert trajectory.loss_mask.dtype == np.bool_
    assert trajectory.logprobs is not None
    assert trajectory.logprobs.dtype == np.float64
    assert trajectory.advantages is not None
    assert trajectory.advantages.tolist() == [2.0, 2.0, 2.0]
    assert trajectory.merge_keys is not None
    assert trajectory.merge_keys.dtype == np.int64
    assert trajectory.reward == 1.0
    assert isinstance(trajectory.reward, float)
    assert trajectory.temperature == 1.0
    assert len(trajectory) == 3
    assert trajectory.num_trained == 2


@pytest.mark.parametrize("as_type", [list, tuple, np.array, torch.tensor])
def test_any_sequence_is_taken(as_type: Any) -> None:
    trajectory = make(token_ids=as_type([5, 6, 7]), loss_mask=as_type([0, 1, 1]), logprobs=as_type([0.0, -1.0, -2.0]))
    assert trajectory.token_ids.tolist() == [5, 6, 7]
    assert trajectory.loss_mask.tolist() == [False, True, True]


def test_arrays_are_read_only() -> None:
    with pytest.raises(ValueError, match="read-only"):
        make().token_ids[0] = 1


def test_one_untrained_token_is_a_trajectory() -> None:
    assert make(token_ids=[2**31 - 1], loss_mask=[0]).num_trained == 0


def test_name_falls_back_to_the_group() -> None:
    assert make().name == "'a/0'"
    assert make(id="").name == "of group 'a'"
    assert make(id="", group="").name == "(unnamed)"


BAD = [
    ("token_ids", [], "at least one token"),
    ("token_ids", [1, 2.5, 3], "integers"),
    ("token_ids", ["1", "2", "3"], "numbers"),
    ("token_ids", [1, None, 3], "null among them"),
    ("token_ids", [1, 2**80, 3], "no machine numbers"),
    ("token_ids", [1, -2, 3], "-2 at position 1"),
    ("token_ids", [1, 2, 2**31], "2147483648 at position 2"),
    ("token_ids", [[1, 2, 3]], r"shape \[1, 3\]"),
    ("token_ids", [[1], [2, 3]], "ragged"),
    ("loss_mask", [0, 1], "one value per token (3), got 2 values"),
    ("loss_mask", [0, 0.5, 1], "0.5"),
    ("loss_mask", [1, 1, 1], "first token"),
    ("logprobs", [0.0, -1.0], "one value per token (3), got 2 values"),
    ("logprobs", [0.0, float("nan"), -1.0], "nan at position 1"),
    ("logprobs", [0.0, -1.0, float("-inf")], "-inf at position 2"),
    ("ref_logprobs", -1.0, "one value per token"),
    ("advantages", [1.0, 2.0], "one value per token (3), got 2 values"),
    ("advantages", float("inf"), "inf at position 0"),
    ("reward", float("nan"), "finite"),
    ("reward", True, "a number"),
    ("reward", "1", "a number"),
    ("temperature", 0, "a number > 0"),
    ("temperature", -0.5, "a number > 0"),
    ("temperature", float("inf"), "finite"),
    ("merge_keys", [0, 1], "one value per token (3), got 2 values"),
    ("merge_keys", [0.0, 1.0, 2.0], "integers"),
    ("merge_keys", np.array([0, 1, 2**63], np.uint64), "2**63"),
]


@pytest.mark.parametrize(("field", "value", "message"), BAD)
def test_bad_values_name_trajectory_and_field(field: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        make(**{field: value})
    text = str(caught.value)
    assert text.startswith(f"trajectory 'a/0', field {field}: expected ")
    assert message.replace("\\", "") in text


@pytest.mark.parametrize("field", ["group", "id"])
def test_names_are_strings(field: str) -> None:
    with pytest.raises(ValueError, match=f"field {field}: expected a string"):
        make(**{field: 7})


def test_what_was_checked_does_not_change_with_the_callers_memory() -> None:
    ids = np.array([1, 2, 3], np.int32)
    keys = np.array([0, 1, 2])
    trajectory = Trajectory(token_ids=ids, loss_mask=[0, 1, 1], merge_keys=keys)
    ids[:] = -7
    keys[:] = 9
    assert trajectory.token_ids.tolist() == [1, 2, 3]
    assert trajectory.merge_keys.tolist() == [0, 1, 2]


def test_tensors_that_numpy_cannot_read_get_a_clear_error() -> None:
    torch = pytest.importorskip("torch")
    for tensor in (torch.zeros(2, dtype=torch.bfloat16), torch.zeros(2, requires_grad=True)):
        with pytest.raises(ValueError, match=r"field logprobs: .* pass tensor\.detach\(\)\.float\(\)\.cpu\(\)"):
            Trajectory(token_ids=[1, 2], loss_mask=[0, 1], logprobs=tensor)
