"""Settings: what is valid, what is in force, what a loss needs."""

from dataclasses import FrozenInstanceError

import pytest
import torch

from harts.losses import LossConfig, kl_estimate, make_loss
from harts.losses.policy import POLICY_LOSSES


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"algorithm": "dpo"}, "field algorithm: expected one of supervised, reinforce, ppo, grpo, gspo, .*'dpo'"),
        ({"normalization": "batch"}, "field normalization: expected one of token, sequence, group, constant"),
        ({"kl_estimator": "k4"}, "field kl_estimator: expected one of k1, k2, k3"),
        ({"clip_low": 1.5}, r"field clip_low: expected a number in \[0, 1\] or None, got 1.5"),
        ({"clip_high": -0.1}, "field clip_high: expected a number >= 0"),
        ({"clip_high": float("nan")}, "field clip_high"),
        ({"clip_high": float("inf")}, "field clip_high"),
        ({"clip_high": True}, "field clip_high"),
        ({"clip_high": "0.2"}, "field clip_high"),
        ({"dual_clip": 1.0}, "field dual_clip: expected a number > 1"),
        ({"kl_coef": -1}, "field kl_coef: expected a number >= 0, got -1"),
        ({"kl_coef": None}, "field kl_coef"),
        ({"entropy_coef": -1}, "field entropy_coef"),
        ({"tis_cap": 0}, "field tis_cap: expected a number > 0"),
        ({"normalization": "constant"}, "field max_length: expected an integer >= 1 .*got None"),
        ({"normalization": "constant", "max_length": 2.5}, "field max_length: expected an integer"),
        ({"normalization": "constant", "max_length": 0}, "field max_length: expected an integer"),
        ({"max_length": 5}, "field max_length: expected None with normalization='token'"),
        ({"algorithm": "reinforce", "clip_low": 0.2}, "field clip_low: .*only these use it: ppo, grpo, gspo, "),
        ({"algorithm": "supervised", "tis_cap": 2}, "field tis_cap: expected None with algorithm='supervised'"),
        ({"algorithm": "gspo", "tis_cap": 2}, "field tis_cap"),
        ({"algorithm": "cispo", "dual_clip": 2}, "field dual_clip: .*only these use it: ppo, grpo"),
    ],
)
def test_bad_settings_are_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LossConfig(**fields)


def test_frozen_and_keyword_only() -> None:
    with pytest.raises(FrozenInstanceError):
        LossConfig().kl_coef = 1.0
    with pytest.raises(TypeError):
        LossConfig("grpo")


def test_defaults_in_force() -> None:
    assert LossConfig().averaging == "token"
    assert LossConfig(algorithm="gspo").averaging == "sequence"
    assert LossConfig(algorithm="gspo", normalization="token").averaging == "token"
    assert LossConfig().ratio_bounds == (0.8, 1.2)
    assert LossConfig(clip_high=0.28).ratio_bounds == (0.8, 1.28)
    assert LossConfig(algorithm="gspo").ratio_bounds == (1 - 3e-4, 1 + 4e-4)
    assert LossConfig(algorithm="cispo").ratio_bounds == (0, 5)
    with pytest.raises(ValueError, match="one that clips"):
        _ = LossConfig(algorithm="supervised").ratio_bounds


def test_what_is_required() -> None:
    assert LossConfig(algorithm="supervised").requires == set()
    assert LossConfig(algorithm="reinforce").requires == {"advantages"}
    for algorithm in ("ppo", "grpo", "gspo", "gspo_token", "cispo"):
        assert make_loss(LossConfig(algorithm=algorithm)).requires == {"advantages", "old_logprobs"}
    everything = LossConfig(kl_coef=1, entropy_coef=1, tis_cap=2, normalization="group")
    assert everything.requires == {
        "advantages", "old_logprobs", "behaviour_logprobs", "ref_logprobs", "entropy", "group",
    }  # fmt: skip


@pytest.mark.parametrize("algorithm", POLICY_LOSSES)
def test_every_objective_can_be_chosen(algorithm: str) -> None:
    assert make_loss(LossConfig(algorithm=algorithm)).config.algorithm == algorithm


def test_unknown_estimator() -> None:
    with pytest.raises(ValueError, match="estimator: expected one of k1, k2, k3, got 'k0'"):
        kl_estimate(torch.zeros(1), torch.zeros(1), "k0")


def test_k3_keeps_its_digits_for_close_policies() -> None:
    delta = 1e-4
    value = kl_estimate(torch.tensor([-1.0]), torch.tensor([-1.0 + delta]), "k3").item()
    exact = (-1.0 + delta) - -1.0
    assert value == pytest.approx(exact**2 / 2, rel=0.02)
