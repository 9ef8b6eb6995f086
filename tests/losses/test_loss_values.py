"""Values and gradients of every loss against loops written from the papers."""

import itertools
import math
from dataclasses import replace

import loss_formulas as formulas
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from harts.losses import LossConfig, LossInputs, StepDenominators, make_loss
from harts.losses import policy as policy_module

ALGORITHMS = ["supervised", "reinforce", "ppo", "grpo", "gspo", "gspo_token", "cispo"]
CLIPPING = ["ppo", "grpo", "gspo", "gspo_token", "cispo"]
NORMALIZATIONS = ["token", "sequence", "group", "constant"]


def config_of(algorithm: str, normalization: str = "token", **settings_: object) -> LossConfig:
    if algorithm in CLIPPING:
        settings_ = {"clip_low": 0.15, "clip_high": 0.25} | settings_
    if normalization == "constant":
        settings_ = {"max_length": 5} | settings_
    return LossConfig(algorithm=algorithm, normalization=normalization, **settings_)


def compare(step: list[formulas.Sequence], config: LossConfig) -> None:
    expected = formulas.expected(step, config)
    leaves = formulas.leaves_of(step)
    inputs = formulas.inputs_of(step, list(range(len(step))), leaves)
    output = make_loss(config)(inputs, formulas.denominators_of(step))
    output.loss.backward()
    logprob_grads, entropy_grads = formulas.grads_of(leaves)
    close(output.loss.detach(), torch.tensor(expected.loss, dtype=torch.float64))
    close(logprob_grads, torch.tensor(list(itertools.chain(*expected.logprob_grads)), dtype=torch.float64))
    close(entropy_grads, torch.tensor(list(itertools.chain(*expected.entropy_grads)), dtype=torch.float64))


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("normalization", NORMALIZATIONS)
@settings(deadline=None, max_examples=12)
@given(seed=st.integers(0, 2**32 - 1), count=st.integers(1, 5), data=st.data())
def test_matches_the_formula(algorithm: str, normalization: str, seed: int, count: int, data: st.DataObject) -> None:
    extra: dict[str, object] = {
        "kl_coef": data.draw(st.sampled_from([0.0, 0.3])),
        "kl_estimator": data.draw(st.sampled_from(["k1", "k2", "k3"])),
        "entropy_coef": data.draw(st.sampled_from([0.0, 0.2])),
    }
    if algorithm in ("ppo", "grpo"):
        extra["dual_clip"] = data.draw(st.sampled_from([None, 1.1, 3.0]))
    if algorithm not in ("supervised", "gspo"):
        extra["tis_cap"] = data.draw(st.sampled_from([None, 1.2]))
    step = formulas.random_step(seed, count, constant_advantages=algorithm == "gspo")
    compare(step, config_of(algorithm, normalization, **extra))


@pytest.mark.parametrize("algorithm", ["supervised", "reinforce", "ppo", "grpo", "gspo"])
def test_gradcheck(algorithm: str) -> None:
    """Where nothing is stopped, autograd's gradient is that of the value."""
    step = formulas.random_step(3, 4, constant_advantages=algorithm == "gspo")
    loss = make_loss(config_of(algorithm, "sequence", kl_coef=0.1, entropy_coef=0.1))
    inputs = formulas.inputs_of(step, list(range(4)))
    logprobs = inputs.logprobs_N.detach().requires_grad_()
    entropy = inputs.entropy_N.detach().requires_grad_()

    def value(logprobs_N: torch.Tensor, entropy_N: torch.Tensor) -> torch.Tensor:
        return loss(replace(inputs, logprobs_N=logprobs_N, entropy_N=entropy_N), formulas.denominators_of(step)).loss

    assert torch.autograd.gradcheck(value, (logprobs, entropy))


def test_gspo_token_has_the_value_and_gradient_of_gspo_where_advantages_are_constant() -> None:
    step = formulas.random_step(5, 5, constant_advantages=True, spread=0.2)
    results = []
    for algorithm in ("gspo", "gspo_token"):
        leaves = formulas.leaves_of(step)
        output = make_loss(config_of(algorithm, "sequence"))(
            formulas.inputs_of(step, list(range(5)), leaves), formulas.denominators_of(step)
        )
        output.loss.backward()
        results.append((output.loss.detach(), formulas.grads_of(leaves)[0]))
    close(results[0][0], results[1][0])
    close(results[0][1], results[1][1])
    assert results[0][1].abs().max() > 0.01


