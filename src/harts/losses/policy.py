"""The objectives, token by token: what each trained token contributes before any averaging.

T trained tokens of the microbatch

In the formulas A is the token's advantage, r = pi / pi_old its importance ratio, low = 1 - clip_low,
high = 1 + clip_high, clip(x) = min(max(x, low), high), and sg(x) is x as a constant for the gradient.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from harts.losses.config import LossConfig
from harts.losses.inputs import TrainedTokens

__all__ = ["POLICY_LOSSES", "PolicyTerm"]


@dataclass(frozen=True, kw_only=True, eq=False)
class PolicyTerm:
    """What an objective makes of the trained tokens.

    Attributes:
        loss_T: float [T], differentiable: to be averaged and minimised.
        ratio_T: float [T], differentiable, or None: the importance ratio that was compared with the bounds.
        clipped: by bound ("low", "high", "dual"), bool [T]: the bound stands in for the token's ratio. A ratio exactly
            at a bound is not clipped.
    """

    loss_T: Tensor
    ratio_T: Tensor | None = None
    clipped: Mapping[str, Tensor] = field(default_factory=dict)


def _supervised(tokens: TrainedTokens, config: LossConfig) -> PolicyTerm:
    """-log pi: the negative log-likelihood."""
    return PolicyTerm(loss_T=-tokens.logprobs_T)


def _reinforce(tokens: TrainedTokens, config: LossConfig) -> PolicyTerm:
    """-A log pi (Williams 1992). A baseline belongs into the advantages."""
    return PolicyTerm(loss_T=-tokens.need("advantages") * tokens.logprobs_T)


def _clipped(tokens: TrainedTokens, config: LossConfig) -> PolicyTerm:
    """-min(r A, clip(r) A): PPO (arXiv:1707.06347, eq. 7) and GRPO (arXiv:2402.03300, eq. 3).

    With a clip_high above clip_low: clip-higher of DAPO (arXiv:2503.14476). With `dual_clip` c, where A < 0:
    -max(min(r A, clip(r) A), c A) (arXiv:1912.09729).
    """
    return _surrogate(torch.exp(tokens.logprobs_T - tokens.need("old_logprobs")), tokens, config)


def _gspo(tokens: TrainedTokens, config: LossConfig) -> PolicyTerm:
    """-min(s A, clip(s) A) with s = exp(mean over the sequence's trained tokens of log r).

    GSPO (arXiv:2507.18071). Every token of a sequence bears the sequence's term, so that the mean over
    its tokens is that term once.
    """
    log_ratio_T = tokens.sequence_mean(tokens.logprobs_T - tokens.need("old_logprobs"))
    return _surrogate(torch.exp(log_ratio_T), tokens, config)


def _gspo_token(tokens: TrainedTokens, config: LossConfig) -> PolicyTerm:
    """-min(s_t A, clip(s_t) A) with s_t = sg(s) pi / sg(pi), s as in GSPO.

    GSPO-token (arXiv:2507.18071, section 4.3): the value of GSPO, and advantages that may differ between tokens.
    """
    logprobs_T = tokens.logprobs_T
    sequence_log_ratio_T = tokens.sequence_mean(logprobs_T.detach() - tokens.need("old_logprobs"))
    return _surrogate(torch.exp(sequence_log_ratio_T + (logprobs_T - logprobs_T.detach())), tokens, config)


def _cispo(tokens: TrainedTokens, config: LossConfig) -> PolicyTerm:
    """-sg(clip(r)) A log pi: CISPO (arXiv:2506.13585). No token loses its gradient."""
    low, high = config.ratio_bounds
    ratio_T = torch.exp(tokens.logprobs_T.detach() - tokens.need("old_logprobs"))
    return PolicyTerm(
        loss_T=-ratio_T.clamp(low, high) * tokens.need("advantages") * tokens.logprobs_T,
        ratio_T=ratio_T,
        clipped={"low": ratio_T < low, "high": ratio_T > high},
    )


def _surrogate(ratio_T: Tensor, tokens: TrainedTokens, config: LossConfig) -> PolicyTerm:
    """The pessimistic clipped objective, by cases: a bound takes the ratio's place only where that lowers r A."""
    low, high = config.ratio_bounds
    advantages_T = tokens.need("advantages")
    fixed_T = ratio_T.detach()
    clipped = {"low": (advantages_T < 0) & (fixed_T < low), "high": (advantages_T > 0) & (fixed_T > high)}
    bounds = {"low": low, "high": high}
    if config.dual_clip is not None:
        clipped["dual"] = (advantages_T < 0) & (fixed_T > config.dual_clip)
        bounds["dual"] = config.dual_clip
    bounded_T = ratio_T
    for name, clipped_T in clipped.items():
        bounded_T = torch.where(clipped_T, bounds[name], bounded_T)
    return PolicyTerm(loss_T=-bounded_T * advantages_T, ratio_T=ratio_T, clipped=clipped)


POLICY_LOSSES: Mapping[str, Callable[[TrainedTokens, LossConfig], PolicyTerm]] = {
    "supervised": _supervised,
    "reinforce": _reinforce,
    "ppo": _clipped,
    "grpo": _clipped,
    "gspo": _gspo,
    "gspo_token": _gspo_token,
    "cispo": _cispo,
}
