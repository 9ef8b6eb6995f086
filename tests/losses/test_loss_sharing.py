"""Tokens that several trajectories train: counted as often as they are trained, or once in a rollout."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

from harts.losses import LossConfig, LossInputs, StepDenominators, make_loss, own_once
from harts.testing.trees import random_trajectories
from harts.trajectory import Trajectory

NORMALIZATIONS = ["token", "sequence", "group", "constant"]


def trajectory(tokens: list[int], mask: list[int], advantage: float = 1.0, group: str = "g", **more: Any) -> Trajectory:
    return Trajectory(token_ids=tokens, loss_mask=mask, group=group, advantages=advantage, **more)


STEP = [
    trajectory([1, 2, 3, 4], [0, 1, 1, 1], 1.0),
    trajectory([1, 2, 3, 5], [0, 1, 0, 1], 3.0),  # trains 2 again; 3 is context here
    trajectory([1, 2, 3, 4], [0, 1, 1, 1], 2.0, group="h"),  # another rollout
    trajectory([1, 2], [0, 1], 5.0),
]


def weights(step: list[Trajectory], rollouts: Any = None) -> list[list[float]]:
    return [weight.tolist() for weight in own_once(step, rollouts)]


def test_a_token_has_a_share_in_each_trajectory_that_trains_it() -> None:
    third = 1 / 3
    assert weights(STEP) == [[0, third, 1, 1], [0, third, 0, 1], [0, 1, 1, 1], [0, third]]
    assert weights(STEP, ["a", "b", "c", "a"]) == [[0, 0.5, 1, 1], [0, 1, 0, 1], [0, 1, 1, 1], [0, 0.5]]
    assert weights(STEP, [0, 0, 0, 0])[2] == [0, 0.25, 0.5, 0.5]


def test_what_does_not_merge_is_not_the_same() -> None:
    keyed = [trajectory([1, 2], [0, 1], merge_keys=[0, key]) for key in (0, 1)]
    assert weights(keyed) == [[0, 1], [0, 1]]
    shifted = [trajectory([1, 2, 3], [0, 0, 1]), trajectory([2, 3], [0, 1])]
    assert weights(shifted) == [[0, 0, 1], [0, 1]]


@pytest.mark.parametrize("seed", range(10))
def test_shares_are_those_of_a_count_by_prefixes(seed: int) -> None:
    step = random_trajectories(np.random.default_rng(seed), num_trajectories=8, max_length=40, vocab_size=3)
    names = [index % 2 for index in range(len(step))]
    keys = [
        [(name, tuple(one.token_ids[: at + 1].tolist())) if one.loss_mask[at] else None for at in range(len(one))]
        for name, one in zip(names, step, strict=True)
    ]
    count = Counter(key for each in keys for key in each if key)
    assert weights(step, names) == [[1 / count[key] if key else 0.0 for key in each] for each in keys]


@pytest.mark.parametrize("normalization", NORMALIZATIONS)
def test_the_objective_of_a_shared_token_is_the_mean_over_its_trajectories(normalization: Any) -> None:
    """Against loops: each token with 1/k of its sequence's weight, counts of tokens as sums of shares."""
    size = 4 if normalization == "constant" else None
    config = LossConfig(algorithm="reinforce", normalization=normalization, max_length=size, shared_tokens="once")
    logprobs = torch.linspace(-2.0, -0.5, sum(map(len, STEP)), dtype=torch.float64).requires_grad_()
    inputs = LossInputs.from_trajectories(STEP, logprobs, sequences=range(4), requires=config.requires)
    denominators = StepDenominators.from_trajectories(STEP, shared_tokens="once")
    loss = make_loss(config)(inputs, denominators).loss
    loss.backward()
    shares = own_once(STEP)
    owned = [share.sum() for share in shares]
    in_group = {name: sum(o for o, t in zip(owned, STEP, strict=True) if t.group == name) for name in ("g", "h")}
    divisor = {
        "token": [sum(owned)] * 4,
        "sequence": [4 * o for o in owned],
        "group": [2 * in_group[t.group] for t in STEP],
        "constant": [4 * 4] * 4,
    }[normalization]
    expected = []
    for share, one, by in zip(shares, STEP, divisor, strict=True):
        assert one.advantages is not None
        expected += [-s * a / by for s, a in zip(share, one.advantages, strict=True)]
    assert logprobs.grad is not None
    torch.testing.assert_close(logprobs.grad, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-15)
    if normalization != "constant":
        weight = sum(s / by for share, by in zip(shares, divisor, strict=True) for s in share)
        assert weight == pytest.approx(1.0)


@pytest.mark.parametrize("normalization", NORMALIZATIONS)
def test_microbatches_of_the_step_add_up(normalization: Any) -> None:
    size = 4 if normalization == "constant" else None
    config = LossConfig(algorithm="grpo", normalization=normalization, max_length=size, shared_tokens="once")
    step = [
        Trajectory(token_ids=t.token_ids, loss_mask=t.loss_mask, group=t.group, advantages=t.advantages,
                   logprobs=np.full(len(t), -1.0)) for t in STEP
    ]  # fmt: skip
    denominators = StepDenominators.from_trajectories(step, shared_tokens="once")

    def of(indices: list[int]) -> float:
        own = [step[index] for index in indices]
        logprobs = torch.cat([torch.linspace(-1.2, -0.9, len(t), dtype=torch.float64) for t in own])
        inputs = LossInputs.from_trajectories(own, logprobs, sequences=indices, requires=config.requires)
        return float(make_loss(config)(inputs, denominators).loss)

    assert of([2, 0]) + of([3, 1]) == pytest.approx(of([0, 1, 2, 3]), rel=1e-12)


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match="field shared_tokens: expected one of each, once, got 'twice'"):
        LossConfig(shared_tokens="twice")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="field shared_tokens: expected 'each' with algorithm='gspo'"):
        LossConfig(algorithm="gspo", shared_tokens="once")
    with pytest.raises(ValueError, match="field group: expected the rollout that it is of"):
        own_once([trajectory([1, 2], [0, 1], group="", id="x")])
    with pytest.raises(ValueError, match=r"rollouts: expected a name for each trajectory \(4\), got 1"):
        own_once(STEP, ["a"])
    with pytest.raises(ValueError, match="rollouts: expected none with shared_tokens='each'"):
        StepDenominators.from_trajectories(STEP, rollouts=[1, 2, 3, 4])
    for shares, message in (([1.0, 1.0], "a share for each"), ([0.0], "shares above 0"), ([1.5], "shares above 0")):
        with pytest.raises(ValueError, match=message):
            StepDenominators(tokens_of_S=torch.tensor([1]), share_of_S=(torch.tensor(shares),))
    logprobs = torch.zeros(sum(map(len, STEP)))
    inputs = LossInputs.from_trajectories(STEP, logprobs, sequences=range(4))
    for asked, made in (("once", "each"), ("each", "once")):
        loss = make_loss(LossConfig(algorithm="reinforce", shared_tokens=asked))  # type: ignore[arg-type]
        denominators = StepDenominators.from_trajectories(STEP, shared_tokens=made)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=f"expected those of shared_tokens='{asked}', .* got those of '{made}'"):
            loss(inputs, denominators)
