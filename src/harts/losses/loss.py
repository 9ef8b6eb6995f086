"""A loss: the objective, the KL penalty and the entropy bonus, averaged over the optimiser step.

T trained tokens of the microbatch
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from harts.losses.config import LossConfig
from harts.losses.denominators import StepDenominators
from harts.losses.inputs import LossInputs, TrainedTokens, check_trajectories
from harts.losses.kl import kl_estimate
from harts.losses.metrics import LossMetrics
from harts.losses.policy import POLICY_LOSSES, PolicyTerm
from harts.trajectory import Trajectory
from harts.transfer import send

__all__ = ["Loss", "LossOutput", "make_loss"]


@dataclass(frozen=True, kw_only=True, eq=False)
class LossOutput:
    """The part of a step's loss that one microbatch bears.

    Attributes:
        loss: 0-d float, differentiable; the sum over the step's microbatches is the step's loss.
        metrics: detached sums; add them over microbatches and replicas.
    """

    loss: Tensor
    metrics: LossMetrics


@dataclass(frozen=True)
class Loss:
    """A loss made from a config: `loss(inputs, denominators)`.

    loss = sum over trained tokens of  w (u l + kl_coef k - entropy_coef H)

    with the token's weight w (`StepDenominators`), objective l (`harts.losses.policy`), truncated importance weight
    u = min(pi_old / pi_behaviour, tis_cap) or 1, KL estimate k (`kl_estimate`) and entropy H.
    """

    config: LossConfig

    @property
    def requires(self) -> frozenset[str]:
        """What is read besides log-probabilities and mask; see `LossConfig.requires`."""
        return self.config.requires

    def check(self, trajectories: Sequence[Trajectory], *, given: Sequence[str] = ()) -> None:
        """Refuses trajectories that lack what this loss reads, before any compute.

        Args:
            trajectories: those of the step.
            given: inputs that the caller computes itself, such as "old_logprobs" and "ref_logprobs".

        Raises:
            ValueError: naming the trajectory and the field.
        """
        check_trajectories(trajectories, self.requires - set(given))

    def __call__(self, inputs: LossInputs, denominators: StepDenominators) -> LossOutput:
        """The microbatch's part of the step's loss, computed in float32 or the dtype of the log-probabilities if wider.

        A microbatch without a trained token gives 0, differentiable.

        Args:
            inputs: the microbatch; its trajectories are whole.
            denominators: those of the whole optimiser step.

        Raises:
            ValueError: an input is missing or not finite at a trained token, a ratio overflows, a trajectory is not
                whole, advantages differ within a sequence with "gspo", or the denominators count shared tokens
                otherwise than the config says.
        """
        config = self.config
        tokens = inputs.trained()
        if (config.shared_tokens == "once") != (denominators.share_of_S is not None):
            made = "each" if denominators.share_of_S is None else "once"
            raise ValueError(
                f"denominators: expected those of shared_tokens={config.shared_tokens!r}, as the loss has it, got "
                f"those of {made!r}; make them with StepDenominators.from_trajectories(..., shared_tokens=...)"
            )
        denominators.check_whole(tokens.sequence_of_R, tokens.tokens_of_R)
        self._check_inputs(tokens, denominators)
        term = POLICY_LOSSES[config.algorithm](tokens, config)
        policy_T, importance_T = self._corrected(term.loss_T, tokens)
        kl_T = self._kl(tokens)
        self._check_terms(tokens, denominators, term, policy_T, kl_T, importance_T)

        weights_T = self._weights(tokens, denominators).to(policy_T.dtype)
        parts = {"policy_loss": (weights_T * policy_T).sum()}
        if config.kl_coef > 0 and kl_T is not None:
            parts["kl_loss"] = config.kl_coef * (weights_T * kl_T).sum()
        if config.entropy_coef > 0:
            parts["entropy_loss"] = -config.entropy_coef * (weights_T * tokens.need("entropy")).sum()
        loss = torch.stack(list(parts.values())).sum()
        metrics = self._metrics({"loss": loss, **parts}, tokens, term, kl_T, importance_T)
        return LossOutput(loss=loss, metrics=metrics)

    def _weights(self, tokens: TrainedTokens, denominators: StepDenominators) -> Tensor:
        """The weight of each token, float64 [T]."""
        config = self.config
        weights_S = denominators.sequence_weights(config.averaging, config.max_length)
        sequence_of_T = tokens.sequence_of_R[tokens.run_of_T]
        weights_T = send(weights_S, sequence_of_T.device)[sequence_of_T]
        shares_T = denominators.shares_of(tokens.sequence_of_R)
        return weights_T if shares_T is None else weights_T * send(shares_T, weights_T.device)

    # -- parts --------------------------------------------------------------------------------------------------

    def _corrected(self, loss_T: Tensor, tokens: TrainedTokens) -> tuple[Tensor, Tensor | None]:
        """The objective times the truncated importance weight, and the weight before truncation."""
        if self.config.tis_cap is None:
            return loss_T, None
        importance_T = torch.exp(tokens.need("old_logprobs") - tokens.need("behaviour_logprobs"))
        return importance_T.clamp(max=self.config.tis_cap) * loss_T, importance_T

    def _kl(self, tokens: TrainedTokens) -> Tensor | None:
        if self.config.kl_coef == 0:
            return None
        return kl_estimate(tokens.logprobs_T, tokens.need("ref_logprobs"), self.config.kl_estimator)

    def _check_inputs(self, tokens: TrainedTokens, denominators: StepDenominators) -> None:
        read = ["logprobs", *sorted(self.requires - {"group"})]
        tokens.check_finite(
            {f"field {name}": tokens.need(name) for name in read},
            denominators.label,
            "fix the model or the data: nothing is clipped or left out in silence",
        )
        if self.config.algorithm == "gspo":
            # Exactly one value: the mean of equal numbers may differ from them by rounding, so compare with the first.
            advantages_T = tokens.need("advantages")
            first_of_R = tokens.tokens_of_R.cumsum(0) - tokens.tokens_of_R
            different_T = advantages_T != advantages_T[first_of_R[tokens.run_of_T]]
            if different_T.any():
                at = int(different_T.int().argmax())
                label = denominators.label(int(tokens.sequence_of_R[tokens.run_of_T[at]]))
                raise ValueError(
                    f"{label}, field advantages: expected one value for the whole sequence with algorithm='gspo', got "
                    f"another at token {int(tokens.index_T[at])} of the microbatch; use algorithm='gspo_token'"
                )

    def _check_terms(
        self,
        tokens: TrainedTokens,
        denominators: StepDenominators,
        term: PolicyTerm,
        policy_T: Tensor,
        kl_T: Tensor | None,
        importance_T: Tensor | None,
    ) -> None:
        # An infinite ratio must not pass even where it is clipped: its gradient would be 0 * inf.
        tokens.check_finite(
            {
                "importance ratio": term.ratio_T,
                "ratio of old to behaviour policy": importance_T,
                "KL estimate": kl_T,
                "policy loss": policy_T,
            },
            denominators.label,
            "the two policies are too far apart at this token: check that the log-probabilities belong to these tokens",
        )

    @torch.no_grad()
    def _metrics(
        self,
        parts: dict[str, Tensor],
        tokens: TrainedTokens,
        term: PolicyTerm,
        kl_T: Tensor | None,
        importance_T: Tensor | None,
    ) -> LossMetrics:
        totals = {name: value.detach().double() for name, value in parts.items()}
        totals["tokens"] = totals["loss"].new_tensor(len(tokens.index_T))
        sums_T: dict[str, Tensor] = {f"clip_fraction_{name}": clipped_T for name, clipped_T in term.clipped.items()}
        maxima_T: dict[str, Tensor] = {}
        if term.ratio_T is not None:
            # KL(pi_old || pi) by k3, on tokens of pi_old: r - 1 - log r.
            sums_T["old_kl"] = kl_estimate(tokens.need("old_logprobs"), tokens.logprobs_T)
            sums_T["ratio_mean"] = maxima_T["ratio_max"] = term.ratio_T
        if kl_T is not None:
            sums_T["ref_kl"] = kl_T
        if tokens.entropy_T is not None and self.config.entropy_coef > 0:
            sums_T["entropy"] = tokens.entropy_T
        if importance_T is not None and self.config.tis_cap is not None:
            sums_T["tis_fraction_truncated"] = importance_T > self.config.tis_cap
            sums_T["tis_ratio_mean"] = maxima_T["tis_ratio_max"] = importance_T
        lowest = totals["loss"].new_tensor([float("-inf")])
        return LossMetrics(
            totals=totals,
            token_sums={name: value_T.double().sum() for name, value_T in sums_T.items()},
            maxima={name: torch.cat([lowest, value_T.double()]).max() for name, value_T in maxima_T.items()},
        )


def make_loss(config: LossConfig) -> Loss:
    """The loss that `config` describes.

    Every algorithm of `LossConfig.algorithm` is an entry of `harts.losses.policy.POLICY_LOSSES`.
    """
    return Loss(config)