# -- numbers by hand ------------------------------------------------------------------------------------------------


def one_token(ratio: float, advantage: float, config: LossConfig, **others: float) -> tuple[float, float, dict]:
    """Loss, gradient and metrics of a single trained token."""
    logprob = torch.tensor([math.log(ratio) - 1.0], dtype=torch.float64, requires_grad=True)

    def scalar(x: float) -> torch.Tensor:
        return torch.tensor([x], dtype=torch.float64)

    inputs = LossInputs(
        logprobs_N=logprob,
        loss_mask_N=torch.tensor([True]),
        sequence_of_N=torch.tensor([0]),
        old_logprobs_N=scalar(-1.0),
        advantages_N=scalar(advantage),
        **{name: scalar(x) for name, x in others.items()},
    )
    output = make_loss(config)(inputs, StepDenominators.from_counts([1]))
    output.loss.backward()
    return output.loss.item(), logprob.grad.item(), output.metrics.values()


@pytest.mark.parametrize("algorithm", ["ppo", "grpo", "gspo", "gspo_token"])
@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "grad", "clipped"),
    [
        (1.0, 2.0, -2.0, -2.0, None),
        (2.0, 1.0, -1.3, 0.0, "high"),  # already more likely than the bound: no more reward for it
        (2.0, -1.0, 2.0, 2.0, None),  # pushed up by mistake: the full gradient brings it down
        (0.5, -1.0, 0.8, 0.0, "low"),
        (0.5, 1.0, -0.5, -0.5, None),
        (0.5, 0.0, 0.0, 0.0, None),
    ],
)
def test_sides_of_the_clip(
    algorithm: str, ratio: float, advantage: float, loss: float, grad: float, clipped: str | None
) -> None:
    config = LossConfig(algorithm=algorithm, normalization="token", clip_low=0.2, clip_high=0.3)
    value, gradient, metrics = one_token(ratio, advantage, config)
    assert value == pytest.approx(loss, abs=1e-12)
    assert gradient == pytest.approx(grad, abs=1e-12)
    assert metrics["clip_fraction_low"] == (clipped == "low")
    assert metrics["clip_fraction_high"] == (clipped == "high")


@pytest.mark.parametrize(("ratio", "advantage"), [(2.0, 1.0), (0.5, -1.0)])
def test_exactly_at_a_bound_the_gradient_is_whole(ratio: float, advantage: float) -> None:
    config = LossConfig(algorithm="ppo", clip_low=0.5, clip_high=1.0)
    logprob = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    old = torch.tensor([-math.log(ratio)], dtype=torch.float64)
    assert torch.exp(logprob - old).item() == ratio  # exact, else this tests nothing
    inputs = LossInputs(
        logprobs_N=logprob,
        loss_mask_N=torch.tensor([True]),
        sequence_of_N=torch.tensor([0]),
        old_logprobs_N=old,
        advantages_N=torch.tensor([advantage], dtype=torch.float64),
    )
    output = make_loss(config)(inputs, StepDenominators.from_counts([1]))
    output.loss.backward()
    assert output.loss.item() == -ratio * advantage
    assert logprob.grad.item() == -ratio * advantage
    metrics = output.metrics.values()
    assert metrics["clip_fraction_low"] == metrics["clip_fraction_high"] == 0


def test_dual_clip_bounds_the_loss_of_a_negative_advantage_only() -> None:
    config = LossConfig(algorithm="ppo", dual_clip=3.0)
    assert one_token(5.0, -1.0, config)[:2] == pytest.approx((3.0, 0.0))
    assert one_token(2.5, -1.0, config)[:2] == pytest.approx((2.5, 2.5))
    assert one_token(5.0, 1.0, config)[:2] == pytest.approx((-1.2, 0.0))
    assert one_token(5.0, -1.0, config)[2]["clip_fraction_dual"] == 1


def test_cispo_keeps_the_gradient_of_a_clipped_token() -> None:
    config = LossConfig(algorithm="cispo", clip_low=1.0, clip_high=1.0)
    logprob = math.log(5.0) - 1
    for advantage in (1.0, -1.0):
        value, gradient, metrics = one_token(5.0, advantage, config)
        assert value == pytest.approx(-2.0 * advantage * logprob)
        assert gradient == pytest.approx(-2.0 * advantage)
        assert metrics["clip_fraction_high"] == 1
        assert metrics["clip_fraction_low"] == 0
    assert one_token(0.1, 1.0, config)[1] == pytest.approx(-0.1)


