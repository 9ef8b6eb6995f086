"""The client in Tinker's manner: the gradients of separate rows, AdamW's steps, clear refusals, Tinker's own types."""

import copy
import importlib.util
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from harts.integrations.tinker import LOSSES, AdamParams, Datum, TrainingClient
from harts.models import tiny_model
from harts.testing.fp64 import all_fp64

KINDS = [("cross_entropy", {}), ("importance_sampling", {}), ("ppo", {"clip_high_threshold": 1.1}), ("cispo", {})]


def data(kind: type = Datum, wrap: Any = list) -> list[Any]:
    """Three sequences with a long common start; the last target of one lies outside its weights."""
    rng = np.random.default_rng(0)
    start = rng.integers(0, 500, 70).tolist()
    found = []
    for number in range(3):
        tokens = [*start, *rng.integers(0, 500, 6 + number).tolist()]
        count = len(tokens) - 1
        weights = (np.arange(count) >= 68).astype(float) * (1 + number)
        if number == 1:
            weights[-1] = 0
        inputs = {
            "target_tokens": tokens[1:],
            "weights": weights.tolist(),
            "logprobs": (-6 + 0.3 * rng.standard_normal(count)).tolist(),
            "advantages": (rng.standard_normal(count) * (weights != 0)).tolist(),
        }
        found.append(kind(wrap(tokens[:-1]), inputs))
    return found


def expected_loss(model: nn.Module, name: str, given: list[Datum], low: float = 0.8, high: float = 1.2) -> Tensor:
    """Row by row through transformers, from the formulas in Tinker's documentation."""
    total = torch.zeros((), dtype=torch.float64)
    for datum in given:
        inputs = {key: torch.tensor(value) for key, value in datum.loss_fn_inputs.items()}
        logits = model(input_ids=torch.tensor([datum.model_input]), use_cache=False).logits[0]
        logprobs = logits.log_softmax(-1).gather(-1, inputs["target_tokens"][:, None])[:, 0]
        ratio = (logprobs - inputs["logprobs"]).exp()
        advantages, on = inputs["advantages"], inputs["weights"] != 0
        if name == "cross_entropy":
            loss = -(logprobs * inputs["weights"]).sum()
        elif name == "importance_sampling":
            loss = -(ratio * advantages)[on].sum()
        elif name == "ppo":
            clipped = ratio.clamp(low, high)
            loss = -torch.minimum(ratio * advantages, clipped * advantages)[on].sum()
        else:
            loss = -(ratio.clamp(low, high).detach() * logprobs * advantages)[on].sum()
        total = total + loss
    return total


@pytest.mark.parametrize(("name", "config"), KINDS)
def test_gradients_are_those_of_separate_rows(name: str, config: dict[str, float]) -> None:
    with all_fp64():
        model = tiny_model("tiny-qwen3.5", dtype=torch.float64)
        plain = copy.deepcopy(model)
        loss = expected_loss(plain, name, data(), high=config.get("clip_high_threshold", 1.2))
        loss.backward()
        client = TrainingClient(model, token_budget=40)
        output = client.forward_backward(data(), name, config).result()
    assert output.metrics["loss:sum"] == pytest.approx(loss.item(), rel=1e-6)
    assert [len(each["logprobs"]) for each in output.loss_fn_outputs] == [75, 76, 77]
    for (where, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert theirs.grad is not None
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-5, atol=1e-6, msg=where)


def test_steps_are_those_of_adamw_and_gradients_add_up() -> None:
    model = tiny_model("tiny-qwen3")
    plain = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    client = TrainingClient(model)
    for given in (data(), data()[:2]):
        norms = []
        expected_loss(plain, "cross_entropy", given + given[:1]).backward()
        norms.append(nn.utils.clip_grad_norm_(plain.parameters(), 1.0))
        optimizer.step()
        optimizer.zero_grad()
        client.forward_backward(given, "cross_entropy")
        client.forward_backward(given[:1], "cross_entropy")
        step = client.optim_step(AdamParams(learning_rate=1e-3, eps=1e-8, weight_decay=0.1, grad_clip_norm=1.0))
        assert step.metrics["grad_norm"] == pytest.approx(float(norms[0]), rel=1e-4)
    for (where, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-5, msg=where)
    with pytest.raises(ValueError, match="expected gradients of a forward_backward before it"):
        client.optim_step(AdamParams())


