"""Padded and packed batches: the caller's shape, the values of separate rows, and clear refusals."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import harts
from harts.models import BatchScores, RouterConfig, tiny_model
from harts.testing.fp64 import all_fp64
from harts.trajectory import Trajectory

SeparateRows = Callable[[nn.Module, list[Trajectory]], tuple[Tensor, Tensor]]

HYBRID = "tiny-qwen3.5"
PAD = 7  # also a token of the rows: padding is told by the mask alone


def rows_of(seed: int = 0) -> list[list[int]]:
    """Two groups that share a long start, a duplicate, and a row that is the start of another."""
    rng = np.random.default_rng(seed)
    start, other = rng.integers(0, 500, 70).tolist(), rng.integers(0, 500, 5).tolist()
    tail = rng.integers(0, 500, 20).tolist()
    return [start + tail, start + tail[:9] + [PAD], start, other + tail, other + tail, [*start, PAD, PAD]]


def padded(rows: list[list[int]], side: str) -> tuple[Tensor, Tensor]:
    width = max(map(len, rows)) + 3
    ids, mask = torch.full((len(rows), width), PAD), torch.zeros(len(rows), width, dtype=torch.int64)
    for number, row in enumerate(rows):
        free = width - len(row)
        first = {"left": free, "right": 0, "both": free // 2}[side]
        ids[number, first : first + len(row)] = torch.tensor(row)
        mask[number, first : first + len(row)] = 1
    return ids, mask


def flat(rows: list[list[int]]) -> tuple[Tensor, Tensor, Tensor]:
    """ids [1, N], cu_seqlens, position_ids [1, N]."""
    ids = torch.tensor([token for row in rows for token in row]).unsqueeze(0)
    cuts = torch.tensor([0, *np.cumsum([len(row) for row in rows])])
    return ids, cuts, torch.cat([torch.arange(len(row)) for row in rows]).unsqueeze(0)


def as_trajectories(rows: list[list[int]], temperature: list[float] | None = None) -> list[Trajectory]:
    return [
        Trajectory(
            token_ids=row,  # type: ignore[arg-type]
            loss_mask=np.arange(len(row)) > 0,
            temperature=1.0 if temperature is None else temperature[number],
        )
        for number, row in enumerate(rows)
    ]


def difference(one: Tensor, other: Tensor) -> float:
    return float((one - other).detach().abs().max())


@pytest.fixture(scope="module")
def attached() -> nn.Module:
    return harts.attach(tiny_model("tiny-qwen3"))


@pytest.mark.parametrize("side", ["left", "right", "both"])
def test_padded_equals_separate_rows_on_every_side(side: str, separate_rows: SeparateRows) -> None:
    rows = rows_of()
    ids, mask = padded(rows, side)
    with all_fp64():
        model = tiny_model(HYBRID, dtype=torch.float64)
        logprobs_N, entropy_N = separate_rows(model, as_trajectories(rows))
        scores = harts.logprobs_padded(harts.attach(model), ids, mask, entropy=True)
    assert scores.logprobs.shape == ids.shape
    assert difference(scores.logprobs[mask.bool()], logprobs_N) < 1e-10
    assert scores.entropy is not None
    assert difference(scores.entropy[mask.bool()], entropy_N) < 1e-10
    assert not scores.logprobs[~mask.bool()].any()
    # 70 shared tokens, 20 behind them, [PAD] twice of the short ones, the other group once
    assert scores.packed.num_rows == 70 + 20 + 1 + 2 + 25


def test_gradients_equal_those_of_separate_rows(separate_rows: SeparateRows) -> None:
    rows = rows_of(1)
    ids, mask = padded(rows, "left")
    weight = torch.randn(ids.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    with all_fp64():
        model = tiny_model(HYBRID, dtype=torch.float64)
        parameters = list(model.parameters())
        logprobs_N, _ = separate_rows(model, as_trajectories(rows))
        expected = torch.autograd.grad((logprobs_N * weight[mask.bool()]).sum(), parameters)
        ours = harts.logprobs_padded(harts.attach(model), ids, mask).logprobs
        found = torch.autograd.grad((ours * weight).sum(), parameters)
    assert max(float((a - b).norm() / b.norm()) for a, b in zip(found, expected, strict=True)) < 1e-8


@pytest.mark.parametrize("how", ["cu_seqlens", "position_ids"])
@pytest.mark.parametrize("dims", [1, 2])
def test_flat_equals_separate_rows(how: str, dims: int, separate_rows: SeparateRows) -> None:
    rows = rows_of()
    ids, cuts, positions = flat(rows)
    if dims == 1:
        ids, positions = ids[0], positions[0]
    given = {"cu_seqlens": cuts} if how == "cu_seqlens" else {"position_ids": positions}
    model = tiny_model("tiny-qwen3")
    with torch.no_grad():
        logprobs_N, _ = separate_rows(model, as_trajectories(rows))
        scores = harts.logprobs_flat(harts.attach(model), ids, **given)  # type: ignore[arg-type]
    assert scores.logprobs.shape == ids.shape
    assert difference(scores.logprobs.reshape(-1), logprobs_N) < 1e-5


@pytest.mark.parametrize("budget", [30, None])
def test_a_token_budget_gives_the_same_gradients(budget: int | None) -> None:
    """In pieces; the largest runs no more rows than the budget."""
    ids, mask = padded(rows_of(), "right")
    expected, model = (harts.attach(tiny_model(HYBRID)) for _ in range(2))
    harts.logprobs_padded(expected, ids, mask).logprobs.sum().backward()
    pieces: list[int] = []
    model.get_input_embeddings().register_forward_hook(lambda _, given, __: pieces.append(given[0].numel()))  # type: ignore[operator]
    harts.logprobs_padded(model, ids, mask, token_budget=budget).logprobs.sum().backward()
    assert max(pieces) == (budget or sum(pieces))
    for cut, whole in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(cut.grad, whole.grad, rtol=1e-4, atol=1e-4)


def test_chosen_places_only_are_scored(attached: nn.Module) -> None:
    ids, mask = padded(rows_of(), "right")
    chosen = torch.zeros_like(mask)
    chosen[:, 60:65] = mask[:, 60:65]
    chosen[3:5, 8] = 1
    with torch.no_grad():
        everything = harts.logprobs_padded(attached, ids, mask)
        some = harts.logprobs_padded(attached, ids, mask, scored_BL=chosen)
    assert difference(some.logprobs, everything.logprobs * chosen) < 1e-6
    assert len(some.packed.token_M) < len(everything.packed.token_M)


@pytest.mark.parametrize("kind", ["number", "tensor of one", "one a row"])
def test_temperature(kind: str, attached: nn.Module, separate_rows: SeparateRows) -> None:
    rows = rows_of()
    ids, mask = padded(rows, "left")
    each = [0.5, 1.0, 0.7, 2.0, 0.5, 1.0] if kind == "one a row" else [0.6] * 6
    given = {"number": 0.6, "tensor of one": torch.tensor(0.6), "one a row": torch.tensor(each)}[kind]
    with torch.no_grad():
        scores = harts.logprobs_padded(attached, ids, mask, temperature=given)
        cuts = flat(rows)[1]
        packed = harts.logprobs_flat(attached, flat(rows)[0], cu_seqlens=cuts, temperature=given)
        logprobs_N, _ = separate_rows(tiny_model("tiny-qwen3"), as_trajectories(rows, each))
    assert difference(scores.logprobs[mask.bool()], logprobs_N) < 1e-5
    assert difference(packed.logprobs[0], logprobs_N) < 1e-5


def test_no_mask_means_no_padding(attached: nn.Module) -> None:
    ids = torch.tensor([[1, 2, 3], [1, 2, 4]])
    scores = harts.logprobs_padded(attached, ids)
    assert scores.packed.num_rows == 4
    assert (scores.logprobs[:, 1:] < 0).all()
    assert not scores.logprobs[:, 0].any()


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.float32, torch.bfloat16])
def test_masks_of_any_type(dtype: torch.dtype, attached: nn.Module) -> None:
    ids, mask = padded(rows_of(), "left")
    with torch.no_grad():
        expected = harts.logprobs_padded(attached, ids, mask)
        ours = harts.logprobs_padded(attached, ids.int(), mask.to(dtype))
    assert torch.equal(ours.logprobs, expected.logprobs)


def test_rows_without_anything_scored_give_zeros_where_allowed(attached: nn.Module) -> None:
    ids, mask = padded(rows_of(), "left")
    chosen = mask.clone()
    chosen[torch.arange(6), mask.argmax(1)] = 0
    chosen[2] = 0
    with torch.no_grad():
        expected = harts.logprobs_padded(attached, ids, mask).logprobs
        scores = harts.logprobs_padded(attached, ids, mask, scored_BL=chosen, allow_empty=True)
    assert not scores.logprobs[2].any()
    assert difference(scores.logprobs, expected * chosen) < 1e-6


def test_a_batch_without_anything_scored_is_a_differentiable_zero() -> None:
    model = harts.attach(tiny_model("tiny-qwen3"))
    ids, mask = padded(rows_of(), "left")
    scores = harts.logprobs_padded(model, ids, mask, scored_BL=torch.zeros_like(mask), allow_empty=True, entropy=True)
    assert scores.entropy is not None
    assert not scores.logprobs.any()
    (scores.logprobs.sum() + scores.entropy.sum()).backward()


def test_router_output_is_that_of_all_tokens() -> None:
    model = harts.attach(tiny_model("tiny-qwen3-moe"))
    ids, mask = padded(rows_of(), "left")
    config = RouterConfig(scope="microbatch", balance_coefficient=1.0)
    whole = harts.logprobs_padded(model, ids, mask, router=config)
    chosen = mask.clone()
    chosen[:, :70] = 0
    chosen[torch.arange(6), mask.argmax(1)] = 0
    part = harts.logprobs_padded(model, ids, mask, router=config, scored_BL=chosen, entropy=True, allow_empty=True)
    assert isinstance(part, BatchScores)
    assert whole.router is not None
    assert part.router is not None
    assert whole.entropy is None
    assert torch.equal(whole.router.aux_loss(), part.router.aux_loss())


def change(what: str) -> dict[str, Tensor]:
    """Arguments of a padded call that is wrong in one way."""
    ids, mask = padded(rows_of(), "right")
    scored = mask.clone()
    scored[:, 0] = 0
    if what == "hole":
        mask[1, 5] = 0
    elif what == "only padding":
        mask[1] = 0
    elif what == "nothing scored":
        scored[1] = 0
    elif what == "padding scored":
        scored[2, -1] = 1
    elif what == "first scored":
        scored[3, 0] = 1
    elif what == "values":
        mask[0, 0] = 2
    elif what == "mask shape":
        mask = mask[:, 1:]
    elif what == "scored shape":
        scored = scored[:1]
    elif what == "floats":
        ids = ids.float()
    elif what == "negative":
        ids[0, 4] = -100
    elif what == "one dimension":
        ids = ids[0]
    elif what == "vocabulary":
        ids[0, 4] = 512
    return {"input_ids_BL": ids, "attention_mask_BL": mask, "scored_BL": scored}


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("hole", "row 1, attention_mask: expected padding only before and behind.*place 5"),
        ("only padding", "row 1, attention_mask: expected at least one token"),
        ("nothing scored", "row 1: expected at least one scored token.*completion of length zero.*allow_empty"),
        ("padding scored", r"scored: expected only tokens to be scored, got padding at \[2, "),
        ("first scored", "scored: expected the first token.*number 3"),
        ("values", r"attention_mask: expected 0/1 or booleans, got 2 at \[0, 0\]"),
        ("mask shape", "attention_mask: expected the shape of input_ids"),
        ("scored shape", "scored: expected the shape of input_ids"),
        ("floats", "input_ids: expected integers, got torch.float32"),
        ("negative", "trajectory 'row 0', field token_ids.*-100 at position 4"),
        ("one dimension", r"input_ids: expected a batch \[B, L\]"),
        ("vocabulary", "row 0.*512"),
    ],
)
def test_bad_padded_batches_are_refused(what: str, message: str, attached: nn.Module) -> None:
    with pytest.raises(ValueError, match=message):
        harts.logprobs_padded(attached, **change(what))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "exactly one of cu_seqlens and position_ids, got none"),
        ({"cu_seqlens": [0, 4], "position_ids": torch.arange(4)[None]}, "exactly one.*got both"),
        ({"cu_seqlens": [0, 2, 2, 4]}, "sequence 1, cu_seqlens: expected at least one token, got 0"),
        ({"cu_seqlens": [0, 3]}, "cu_seqlens: expected to rise from 0 to 4"),
        ({"cu_seqlens": [1, 4]}, "cu_seqlens: expected to rise from 0 to 4"),
        ({"position_ids": torch.tensor([[0, 1, 3, 4]])}, "position_ids: expected 0, 1, 2.*got 3 in place of 2"),
        ({"position_ids": torch.tensor([[1, 2, 0, 1]])}, "sequence 0, position_ids: expected to start at 0"),
        ({"position_ids": torch.zeros(3, 1, 4).long()}, "position_ids: expected the shape of input_ids"),
        ({"cu_seqlens": [0, 3, 4]}, "sequence 1: expected at least one scored token"),
        ({"cu_seqlens": [0, 4], "temperature": torch.ones(2)}, "temperature: expected a number or one a sequence"),
        ({"cu_seqlens": [0, 4], "temperature": 0.0}, "'sequence 0', field temperature: expected a number > 0"),
        ({"cu_seqlens": [0, 4], "scored_1N": torch.ones(4)}, "scored: expected the shape of input_ids"),
    ],
)
def test_bad_flat_batches_are_refused(given: dict[str, Tensor], message: str, attached: nn.Module) -> None:
    with pytest.raises(ValueError, match=message):
        harts.logprobs_flat(attached, torch.tensor([[1, 2, 3, 4]]), **given)  # type: ignore[arg-type]


def test_a_padded_batch_given_as_flat_is_refused(attached: nn.Module) -> None:
    with pytest.raises(ValueError, match=r"expected one packed row.*logprobs_padded"):
        harts.logprobs_flat(attached, torch.ones(2, 3).long(), cu_seqlens=[0, 6])


def test_a_model_without_attach_is_refused() -> None:
    with pytest.raises(ValueError, match="not attached"):
        harts.logprobs_padded(tiny_model("tiny-qwen3"), torch.tensor([[1, 2]]))
