"""Runs that look healthy and are not are told so before the first step."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

import harts
from harts.losses import LossConfig
from harts.testing.trees import random_trajectories
from harts.train import TrainConfig, Trainer
from harts.trajectory import Trajectory


def lines(tmp_path: Path, trajectories: list[Trajectory], **settings: object) -> list[str]:
    harts.write(tmp_path / "data.jsonl", trajectories)
    config = TrainConfig(data=str(tmp_path / "data.jsonl"), steps=1, loss=LossConfig(algorithm="grpo"), **settings)  # type: ignore[arg-type]
    said: list[str] = []
    Trainer(config, tmp_path / "run", log=said.append)
    return [line for line in said if line.startswith("note: ")]


def rollouts(rewards: list[float], *, recorded: bool = True) -> list[Trajectory]:
    found = random_trajectories(np.random.default_rng(0), num_trajectories=len(rewards), vocab_size=40)
    return [
        dataclasses.replace(
            each, reward=reward, group=f"g{i // 2}", advantages=None, logprobs=each.logprobs if recorded else None
        )
        for i, (each, reward) in enumerate(zip(found, rewards, strict=True))
    ]


@pytest.mark.parametrize(
    ("rewards", "recorded", "settings", "expected"),
    [
        ([0, 1, 1, 0], True, {"dtype": "float32"}, None),
        ([1, 1, 0, 0], True, {"dtype": "float32"}, "all 4 trajectories have advantage zero"),
        ([1, 1, 0, 1], True, {"dtype": "float32"}, "2 of 4 trajectories have advantage zero"),
        ([0, 1, 1, 0], False, {"dtype": "float32"}, "no behaviour log-probs"),
    ],
)
def test_notes(
    tmp_path: Path, rewards: list[float], recorded: bool, settings: dict[str, object], expected: str | None
) -> None:
    said = lines(tmp_path, rollouts(rewards, recorded=recorded), **settings)
    assert len(said) == (expected is not None)
    assert expected is None or expected in said[0]