def test_a_loss_of_ones_own_is_the_named_one() -> None:
    named, own = (TrainingClient(tiny_model("tiny-qwen3")) for _ in range(2))

    def loss(given: Any, logprobs: list[Tensor]) -> tuple[Tensor, dict[str, float]]:
        parts = [
            (each * torch.tensor(datum.loss_fn_inputs["weights"])).sum()
            for datum, each in zip(given, logprobs, strict=True)
        ]
        return -torch.stack(parts).sum(), {"mine": 3.0}

    first = named.forward_backward(data(), "cross_entropy")
    second = own.forward_backward_custom(data(), loss)
    assert second.metrics["mine"] == 3
    assert second.metrics["loss:sum"] == pytest.approx(first.metrics["loss:sum"], rel=1e-6)
    scored = own.forward(data()).loss_fn_outputs
    assert torch.allclose(scored[2]["logprobs"], second.loss_fn_outputs[2]["logprobs"], atol=1e-5)
    assert not scored[2]["logprobs"].requires_grad


def test_mask_and_everything() -> None:
    """Without weights the mask says what is scored, without either all is."""
    client = TrainingClient(tiny_model("tiny-qwen3"))
    targets = {"target_tokens": [2, 3, 4]}
    everything = client.forward([Datum([1, 2, 3], targets)]).loss_fn_outputs[0]["logprobs"]
    masked = client.forward([Datum([1, 2, 3], {**targets, "mask": [0, 0, 1]})]).loss_fn_outputs[0]["logprobs"]
    assert (everything != 0).all()
    assert masked.tolist() == [0, 0, pytest.approx(float(everything[2]), abs=1e-5)]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"target_tokens": [2, 9, 4]},
            r"datum 0, target_tokens: expected the next token of model_input, 3, at place 1",
        ),
        ({"weights": [1.0, 1.0]}, r"datum 0, weights: expected one value a token of model_input, \[3\], got \[2\]"),
        ({"weights": [1.0, float("nan"), 1.0]}, r"datum 0, weights: expected finite numbers"),
        ({"target_tokens": [[2, 3], [3, 4], [4, 5]]}, r"datum 0, target_tokens: expected one value a token"),
    ],
)
def test_bad_data_is_named(changes: dict[str, Any], message: str) -> None:
    client = TrainingClient(tiny_model("tiny-qwen3"))
    good = {"target_tokens": [2, 3, 4], "weights": [1.0, 1.0, 1.0]}
    with pytest.raises(ValueError, match=message):
        client.forward_backward([Datum([1, 2, 3], {**good, **changes})], "cross_entropy")


def test_bad_calls_are_named() -> None:
    client = TrainingClient(tiny_model("tiny-qwen3"))
    one = [Datum([1, 2], {"target_tokens": [2, 3]})]
    with pytest.raises(ValueError, match="expected one of cross_entropy, importance_sampling, ppo, cispo, got 'dro'"):
        client.forward_backward(one, "dro")
    with pytest.raises(ValueError, match="cross_entropy has no option 'clip'"):
        client.forward_backward(one, "cross_entropy", {"clip": 1.0})
    with pytest.raises(ValueError, match=r"datum 0, loss_fn_inputs: expected 'advantages'"):
        client.forward_backward([Datum([1, 2], {"target_tokens": [2, 3], "logprobs": [0.0, 0.0]})], "ppo")
    with pytest.raises(ValueError, match="expected at least one datum"):
        client.forward([])


@pytest.mark.skipif(importlib.util.find_spec("tinker") is None, reason="the package tinker is not installed")
def test_types_of_tinker_are_taken() -> None:
    import tinker

    theirs = data(
        lambda tokens, inputs: tinker.Datum(model_input=tokens, loss_fn_inputs=inputs), tinker.ModelInput.from_ints
    )
    first, second = (TrainingClient(tiny_model("tiny-qwen3")) for _ in range(2))
    for name in LOSSES:
        ours, found = first.forward_backward(data(), name), second.forward_backward(theirs, name)
        assert found.metrics["loss:sum"] == pytest.approx(ours.metrics["loss:sum"], rel=1e-5)
    assert second.optim_step(tinker.AdamParams(learning_rate=1e-3)).result().metrics["grad_norm"] > 0
