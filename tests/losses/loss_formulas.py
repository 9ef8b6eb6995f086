"""The losses once more, as straight loops over Python numbers: what the tests of `harts.losses` compare with.

Written from the papers' formulas: averages are nested means, not weights; gradients come from the complex step
f'(x) = Im f(x + ih) / h (exact to rounding for tiny h), not from autograd. `theta` is what is differentiated, `fixed`
the same numbers where a formula stops the gradient. Comparisons look at real parts.
"""

import cmath
from dataclasses import dataclass, field

import numpy as np
import torch

from harts.losses import LossConfig, LossInputs, StepDenominators

H = 1e-30


@dataclass
class Sequence:
    mask: list[bool]
    logprobs: list[float]
    old: list[float]
    behaviour: list[float]
    ref: list[float]
    advantages: list[float]
    entropy: list[float]
    group: int = 0

    @property
    def trained(self) -> list[int]:
        return [t for t, on in enumerate(self.mask) if on]


@dataclass
class Expected:
    loss: float
    logprob_grads: list[list[float]] = field(default_factory=list)
    entropy_grads: list[list[float]] = field(default_factory=list)


def smaller(a: complex, b: complex) -> complex:
    return a if complex(a).real <= complex(b).real else b


def larger(a: complex, b: complex) -> complex:
    return a if complex(a).real >= complex(b).real else b


def clip(x: complex, low: float, high: float) -> complex:
    return low if complex(x).real < low else high if complex(x).real > high else x


def objective(seq: Sequence, t: int, theta: list[complex], config: LossConfig) -> complex:
    """What is maximised for token t (papers maximise; the loss is its negative)."""
    algorithm, advantage, fixed = config.algorithm, seq.advantages[t], seq.logprobs
    if algorithm == "supervised":
        return theta[t]
    if algorithm == "reinforce":
        return advantage * theta[t]
    low, high = 1 - config.clip_low, 1 + config.clip_high
    if algorithm == "cispo":
        return clip(cmath.exp(fixed[t] - seq.old[t]), low, high) * advantage * theta[t]
    if algorithm in ("ppo", "grpo"):
        ratio = cmath.exp(theta[t] - seq.old[t])
    elif algorithm == "gspo":  # (pi(y) / pi_old(y)) ** (1 / |y|)
        ratio = cmath.exp(sum(theta[i] - seq.old[i] for i in seq.trained) / len(seq.trained))
    else:
        ratio = cmath.exp(sum(fixed[i] - seq.old[i] for i in seq.trained) / len(seq.trained))
        ratio = ratio * cmath.exp(theta[t]) / cmath.exp(fixed[t])
    value = smaller(ratio * advantage, clip(ratio, low, high) * advantage)
    if config.dual_clip is not None and advantage < 0:
        value = larger(value, config.dual_clip * advantage)
    return value


def token_loss(seq: Sequence, t: int, theta: list[complex], entropy: list[complex], config: LossConfig) -> complex:
    value = -objective(seq, t, theta, config)
    if config.tis_cap is not None:
        value *= min(np.exp(seq.old[t]) / np.exp(seq.behaviour[t]), config.tis_cap)
    pi, ref = theta[t], seq.ref[t]
    kl = {"k1": pi - ref, "k2": 0.5 * (pi - ref) ** 2, "k3": cmath.exp(ref) / cmath.exp(pi) - (ref - pi) - 1}
    return value + config.kl_coef * kl[config.kl_estimator] - config.entropy_coef * entropy[t]


def mean(values: list[complex]) -> complex:
    return sum(values) / len(values)


def step_loss(
    step: list[Sequence], thetas: list[list[complex]], entropies: list[list[complex]], config: LossConfig
) -> complex:
    terms = [
        [token_loss(seq, t, theta, entropy, config) for t in seq.trained]
        for seq, theta, entropy in zip(step, thetas, entropies, strict=True)
    ]
    if config.averaging == "token":
        return mean([x for sequence in terms for x in sequence])
    if config.averaging == "sequence":
        return mean([mean(sequence) for sequence in terms if sequence])
    if config.averaging == "group":
        groups = [
            [x for seq, sequence in zip(step, terms, strict=True) if seq.group == g for x in sequence]
            for g in sorted({seq.group for seq in step})
        ]
        return mean([mean(group) for group in groups if group])
    return mean([sum(sequence) / config.max_length for sequence in terms])


