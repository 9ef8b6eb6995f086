"""What `harts.logprobs` gives beside log-probs: each equals what untouched transformers gives, row by row."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import harts
from harts.models import RouterConfig, tiny_model
from harts.ops.kernels import Kernels
from harts.testing.fp64 import all_fp64
from harts.testing.trees import AWKWARD
from harts.trajectory import Trajectory
from harts.tree import PrefixTree

HYBRID = "tiny-qwen3.5"
SHAPES = ["star", "duplicates", "prefix of another"]


def pack(trajectories: list[Trajectory]) -> harts.PackedTree:
    return harts.pack(PrefixTree.build(trajectories))


def with_temperatures(trajectories: list[Trajectory]) -> list[Trajectory]:
    return [dataclasses.replace(each, temperature=(0.7, 1.3)[i % 2]) for i, each in enumerate(trajectories)]


def run_rows(model: Any, trajectories: list[Trajectory], k: int) -> tuple[Tensor, Tensor, Tensor]:
    """[N, D], [N, K] log-probs and ids: of each trained token's place, one trajectory after the other, unshared."""
    parts = []
    for trajectory in trajectories:
        ids = torch.tensor(trajectory.token_ids, dtype=torch.int64)[None]
        hidden_1LD = model.model(input_ids=ids, use_cache=False).last_hidden_state
        logp_LV = (model.lm_head(hidden_1LD)[0] / trajectory.temperature).log_softmax(-1)
        top = logp_LV.topk(k)
        mask = torch.tensor(trajectory.loss_mask)[1:, None]
        shifted = (hidden_1LD[0], top.values, top.indices + 1)
        placed = [torch.where(mask, each[:-1], 0) for each in shifted]
        parts.append([torch.cat([each.new_zeros(1, each.shape[1]), each]) for each in placed])
    hidden_N, values_NK, ids_NK = (torch.cat(each) for each in zip(*parts, strict=True))
    return hidden_N, values_NK, ids_NK - 1


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    names, parameters = zip(*model.named_parameters(), strict=True)
    found = torch.autograd.grad(loss, parameters, allow_unused=True)
    return {name: grad for name, grad in zip(names, found, strict=True) if grad is not None}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("impl", ["chunked", "reference"])
def test_hidden_states_and_most_likely_tokens_are_those_of_separate_rows(shape: str, impl: str) -> None:
    trajectories = with_temperatures(AWKWARD[shape])
    with all_fp64():
        model = tiny_model(HYBRID, dtype=torch.float64)
        hidden_N, values_NK, ids_NK = run_rows(model, trajectories, 4)
        weight_D = torch.linspace(-1, 1, hidden_N.shape[1], dtype=torch.float64)
        weight_K = torch.linspace(1, 2, 4, dtype=torch.float64)
        expected = gradients(model, (hidden_N @ weight_D).pow(2).sum() + (values_NK @ weight_K).sum())
        harts.attach(model)
        kernels = Kernels(row_logprobs=impl, chunk_rows=5)
        scores = harts.logprobs(model, pack(trajectories), hidden=True, top_k=4, kernels=kernels)
        assert scores.hidden_N is not None
        assert scores.top_logprobs_NK is not None
        found = gradients(model, (scores.hidden_N @ weight_D).pow(2).sum() + (scores.top_logprobs_NK @ weight_K).sum())
    assert float((scores.hidden_N - hidden_N).detach().abs().max()) < 1e-10
    assert float((scores.top_logprobs_NK - values_NK).detach().abs().max()) < 1e-10
    assert scores.top_ids_NK is not None
    assert torch.equal(scores.top_ids_NK, ids_NK)
    assert found.keys() == expected.keys()
    for name, grad in expected.items():
        assert float((found[name] - grad).norm()) <= 1e-8 * float(grad.norm()), name


