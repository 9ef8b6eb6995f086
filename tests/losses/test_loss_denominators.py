"""Denominators span the optimiser step: its microbatches add up to it, however it is split."""

import loss_formulas as formulas
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from harts import Trajectory
from harts.losses import LossConfig, LossMetrics, StepDenominators, make_loss

ALGORITHMS = ["supervised", "reinforce", "ppo", "grpo", "gspo", "gspo_token", "cispo"]
NORMALIZATIONS = ["token", "sequence", "group", "constant"]


def run(
    step: list[formulas.Sequence],
    config: LossConfig,
    microbatches: list[list[int]],
    denominators: StepDenominators | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, LossMetrics]:
    """Summed loss, accumulated gradients and summed metrics of a step in these microbatches."""
    leaves = formulas.leaves_of(step)
    total, metrics = torch.zeros((), dtype=torch.float64), None
    for indices in microbatches:
        inputs = formulas.inputs_of(step, indices, leaves)
        part = denominators
        if part is None:
            part = formulas.denominators_of(step)
        output = make_loss(config)(inputs, part)
        output.loss.backward()
        total = total + output.loss.detach()
        metrics = output.metrics if metrics is None else metrics + output.metrics
    assert metrics is not None
    return total, *formulas.grads_of(leaves), metrics


def config_of(algorithm: str, normalization: str) -> LossConfig:
    clip = {} if algorithm in ("supervised", "reinforce") else {"clip_low": 0.2, "clip_high": 0.3}
    length = {"max_length": 7} if normalization == "constant" else {}
    return LossConfig(algorithm=algorithm, normalization=normalization, kl_coef=0.1, entropy_coef=0.1, **clip, **length)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("normalization", NORMALIZATIONS)
@settings(deadline=None, max_examples=10)
@given(data=st.data(), seed=st.integers(0, 2**32 - 1), count=st.integers(1, 8))
def test_any_split_into_whole_trajectories_adds_up(
    algorithm: str, normalization: str, data: st.DataObject, seed: int, count: int
) -> None:
    step = formulas.random_step(seed, count, constant_advantages=algorithm == "gspo")
    order = data.draw(st.permutations(range(count)))
    cuts = sorted(data.draw(st.sets(st.integers(1, count))) | {count})
    microbatches = [list(order[a:b]) for a, b in zip([0, *cuts], cuts, strict=False)]
    assert sorted(i for indices in microbatches for i in indices) == list(range(count))
    config = config_of(algorithm, normalization)
    whole = run(step, config, [list(range(count))])
    split = run(step, config, microbatches)
    for a, b in zip(whole[:3], split[:3], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)
    assert split[3].values() == pytest.approx(whole[3].values(), rel=1e-12, abs=1e-14)
    assert split[3].values()["loss"] == pytest.approx(whole[0].item(), rel=1e-12, abs=1e-14)


@pytest.mark.parametrize("normalization", NORMALIZATIONS)
def test_denominators_of_a_microbatch_would_be_seen(normalization: str) -> None:
    """The well-known mistake: the same split, each microbatch averaged by its own counts."""
    step = formulas.random_step(21, 6)
    config = config_of("grpo", normalization)
    whole = run(step, config, [[0, 1, 2, 3, 4, 5]])[0].item()
    wrong = 0.0
    for indices in ([0, 1], [2, 3, 4, 5]):
        part = [step[i] for i in indices]
        wrong += run(part, config, [list(range(len(part)))])[0].item() / 2
    assert abs(wrong - whole) > 1e-3 * abs(whole)


def test_weights_by_hand() -> None:
    """Two groups, (2, 0, 4) and (3) trained tokens."""
    denominators = StepDenominators.from_counts([2, 0, 4, 3], [0, 0, 0, 1])
    by_name = {name: denominators.sequence_weights(name, 10).tolist() for name in NORMALIZATIONS}
    assert by_name["token"] == [1 / 9, 0, 1 / 9, 1 / 9]
    assert by_name["sequence"] == [1 / 6, 0, 1 / 12, 1 / 9]
    assert by_name["group"] == [1 / 12, 0, 1 / 12, 1 / 6]
    assert by_name["constant"] == [1 / 40, 0, 1 / 40, 1 / 40]


