"""Schedules are those that transformers computes, and no setting is lost on the way to the optimiser."""

from typing import Any

import pytest
import torch
from transformers import get_scheduler

from harts.train import TrainConfig
from harts.train.build import make_optimizer


@pytest.mark.parametrize(
    ("schedule", "theirs", "settings"),
    [
        ("constant", "constant", {}),
        ("linear", "linear", {}),
        ("cosine", "cosine_with_min_lr", {"min_lr_rate": 0.1}),
        ("wsd", "warmup_stable_decay", {"num_decay_steps": 6, "decay_type": "linear", "min_lr_ratio": 0.1}),
    ],
)
def test_schedules_are_those_of_transformers(schedule: Any, theirs: str, settings: dict[str, Any]) -> None:
    """After a warm-up, which here ends at the full rate and does not begin at 0."""
    changes: dict[str, Any] = {"decay_steps": 6} if schedule == "wsd" else {}
    minimum = 0.1 if settings else 0.0
    config = TrainConfig(
        data="x", steps=20, warmup_steps=4, learning_rate=1.0, schedule=schedule, min_learning_rate=minimum, **changes
    )
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    scheduler = get_scheduler(
        theirs, optimizer, num_warmup_steps=4, num_training_steps=20, scheduler_specific_kwargs=settings
    )
    expected = []
    for _ in range(20):
        expected.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    found = [config.learning_rate_at(step) for step in range(20)]
    assert found[:4] == pytest.approx([0.25, 0.5, 0.75, 1.0])
    assert found[4:] == pytest.approx(expected[4:])


def test_the_optimizer_has_the_settings() -> None:
    config = TrainConfig(data="x", beta1=0.8, beta2=0.95, epsilon=1e-6, weight_decay=0.1, learning_rate=0.5)
    optimizer = make_optimizer(torch.nn.LayerNorm(3), config)
    found = optimizer.defaults
    assert (found["betas"], found["eps"], found["lr"]) == ((0.8, 0.95), 1e-6, 0.5)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.0]
    optimizer = make_optimizer(torch.nn.Linear(3, 3), config)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