def test_extras_change_nothing_about_log_probs_and_what_was_not_asked_for_is_none() -> None:
    packed = pack(AWKWARD["star"])
    model = harts.attach(tiny_model("tiny-qwen3.5-moe"))
    alone = harts.logprobs(model, packed)
    assert isinstance(alone, Tensor)
    off = harts.logprobs(model, packed, entropy=False, router=None, hidden=False, top_k=None)
    assert torch.equal(off, alone)
    every: dict[str, Any] = {
        "entropy": True,
        "router": RouterConfig(scope="microbatch"),
        "hidden": True,
        "top_k": 2,
    }
    given = {
        "entropy": {"entropy_N"},
        "router": {"router"},
        "hidden": {"hidden_N"},
        "top_k": {"top_logprobs_NK", "top_ids_NK"},
    }
    for name, value in every.items():
        scores = harts.logprobs(model, packed, **{name: value})
        assert isinstance(scores, harts.Scores)
        assert torch.equal(scores.logprobs_N, alone)
        fields = {field.name for field in dataclasses.fields(scores) if getattr(scores, field.name) is not None}
        assert fields == {"logprobs_N", *given[name]}
    both = harts.logprobs(model, packed, **every)
    assert torch.equal(both.logprobs_N, alone)
    entropy_N = harts.logprobs(model, packed, entropy=True).entropy_N
    assert entropy_N is not None
    assert both.entropy_N is not None
    assert torch.equal(both.entropy_N, entropy_N)


def test_a_most_likely_token_has_the_bits_of_its_log_prob() -> None:
    packed = pack(with_temperatures(AWKWARD["star"]))
    scores = harts.logprobs(harts.attach(tiny_model(HYBRID)), packed, top_k=512)
    assert scores.top_ids_NK is not None
    assert scores.top_logprobs_NK is not None
    same_NK = scores.top_ids_NK == packed.token_ids_T[packed.row_of_N][:, None]
    trained_N = packed.loss_mask_N
    assert same_NK[trained_N].sum(1).eq(1).all()
    assert torch.equal(scores.top_logprobs_NK[trained_N][same_NK[trained_N]], scores.logprobs_N[trained_N])
    assert (scores.top_ids_NK[~trained_N] == -1).all()
    assert (scores.top_logprobs_NK[:, 1:] <= scores.top_logprobs_NK[:, :-1]).all()


def test_extras_of_a_batch_without_a_trained_token_are_zeros() -> None:
    rows = [dataclasses.replace(each, loss_mask=[False] * len(each)) for each in AWKWARD["star"]]
    scores = harts.logprobs(harts.attach(tiny_model(HYBRID)), pack(rows), entropy=True, hidden=True, top_k=3)
    for values in (scores.logprobs_N, scores.entropy_N, scores.hidden_N, scores.top_logprobs_NK):
        assert values is not None
        assert len(values) == sum(map(len, rows))
        assert not values.any()
    assert scores.top_ids_NK is not None
    assert (scores.top_ids_NK == -1).all()


@pytest.mark.parametrize("bad", [0, -1, 513, 2.0, True])
def test_a_number_of_most_likely_tokens_that_there_is_not_is_refused(bad: Any) -> None:
    model = harts.attach(tiny_model(HYBRID))
    with pytest.raises(ValueError, match=r"top_k: expected a whole number from 1 to 512, .* got "):
        harts.logprobs(model, pack(AWKWARD["star"]), top_k=bad)


def test_an_unknown_extra_is_refused() -> None:
    model: Any = harts.attach(tiny_model(HYBRID))
    with pytest.raises(TypeError, match="hiddens"):
        harts.logprobs(model, pack(AWKWARD["star"]), hiddens=True)  # type: ignore[call-overload]


def test_extras_of_padded_batches_have_the_shape_of_the_ids() -> None:
    ids = torch.tensor([[9, 1, 2, 3], [1, 2, 4, 9]])
    mask = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 0]])
    model = harts.attach(tiny_model(HYBRID))
    scores = harts.logprobs_padded(model, ids, mask, hidden=True, top_k=2)
    rows = [Trajectory(token_ids=each, loss_mask=[0, 1, 1]) for each in ([1, 2, 3], [1, 2, 4])]
    expected = harts.logprobs(model, pack(rows), hidden=True, top_k=2)
    for ours, flat in (
        (scores.hidden, expected.hidden_N),
        (scores.top_logprobs, expected.top_logprobs_NK),
        (scores.top_ids, expected.top_ids_NK),
    ):
        assert ours is not None
        assert flat is not None
        assert torch.equal(ours[mask.bool()], flat)
        outside = -1 if ours is scores.top_ids else 0
        assert (ours[~mask.bool()] == outside).all()
