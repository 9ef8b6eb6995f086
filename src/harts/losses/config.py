"""What a loss is made of: one flat, frozen, checked record."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

__all__ = ["Algorithm", "KLEstimator", "LossConfig", "Normalization", "SharedTokens"]

Algorithm = Literal["supervised", "reinforce", "ppo", "grpo", "gspo", "gspo_token", "cispo"]
Normalization = Literal["token", "sequence", "group", "constant"]
KLEstimator = Literal["k1", "k2", "k3"]
SharedTokens = Literal["each", "once"]

# Half-widths (low, high) of the interval [1 - low, 1 + high] for the importance ratio, where none are given.
# ppo, grpo: arXiv:1707.06347. gspo: arXiv:2507.18071, section 5.1. cispo: no lower bound (arXiv:2506.13585) and weights
# of at most 5 (arXiv:2510.13786 finds little difference between 4 and 8).
_DEFAULT_CLIP: dict[str, tuple[float, float]] = {
    "ppo": (0.2, 0.2),
    "grpo": (0.2, 0.2),
    "gspo": (3e-4, 4e-4),
    "gspo_token": (3e-4, 4e-4),
    "cispo": (1.0, 4.0),
}
# The objectives whose papers average over sequences; all others default to the mean over tokens.
_SEQUENCE_LEVEL = ("gspo", "gspo_token")


@dataclass(frozen=True, kw_only=True)
class LossConfig:
    """Settings of a loss. A setting that the algorithm would ignore is an error, not a silent no-op.

    Attributes:
        algorithm: "supervised", "reinforce", "ppo", "grpo", "gspo", "gspo_token" or "cispo"; the formulas are in
            `harts.losses.policy`. "ppo" and "grpo" are the same clipped objective; they differ in where the advantages
            come from.
        normalization: how the tokens' terms are averaged over the optimiser step, "token", "sequence", "group" or
            "constant"; the formulas are in `harts.losses.StepDenominators`. None: "sequence" for gspo and
            gspo_token, "token" otherwise.
        clip_low: the importance ratio is clipped from below at 1 - clip_low, in [0, 1]. None: the
            algorithm's usual value.
        clip_high: the importance ratio is clipped from above at 1 + clip_high, >= 0; larger than clip_low is
            "clip-higher" (arXiv:2503.14476). None: the algorithm's usual value.
        dual_clip: with a negative advantage, the ratio is bounded by this number > 1 (arXiv:1912.09729). None: not.
        kl_coef: weight >= 0 of the KL divergence to the reference policy; it is averaged like the policy's loss.
        kl_estimator: "k1", "k2" or "k3"; see `harts.losses.kl_estimate`.
        entropy_coef: weight >= 0 of the entropy bonus; it is averaged like the policy's loss.
        max_length: the constant of "constant" normalization (Dr. GRPO), such as the largest response length, >= 1.
        tis_cap: truncated importance sampling: a token's policy loss is multiplied by
            min(pi_old / pi_behaviour, tis_cap), a constant for the gradient, where the sampler's probabilities differ
            from the trainer's. None: not.
        shared_tokens: a token that k trajectories train counts k times ("each", as on separate rows) or, within its
            rollout, once ("once": with weight 1/k in each of them); see `harts.losses.own_once`. Not for gspo, whose
            ratio joins all tokens of a sequence.

    Raises:
        ValueError: an unknown name, a number out of range, or a setting that this algorithm does not use.
    """

    algorithm: Algorithm = "grpo"
    normalization: Normalization | None = None
    clip_low: float | None = None
    clip_high: float | None = None
    dual_clip: float | None = None
    kl_coef: float = 0.0
    kl_estimator: KLEstimator = "k3"
    entropy_coef: float = 0.0
    max_length: int | None = None
    tis_cap: float | None = None
    shared_tokens: SharedTokens = "each"

    def __post_init__(self) -> None:
        self._check_name("algorithm", get_args(Algorithm))
        if self.normalization is not None:
            self._check_name("normalization", get_args(Normalization))
        self._check_name("kl_estimator", get_args(KLEstimator))
        self._check_name("shared_tokens", get_args(SharedTokens))
        if self.shared_tokens == "once" and self.algorithm == "gspo":
            raise _error("shared_tokens", "'each' with algorithm='gspo'", "'once'", "use algorithm='gspo_token'")
        self._check_number("clip_low", "a number in [0, 1]", lambda x: 0 <= x <= 1)
        self._check_number("clip_high", "a number >= 0", lambda x: x >= 0)
        self._check_number("dual_clip", "a number > 1", lambda x: x > 1)
        self._check_number("kl_coef", "a number >= 0", lambda x: x >= 0, optional=False)
        self._check_number("entropy_coef", "a number >= 0", lambda x: x >= 0, optional=False)
        self._check_number("max_length", "an integer >= 1", lambda x: x >= 1 and isinstance(self.max_length, int))
        self._check_number("tis_cap", "a number > 0", lambda x: x > 0)
        self._check_used("clip_low", tuple(_DEFAULT_CLIP))
        self._check_used("clip_high", tuple(_DEFAULT_CLIP))
        self._check_used("dual_clip", ("ppo", "grpo"))
        # The sequence ratio of gspo is one factor for all tokens: a weight per token would not belong to it.
        self._check_used("tis_cap", ("reinforce", "ppo", "grpo", "gspo_token", "cispo"))
        constant = self.averaging == "constant"
        if constant and self.max_length is None:
            raise _error(
                "max_length",
                "an integer >= 1 with normalization='constant'",
                "None",
                "give the largest response length",
            )
        if not constant and self.max_length is not None:
            raise _error(
                "max_length", f"None with normalization={self.averaging!r}", str(self.max_length), "leave it out"
            )

    @property
    def averaging(self) -> Normalization:
        """The normalization in force: the one given, else the algorithm's default."""
        if self.normalization is not None:
            return self.normalization
        return "sequence" if self.algorithm in _SEQUENCE_LEVEL else "token"

    @property
    def ratio_bounds(self) -> tuple[float, float]:
        """The interval (1 - clip_low, 1 + clip_high) in force.

        Raises:
            ValueError: the algorithm does not clip.
        """
        if self.algorithm not in _DEFAULT_CLIP:
            raise _error("algorithm", "one that clips: " + ", ".join(_DEFAULT_CLIP), self.algorithm, "it has no bounds")
        low, high = _DEFAULT_CLIP[self.algorithm]
        low = low if self.clip_low is None else self.clip_low
        high = high if self.clip_high is None else self.clip_high
        return 1 - low, 1 + high

    @property
    def requires(self) -> frozenset[str]:
        """What the loss reads besides log-probabilities and mask.

        Any of "advantages", "old_logprobs", "behaviour_logprobs", "ref_logprobs", "entropy" (fields of `LossInputs`)
        and "group" (the trajectories' group names).
        """
        needed = set()
        if self.algorithm != "supervised":
            needed.add("advantages")
        if self.algorithm in _DEFAULT_CLIP:
            needed.add("old_logprobs")
        if self.tis_cap is not None:
            needed |= {"old_logprobs", "behaviour_logprobs"}
        if self.kl_coef > 0:
            needed.add("ref_logprobs")
        if self.entropy_coef > 0:
            needed.add("entropy")
        if self.averaging == "group":
            needed.add("group")
        return frozenset(needed)

    def _check_name(self, name: str, valid: tuple[str, ...]) -> None:
        value = getattr(self, name)
        if value not in valid:
            raise _error(name, "one of " + ", ".join(valid), repr(value), "choose one of them")

    def _check_number(self, name: str, expected: str, good: Callable[[float], bool], *, optional: bool = True) -> None:
        value = getattr(self, name)
        if value is None and optional:
            return
        number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not number or not good(value):
            raise _error(name, expected + (" or None" if optional else ""), repr(value), "correct it")

    def _check_used(self, name: str, algorithms: tuple[str, ...]) -> None:
        value = getattr(self, name)
        if value is not None and self.algorithm not in algorithms:
            used = ", ".join(algorithms)
            raise _error(name, f"None with algorithm={self.algorithm!r}", repr(value), f"only these use it: {used}")


def _error(name: str, expected: str, got: str, action: str) -> ValueError:
    return ValueError(f"loss config, field {name}: expected {expected}, got {got}; {action}")
