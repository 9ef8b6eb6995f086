"""Token rows of slime and Atropos."""

from typing import Any

import pytest

from harts.formats import read

SLIME: dict[str, Any] = {
    "group_index": 3,
    "index": 9,
    "tokens": [1, 2, 3, 4, 5],
    "response": "...",
    "response_length": 3,
    "loss_mask": [1, 0, 1],
    "rollout_log_probs": [-0.5, 0.0, -0.25],
    "reward": 1.0,
    "status": "completed",
}
ATROPOS: dict[str, Any] = {
    "tokens": [[1, 2, 3], [1, 2, 4, 5]],
    "masks": [[-100, -100, 3], [-100, -100, 4, 5]],
    "scores": [1.0, -1.0],
    "inference_logprobs": [[1.0, 1.0, -0.5], [1.0, 1.0, -0.25, -0.125]],
}


def test_slime() -> None:
    (one,) = read([SLIME])
    assert one.token_ids.tolist() == [1, 2, 3, 4, 5]
    assert one.loss_mask.astype(int).tolist() == [0, 0, 1, 0, 1]
    assert one.logprobs is not None
    assert one.logprobs.tolist() == [0, 0, -0.5, 0, -0.25]
    assert (one.group, one.reward) == ("3", 1.0)
    bare = {name: SLIME[name] for name in ("tokens", "response_length")}
    assert read([bare])[0].loss_mask.astype(int).tolist() == [0, 0, 1, 1, 1]
    removed = read([bare, {**SLIME, "remove_sample": True}])[1]
    assert removed.num_trained == 0


def test_atropos() -> None:
    one, two = read([ATROPOS])
    assert [(t.id, t.group, t.reward) for t in (one, two)] == [("row0/0", "row0", 1.0), ("row0/1", "row0", -1.0)]
    assert two.token_ids.tolist() == [1, 2, 4, 5]
    assert two.loss_mask.astype(int).tolist() == [0, 0, 1, 1]
    assert two.logprobs is not None
    assert two.logprobs.tolist() == [0, 0, -0.25, -0.125]
    (item,) = read([{name: column[0] for name, column in ATROPOS.items()} | {"advantages": [0.0, 0.0, 2.0]}])
    assert item.token_ids.tolist() == [1, 2, 3]
    assert item.advantages is not None
    assert item.advantages.tolist() == [0, 0, 2]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {**SLIME, "response_length": 6},
            "field response_length: expected a whole number from 0 to the 5 tokens, got 6",
        ),
        ({**SLIME, "reward": {"score": 1.0}}, "field reward: expected a number, got an object of score"),
        ({**SLIME, "loss_mask": [1]}, "field loss_mask: expected one value per response token (3)"),
        ({**ATROPOS, "masks": [[0, 0, 1], [0, 0, 1, 1]]}, "field masks: expected -100 where untrained and the token"),
        ({**ATROPOS, "masks": [[-100, 2], [-100, 2]]}, "field masks: expected one value per sample's token (3)"),
    ],
)
def test_bad_rows(row: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        read([row])
    assert message in str(caught.value)