def test_truncated_importance_weight() -> None:
    config = LossConfig(algorithm="ppo", tis_cap=2.0)
    value, gradient, metrics = one_token(1.0, 1.0, config, behaviour_logprobs_N=-1.0 - math.log(1.5))
    assert (value, gradient) == pytest.approx((-1.5, -1.5))
    assert metrics["tis_fraction_truncated"] == 0
    value, gradient, metrics = one_token(1.0, 1.0, config, behaviour_logprobs_N=-1.0 - math.log(8.0))
    assert (value, gradient) == pytest.approx((-2.0, -2.0))
    assert metrics["tis_fraction_truncated"] == 1
    assert metrics["tis_ratio_max"] == pytest.approx(8.0)


@pytest.mark.parametrize(
    ("estimator", "kl", "grad"),
    [("k1", math.log(2), 1.0), ("k2", math.log(2) ** 2 / 2, math.log(2)), ("k3", 0.5 - math.log(0.5) - 1, 0.5)],
)
def test_kl_penalty(estimator: str, kl: float, grad: float) -> None:
    """pi twice as likely as the reference: d = log(1/2); the gradients are 1, -d and 1 - exp(d)."""
    config = LossConfig(algorithm="grpo", kl_coef=10.0, kl_estimator=estimator)
    value, gradient, metrics = one_token(1.0, 0.0, config, ref_logprobs_N=-1.0 - math.log(2))
    assert value == pytest.approx(10 * kl)
    assert gradient == pytest.approx(10 * grad)
    assert metrics["ref_kl"] == pytest.approx(kl)
    assert metrics["kl_loss"] == pytest.approx(10 * kl)


# -- awkward input --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_untrained_values_are_never_read(algorithm: str) -> None:
    step = formulas.random_step(11, 5, constant_advantages=algorithm == "gspo")
    loss, denominators = make_loss(config_of(algorithm, "sequence")), formulas.denominators_of(step)
    inputs = formulas.inputs_of(step, list(range(5)))
    assert not inputs.loss_mask_N.all()
    clean = inputs.logprobs_N.detach().requires_grad_()
    dirty = clean.detach().masked_fill(~inputs.loss_mask_N, math.nan).requires_grad_()
    others = {
        name: getattr(inputs, name).detach().masked_fill(~inputs.loss_mask_N, math.inf)
        for name in ("old_logprobs_N", "ref_logprobs_N", "behaviour_logprobs_N", "advantages_N", "entropy_N")
    }
    first = loss(replace(inputs, logprobs_N=clean), denominators).loss
    second = loss(replace(inputs, logprobs_N=dirty, **others), denominators).loss
    first.backward()
    second.backward()
    assert first.item() == second.item()
    assert torch.equal(clean.grad, dirty.grad)
    assert (clean.grad[~inputs.loss_mask_N] == 0).all()


@pytest.mark.parametrize(("algorithm", "size"), list(itertools.product(ALGORITHMS, [0, 3])))
def test_microbatch_without_a_trained_token_gives_zero_and_gradients(algorithm: str, size: int) -> None:
    logprobs = torch.zeros(size, requires_grad=True)
    zeros = torch.zeros(size)
    inputs = LossInputs(
        logprobs_N=logprobs,
        loss_mask_N=torch.zeros(size, dtype=torch.bool),
        sequence_of_N=torch.zeros(size, dtype=torch.int64),
        old_logprobs_N=zeros,
        ref_logprobs_N=zeros,
        advantages_N=zeros,
        entropy_N=zeros,
    )
    config = config_of(algorithm, "sequence", kl_coef=0.1, entropy_coef=0.1)
    output = make_loss(config)(inputs, StepDenominators.from_counts([0, 4]))
    output.loss.backward()
    assert output.loss.item() == 0
    assert torch.equal(logprobs.grad, torch.zeros(size))
    assert output.metrics.values()["tokens"] == 0


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_bfloat16_is_computed_in_float32(algorithm: str) -> None:
    step = formulas.random_step(2, 4, constant_advantages=algorithm == "gspo")
    inputs = formulas.inputs_of(step, list(range(4)))
    low = inputs.logprobs_N.detach().to(torch.bfloat16).requires_grad_()
    high = low.detach().float().requires_grad_()
    loss, denominators = make_loss(config_of(algorithm)), formulas.denominators_of(step)
    outputs = [loss(replace(inputs, logprobs_N=x), denominators).loss for x in (low, high)]
    assert [x.dtype for x in outputs] == [torch.float32] * 2
    assert outputs[0].item() == outputs[1].item()
    outputs[0].backward()
    outputs[1].backward()
    assert low.grad.dtype == torch.bfloat16
    assert torch.equal(low.grad, high.grad.to(torch.bfloat16))


