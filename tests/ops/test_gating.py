"""Choosing and weighing experts against loops over rows that follow the papers word by word."""

import math
from typing import Any

import pytest
import torch

from harts.ops.moe import Gating, router_scores, routing_probabilities

ROWS, EXPERTS, PER_TOKEN = 40, 12, 3


def by_hand(logits: list[float], bias: list[float], gating: Gating) -> tuple[list[int], list[float]]:
    """Experts, best first, and their weights, of one row."""
    if gating.scores == "softmax":
        total = sum(math.exp(x) for x in logits)
        scores = [math.exp(x) / total for x in logits]
    else:
        scores = [1 / (1 + math.exp(-x)) for x in logits]
    choice = [score + b for score, b in zip(scores, bias, strict=True)]
    size = EXPERTS // gating.groups
    groups = range(gating.groups)
    worth = [sum(sorted(choice[g * size : (g + 1) * size])[-gating.group_best :]) for g in groups]
    best = sorted(groups, key=lambda g: (-worth[g], g))[: gating.chosen_groups]
    allowed = [expert for expert in range(EXPERTS) if expert // size in best]
    chosen = sorted(allowed, key=lambda e: (-choice[e], e))[:PER_TOKEN]
    weights = [scores[e] for e in chosen]
    if gating.normalized:
        total = max(sum(weights) + gating.epsilon, gating.floor)
        weights = [w / total for w in weights]
    return chosen, [w * gating.scale for w in weights]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"normalized": False, "scale": 2.5},
        {"floor": 0.9},
        {"scores": "sigmoid", "epsilon": 0.5},
        {"scores": "sigmoid", "groups": 4, "chosen_groups": 2, "scale": 1.5},
        {"scores": "softmax", "groups": 6, "chosen_groups": 2},
        {"scores": "sigmoid", "groups": 12, "chosen_groups": 5},
        {"scores": "softmax", "groups": 4, "chosen_groups": 2, "group_best": 1, "normalized": False},
        {"scores": "sigmoid", "groups": 4, "chosen_groups": 4},
    ],
)
@pytest.mark.parametrize("biased", [False, True])
def test_experts_and_weights_are_those_of_the_loops(settings: dict[str, Any], biased: bool) -> None:
    gating = Gating(**settings)
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(ROWS, EXPERTS, dtype=torch.float64, generator=generator)
    bias = torch.randn(EXPERTS, dtype=torch.float64, generator=generator) if biased else None
    scores = router_scores(logits, gating.scores)
    chosen = gating.choose(scores, PER_TOKEN, bias)
    weights = gating.weigh(scores, chosen)
    for row in range(ROWS):
        experts, expected = by_hand(logits[row].tolist(), [0.0] * EXPERTS if bias is None else bias.tolist(), gating)
        assert chosen[row].tolist() == experts
        assert weights[row].tolist() == pytest.approx(expected, abs=1e-14)


def test_of_equal_experts_and_groups_the_lower_ones_are_chosen() -> None:
    scores = torch.full((2, EXPERTS), 0.5)
    assert Gating().choose(scores, 3).tolist() == [[0, 1, 2]] * 2
    assert Gating(groups=4, chosen_groups=2).choose(scores, 4).tolist() == [[0, 1, 2, 3]] * 2
    later = scores.clone()
    later[1, 7] = 0.6
    assert Gating(groups=4, chosen_groups=2).choose(later, 4).tolist() == [[0, 1, 2, 3], [7, 0, 1, 2]]


@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
def test_probabilities_sum_to_one_in_at_least_fp32(scores: Any) -> None:
    logits = torch.randn(5, EXPERTS, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    probabilities = routing_probabilities(logits, scores)
    assert probabilities.dtype == torch.float32
    assert torch.allclose(probabilities.sum(-1), torch.ones(5))
    assert torch.equal(probabilities.argmax(-1), logits.float().argmax(-1))


def test_unknown_scores_are_refused() -> None:
    with pytest.raises(ValueError, match="scores: expected 'softmax' or 'sigmoid', got 'tanh'"):
        router_scores(torch.zeros(1, 2), "tanh")  # type: ignore[arg-type]
