"""Trajectories into flat tensors, and what is refused at the door."""

from dataclasses import replace

import pytest
import torch

from harts import Trajectory
from harts.losses import LossConfig, LossInputs, StepDenominators, make_loss


def trajectory(name: str, **fields: object) -> Trajectory:
    return Trajectory(**({"token_ids": [1, 2, 3], "loss_mask": [0, 1, 1], "group": "g", "id": name} | fields))


FULL = {"logprobs": [0, -1, -2], "ref_logprobs": [0, -3, -4], "advantages": [0, 1, 2]}
STEP = [
    trajectory("a", **FULL),
    trajectory("b", token_ids=[5], loss_mask=[0]),
    trajectory("c", **(FULL | {"advantages": -1.0})),
]


def test_fields_are_laid_trajectory_after_trajectory() -> None:
    logprobs = torch.randn(7, requires_grad=True)
    inputs = LossInputs.from_trajectories(STEP, logprobs, sequences=[4, 0, 2])
    assert inputs.logprobs_N is logprobs
    assert inputs.loss_mask_N.tolist() == [False, True, True, False, False, True, True]
    assert inputs.sequence_of_N.tolist() == [4, 4, 4, 0, 2, 2, 2]
    assert inputs.old_logprobs_N.tolist() == [0, -1, -2, 0, 0, -1, -2]
    assert inputs.behaviour_logprobs_N.tolist() == [0, -1, -2, 0, 0, -1, -2]
    assert inputs.ref_logprobs_N.tolist() == [0, -3, -4, 0, 0, -3, -4]
    assert inputs.advantages_N.tolist() == [0, 1, 2, 0, -1, -1, -1]
    assert inputs.entropy_N is None
    assert inputs.advantages_N.dtype == torch.float32


@pytest.mark.parametrize(
    ("dtype", "wide"), [(torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64, torch.float64)]
)
def test_numbers_keep_at_least_float32(dtype: torch.dtype, wide: torch.dtype) -> None:
    step = [trajectory("a", advantages=0.1)]
    inputs = LossInputs.from_trajectories(step, torch.zeros(3, dtype=dtype), sequences=[0])
    assert inputs.advantages_N.dtype == wide
    assert inputs.advantages_N[1].item() == torch.tensor(0.1, dtype=wide).item()


def test_given_log_probabilities_take_the_place_of_recorded_ones() -> None:
    old, ref = torch.arange(7.0), torch.arange(7.0) + 1
    inputs = LossInputs.from_trajectories(
        STEP, torch.zeros(7), sequences=range(3), old_logprobs=old, ref_logprobs=ref, entropy=torch.ones(7)
    )
    assert inputs.old_logprobs_N is old
    assert inputs.ref_logprobs_N is ref
    assert inputs.behaviour_logprobs_N[1].item() == -1
    assert inputs.entropy_N.sum().item() == 7


def test_a_field_that_one_lacks_is_none_unless_required() -> None:
    step = [STEP[0], trajectory("x", logprobs=[0, 0, 0])]
    inputs = LossInputs.from_trajectories(step, torch.zeros(6), sequences=range(2))
    assert inputs.advantages_N is None
    assert inputs.old_logprobs_N is not None
    with pytest.raises(ValueError, match=r"trajectory 'x', field advantages: .*got none; .*fill_advantages"):
        LossInputs.from_trajectories(step, torch.zeros(6), sequences=range(2), requires={"advantages"})


def test_missing_fields_are_named_before_any_compute() -> None:
    step = [STEP[0], trajectory("x", advantages=1.0)]
    with pytest.raises(ValueError, match=r"trajectory 'x', field logprobs: .*the loss needs old_logprobs, got none"):
        make_loss(LossConfig()).check(step)
    make_loss(LossConfig()).check(step, given=["old_logprobs"])
    make_loss(LossConfig(algorithm="supervised")).check(step)
    with pytest.raises(ValueError, match="trajectory 'x', field ref_logprobs"):
        make_loss(LossConfig(algorithm="reinforce", kl_coef=0.1)).check(step)
    with pytest.raises(ValueError, match=r"trajectory 'y', field group: .*got none; name the task"):
        make_loss(LossConfig(algorithm="supervised", normalization="group")).check([STEP[0], trajectory("y", group="")])
    make_loss(LossConfig(kl_coef=0.1)).check(STEP)  # 'b' has no trained token: it needs nothing