def test_overflowing_ratio_is_refused_even_where_it_would_be_clipped() -> None:
    inputs = LossInputs(
        logprobs_N=torch.zeros(1, requires_grad=True),
        loss_mask_N=torch.tensor([True]),
        sequence_of_N=torch.tensor([0]),
        old_logprobs_N=torch.tensor([-100.0]),
        advantages_N=torch.tensor([1.0]),
    )
    with pytest.raises(ValueError, match=r"number 0 of the step.*importance ratio.*inf at token 0.*too far apart"):
        make_loss(LossConfig(algorithm="ppo"))(inputs, StepDenominators.from_counts([1]))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["logprobs", "old_logprobs", "advantages", "ref_logprobs", "entropy"])
def test_not_finite_input_is_refused_by_name(name: str, bad: float) -> None:
    step = formulas.random_step(4, 3)
    step[1].mask = [True] * len(step[1].mask)
    inputs = formulas.inputs_of(step, [2, 1])
    at = len(step[2].mask)
    value = getattr(inputs, f"{name}_N").detach().clone()
    value[at] = bad
    loss = make_loss(config_of("grpo", kl_coef=0.1, entropy_coef=0.1))
    with pytest.raises(ValueError, match=rf"number 1 of the step\), field {name}: expected a finite.*at token {at} "):
        loss(replace(inputs, **{f"{name}_N": value}), formulas.denominators_of(step))


# -- these comparisons can fail -------------------------------------------------------------------------------------


def _wrong_side(tokens: policy_module.TrainedTokens, config: LossConfig) -> policy_module.PolicyTerm:
    ratio_T = torch.exp(tokens.logprobs_T - tokens.need("old_logprobs"))
    advantages_T = tokens.need("advantages")
    low, high = config.ratio_bounds
    return policy_module.PolicyTerm(
        loss_T=-torch.maximum(ratio_T * advantages_T, ratio_T.clamp(low, high) * advantages_T)
    )


def _swapped_bounds(tokens: policy_module.TrainedTokens, config: LossConfig) -> policy_module.PolicyTerm:
    return policy_module.POLICY_LOSSES["ppo"](
        tokens, replace(config, clip_low=config.clip_high, clip_high=config.clip_low)
    )


def _clipped_without_advantage_sign(
    tokens: policy_module.TrainedTokens, config: LossConfig
) -> policy_module.PolicyTerm:
    ratio_T = torch.exp(tokens.logprobs_T - tokens.need("old_logprobs"))
    return policy_module.PolicyTerm(loss_T=-ratio_T.clamp(*config.ratio_bounds) * tokens.need("advantages"))


@pytest.mark.parametrize("wrong", [_wrong_side, _swapped_bounds, _clipped_without_advantage_sign])
def test_a_wrong_clip_would_be_seen(wrong: object, monkeypatch: pytest.MonkeyPatch) -> None:
    step = formulas.random_step(7, 5)
    compare(step, config_of("grpo"))
    monkeypatch.setitem(policy_module.POLICY_LOSSES, "grpo", wrong)
    with pytest.raises(AssertionError):
        compare(step, config_of("grpo"))


@pytest.mark.parametrize(("right", "wrong"), list(itertools.permutations(NORMALIZATIONS, 2)))
def test_a_wrong_normalization_would_be_seen(right: str, wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    step = formulas.random_step(8, 5)
    for seq, group in zip(step, [0, 0, 1, 1, 2], strict=True):
        seq.group = group
    original = StepDenominators.sequence_weights
    monkeypatch.setattr(StepDenominators, "sequence_weights", lambda self, name, length: original(self, wrong, 5))
    with pytest.raises(AssertionError):
        compare(step, config_of("grpo", right))


def test_a_detached_ratio_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """GSPO-token's gradient in the place of GSPO's, with "token" normalization and unequal advantages."""
    step = formulas.random_step(9, 4)
    compare(step, config_of("gspo_token"))
    monkeypatch.setitem(policy_module.POLICY_LOSSES, "gspo_token", policy_module.POLICY_LOSSES["gspo"])
    with pytest.raises(AssertionError):
        compare(step, config_of("gspo_token"))