def expected(step: list[Sequence], config: LossConfig) -> Expected:
    """Value and gradients with respect to every log-probability and entropy."""
    logprobs = [[complex(x) for x in seq.logprobs] for seq in step]
    entropies = [[complex(x) for x in seq.entropy] for seq in step]
    result = Expected(loss=complex(step_loss(step, logprobs, entropies, config)).real)
    for which, out in ((logprobs, result.logprob_grads), (entropies, result.entropy_grads)):
        for s in range(len(step)):
            row = []
            for t in range(len(which[s])):
                which[s][t] += 1j * H
                row.append(complex(step_loss(step, logprobs, entropies, config)).imag / H)
                which[s][t] = complex(which[s][t].real)
            out.append(row)
    return result


def random_step(
    seed: int, count: int, *, longest: int = 6, spread: float = 0.4, constant_advantages: bool = False
) -> list[Sequence]:
    """Sequences of random lengths, some without a trained token, at least one token of all trained."""
    rng = np.random.default_rng(seed)
    step = []
    for index in range(count):
        length = int(rng.integers(1, longest + 1))
        mask = rng.random(length) < rng.choice([0.0, 0.6, 1.0], p=[0.2, 0.5, 0.3])
        if index == count - 1 and not mask.any() and not any(any(s.mask) for s in step):
            mask[-1] = True
        logprobs = -rng.exponential(1.0, length)
        advantages = rng.normal(size=1 if constant_advantages else length) * np.ones(length)
        advantages[rng.random(length) < (0.0 if constant_advantages else 0.2)] = 0.0
        step.append(
            Sequence(
                mask=mask.tolist(),
                logprobs=logprobs.tolist(),
                old=(logprobs + rng.normal(size=length) * spread).tolist(),
                behaviour=(logprobs + rng.normal(size=length) * spread).tolist(),
                ref=(logprobs + rng.normal(size=length)).tolist(),
                advantages=advantages.tolist(),
                entropy=rng.exponential(1.0, length).tolist(),
                group=int(rng.integers(0, 3)),
            )
        )
    return step


def inputs_of(
    step: list[Sequence], indices: list[int], leaves: list[tuple[torch.Tensor, torch.Tensor]] | None = None
) -> LossInputs:
    """The microbatch of these sequences; `leaves` are (log-probabilities, entropies) of each sequence of the step."""
    leaves = leaves_of(step) if leaves is None else leaves

    def flat(name: str) -> torch.Tensor:
        return torch.tensor([x for i in indices for x in getattr(step[i], name)], dtype=torch.float64)

    return LossInputs(
        logprobs_N=torch.cat([leaves[i][0] for i in indices]),
        loss_mask_N=torch.tensor([x for i in indices for x in step[i].mask], dtype=torch.bool),
        sequence_of_N=torch.tensor([i for i in indices for _ in step[i].mask], dtype=torch.int64),
        old_logprobs_N=flat("old"),
        behaviour_logprobs_N=flat("behaviour"),
        ref_logprobs_N=flat("ref"),
        advantages_N=flat("advantages"),
        entropy_N=torch.cat([leaves[i][1] for i in indices]),
    )


def leaves_of(step: list[Sequence]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [
        (
            torch.tensor(seq.logprobs, dtype=torch.float64, requires_grad=True),
            torch.tensor(seq.entropy, dtype=torch.float64, requires_grad=True),
        )
        for seq in step
    ]


def denominators_of(step: list[Sequence]) -> StepDenominators:
    return StepDenominators.from_counts([len(seq.trained) for seq in step], [seq.group for seq in step])


def grads_of(leaves: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    def flat(which: int) -> torch.Tensor:
        return torch.cat([torch.zeros_like(x[which]) if x[which].grad is None else x[which].grad for x in leaves])

    return flat(0), flat(1)
