"""Estimators of a KL divergence from the log-probabilities of sampled tokens."""

from torch import Tensor, expm1

from harts.losses.config import KLEstimator

__all__ = ["kl_estimate"]


def kl_estimate(logprobs_T: Tensor, ref_logprobs_T: Tensor, estimator: KLEstimator = "k3") -> Tensor:
    """Per token, an estimate of KL(pi || pi_ref) in nats, for tokens sampled from pi.

    With d = log pi_ref - log pi (J. Schulman, "Approximating KL Divergence", 2020):

    - "k1": -d. Unbiased, of either sign. As a term of a loss it is no penalty: its gradient, that of log pi, has mean
      zero under pi (arXiv:2506.09477).
    - "k2": d**2 / 2. Biased, never negative; its gradient is that of the KL divergence on tokens sampled from pi.
    - "k3": exp(d) - d - 1. Unbiased, never negative; the estimator of GRPO (arXiv:2402.03300, eq. 4).

    Args:
        logprobs_T: float [T], differentiable.
        ref_logprobs_T: float [T].
        estimator: "k1", "k2" or "k3".

    Returns:
        float [T], differentiable.

    Raises:
        ValueError: an unknown estimator.
    """
    delta_T = ref_logprobs_T - logprobs_T
    if estimator == "k1":
        return -delta_T
    if estimator == "k2":
        return delta_T.square() / 2
    if estimator == "k3":
        return expm1(delta_T) - delta_T  # expm1: for close policies exp(d) - 1 - d would cancel
    raise ValueError(f"estimator: expected one of k1, k2, k3, got {estimator!r}; choose one of them")