def test_tis_needs_the_trainers_own_log_probabilities() -> None:
    loss = make_loss(LossConfig(tis_cap=2.0))
    with pytest.raises(ValueError, match=r"old_logprobs: expected the trainer's own.*pass what it gives"):
        LossInputs.from_trajectories(STEP, torch.zeros(7), sequences=range(3), requires=loss.requires)
    inputs = LossInputs.from_trajectories(
        STEP, torch.zeros(7), sequences=range(3), requires=loss.requires, old_logprobs=torch.zeros(7)
    )
    metrics = loss(inputs, StepDenominators.from_trajectories(STEP)).metrics.values()
    assert metrics["tis_ratio_max"] == pytest.approx(7.389056, rel=1e-6)  # exp(2)


def test_entropy_must_be_passed_where_required() -> None:
    with pytest.raises(ValueError, match=r"entropy: expected a tensor.*ask the model"):
        LossInputs.from_trajectories(STEP, torch.zeros(7), sequences=range(3), requires={"entropy"})


def test_wrong_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match=r"logprobs: expected one value per token of 3 trajectories \(\[7\]\)"):
        LossInputs.from_trajectories(STEP, torch.zeros(6), sequences=range(3))
    with pytest.raises(ValueError, match=r"sequences: expected one index per trajectory \(3\), got 2"):
        LossInputs.from_trajectories(STEP, torch.zeros(7), sequences=range(2))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("loss_mask_N", torch.ones(7), r"loss_mask_N: expected bool \[7\]"),
        ("sequence_of_N", torch.zeros(7, dtype=torch.int32), r"sequence_of_N: expected int64 \[7\]"),
        ("advantages_N", torch.zeros(3), r"advantages_N: expected floating point \[7\] .*\[3\]"),
        ("advantages_N", torch.zeros(7, dtype=torch.int64), "advantages_N: expected floating point"),
        ("logprobs_N", torch.zeros(7, 1), "logprobs_N: expected a flat tensor"),
        ("ref_logprobs_N", torch.zeros(7, device="meta"), "ref_logprobs_N: .* on meta"),
    ],
)
def test_wrong_tensors_are_refused(name: str, value: torch.Tensor, message: str) -> None:
    inputs = LossInputs.from_trajectories(STEP, torch.zeros(7), sequences=range(3))
    with pytest.raises(ValueError, match=message):
        replace(inputs, **{name: value})


def test_a_missing_tensor_is_named() -> None:
    inputs = LossInputs.from_trajectories(STEP, torch.zeros(7), sequences=range(3))
    with pytest.raises(ValueError, match="advantages_N: expected a tensor, as the loss needs it, got none"):
        make_loss(LossConfig())(replace(inputs, advantages_N=None), StepDenominators.from_trajectories(STEP))


def test_messages_name_the_trajectory() -> None:
    logprobs = torch.tensor([0.0, -1, -1, 0, 0, float("-inf"), -1])
    inputs = LossInputs.from_trajectories(STEP, logprobs, sequences=range(3))
    loss, denominators = make_loss(LossConfig(algorithm="supervised")), StepDenominators.from_trajectories(STEP)
    with pytest.raises(ValueError, match=r"trajectory 'c' \(number 2 of the step\), field logprobs: .*-inf at token 5"):
        loss(inputs, denominators)


def test_gspo_wants_one_advantage_a_sequence() -> None:
    inputs = LossInputs.from_trajectories(STEP, torch.zeros(7), sequences=range(3))
    denominators = StepDenominators.from_trajectories(STEP)
    with pytest.raises(ValueError, match=r"trajectory 'a'.*field advantages: expected one value.*use .*'gspo_token'"):
        make_loss(LossConfig(algorithm="gspo"))(inputs, denominators)
    make_loss(LossConfig(algorithm="gspo_token"))(inputs, denominators)


def test_no_gradient_into_anything_but_logprobs_and_entropy() -> None:
    tensors = {name: torch.zeros(7, requires_grad=True) for name in ("old_logprobs", "ref_logprobs", "entropy")}
    logprobs = torch.zeros(7, requires_grad=True)
    loss = make_loss(LossConfig(kl_coef=0.1, entropy_coef=0.1))
    inputs = LossInputs.from_trajectories(STEP, logprobs, sequences=range(3), requires=loss.requires, **tensors)
    loss(inputs, StepDenominators.from_trajectories(STEP)).loss.backward()
    assert logprobs.grad is not None
    assert tensors["entropy"].grad is not None
    assert tensors["old_logprobs"].grad is None
    assert tensors["ref_logprobs"].grad is None