def test_a_group_without_a_trained_token_is_not_counted() -> None:
    weights = StepDenominators.from_counts([2, 0, 0], [0, 1, 1]).sequence_weights("group")
    assert weights.tolist() == [1 / 2, 0, 0]


def trajectory(group: str, mask: list[int], name: str = "") -> Trajectory:
    return Trajectory(token_ids=list(range(len(mask))), loss_mask=mask, group=group, id=name)


def test_from_trajectories() -> None:
    step = [trajectory("a", [0, 1, 1], "x"), trajectory("b", [0]), trajectory("a", [0, 1])]
    denominators = StepDenominators.from_trajectories(step)
    assert denominators.tokens_of_S.tolist() == [2, 0, 1]
    assert denominators.group_of_S is not None
    assert denominators.group_of_S.tolist() == [0, 1, 0]
    assert denominators.label(0) == "trajectory 'x' (number 0 of the step)"


def test_unnamed_groups_are_refused_only_where_groups_are_averaged() -> None:
    denominators = StepDenominators.from_trajectories([trajectory("a", [0, 1]), trajectory("", [0, 1])])
    assert denominators.sequence_weights("token").tolist() == [0.5, 0.5]
    with pytest.raises(ValueError, match="expected a group for every trajectory"):
        denominators.sequence_weights("group")


@pytest.mark.parametrize("counts", [[], [0, 0]])
def test_a_step_without_a_trained_token_is_refused(counts: list[int]) -> None:
    with pytest.raises(ValueError, match=rf"loss_mask: expected a trained token.*none in {len(counts)} trajectories"):
        StepDenominators.from_counts(counts)


def test_bad_counts_are_refused() -> None:
    with pytest.raises(ValueError, match="counts >= 0, got -1"):
        StepDenominators.from_counts([3, -1])
    with pytest.raises(ValueError, match=r"group_of_S: expected int64 \[2\]"):
        StepDenominators.from_counts([3, 1], [0])
    with pytest.raises(ValueError, match="expected int64"):
        StepDenominators(tokens_of_S=torch.tensor([1.0]))
    with pytest.raises(ValueError, match="names: expected 1, got 2"):
        StepDenominators(tokens_of_S=torch.tensor([1]), names=("a", "b"))
    with pytest.raises(ValueError, match="normalization: expected one of token, sequence, group, constant"):
        StepDenominators.from_counts([1]).sequence_weights("batch")
    with pytest.raises(ValueError, match="max_length: expected an integer >= 1, got None"):
        StepDenominators.from_counts([1]).sequence_weights("constant")


def test_a_torn_trajectory_is_refused() -> None:
    step = formulas.random_step(30, 3)
    for seq in step:
        seq.mask = [True] * len(seq.mask)
    loss, denominators = make_loss(LossConfig(algorithm="supervised")), formulas.denominators_of(step)
    size = len(step[1].mask)
    assert size > 1
    torn = [*step]
    torn[1] = formulas.Sequence(**{k: v[1:] if isinstance(v, list) else v for k, v in vars(step[1]).items()})
    with pytest.raises(ValueError, match=rf"number 1 of the step\).*expected {size} trained.*got {size - 1}; "):
        loss(formulas.inputs_of(torn, [0, 1]), denominators)


def test_a_repeated_scattered_or_foreign_trajectory_is_refused() -> None:
    denominators = StepDenominators.from_counts([1, 2])
    with pytest.raises(ValueError, match=r"number 0 of the step\): expected once in a microbatch, got twice"):
        denominators.check_whole(torch.tensor([0, 1, 0]), torch.tensor([1, 2, 1]))
    with pytest.raises(ValueError, match=r"number 1 of the step.*expected 2 trained tokens in a row"):
        denominators.check_whole(torch.tensor([1, 0, 1]), torch.tensor([1, 1, 1]))
    with pytest.raises(ValueError, match=r"indices in \[0, 2\), got 2"):
        denominators.check_whole(torch.tensor([2]), torch.tensor([1]))
