"""Load balancing, z-loss and loss-free bias from a router's sums.

Shape suffixes: E experts, K experts per token, Y mixture-of-experts layers, U units (what statistics are kept apart
for: each trajectory, or one unit for all).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from harts.ops.moe import Scope
from harts.trajectory import Trajectory

__all__ = [
    "CountedTokens",
    "Layers",
    "LoadPer",
    "RouterStatistics",
    "RouterStep",
    "load_balancing_loss",
    "loss_free_bias",
    "max_violation",
    "router_z_loss",
]

CountedTokens = Literal["all", "trained"]
"""Tokens that count: all (a batch without padding), or those that the loss mask trains."""

Layers = Literal["pooled", "mean", "sum"]
"""`pooled`: loads and probabilities of all layers are added up before they are multiplied, as transformers does; `mean`
and `sum`: of each layer's loss."""

LoadPer = Literal["token", "assignment"]
"""What an expert's load is a share of: tokens (shares sum to K) or (token, expert) assignments (they sum to 1)."""


@dataclass(frozen=True, kw_only=True, eq=False)
class RouterStatistics:
    """The routers of all layers, summed over the tokens of a microbatch.

    Attributes:
        scope: that the tokens were counted with.
        experts_per_token: K.
        tokens_U: int64 [U] on the CPU: tokens of each unit.
        load_UYE: int64 [U, Y, E]: logical load: assignments of the trajectories' tokens.
        physical_YE: int64 [Y, E]: physical load: rows that each expert ran.
        prob_UYE: [U, Y, E], differentiable: sum of routing probabilities.
        z_UY: [U, Y], differentiable: sum of squared log-sum-exps.
    """

    scope: Scope
    experts_per_token: int
    tokens_U: Tensor
    load_UYE: Tensor
    physical_YE: Tensor
    prob_UYE: Tensor
    z_UY: Tensor

    @property
    def load_YE(self) -> Tensor:
        """int64 [Y, E]: logical load of the microbatch."""
        return self.load_UYE.sum(0)

    @property
    def tokens(self) -> int:
        """Counted tokens of the microbatch."""
        return int(self.tokens_U.sum())

    @property
    def trajectories(self) -> int:
        """Trajectories with a counted token; known in scope "trajectory" only, else 0."""
        return int((self.tokens_U > 0).sum()) if self.scope == "trajectory" else 0


@dataclass(frozen=True, kw_only=True, eq=False)
class RouterStep:
    """What the losses of an optimiser step's microbatches are divided by, so that they add up to the step's.

    Attributes:
        tokens: counted tokens of all the step's trajectories.
        trajectories: those with a counted token.
        load_YE: int64 [Y, E]: logical load of the step, from a pass without gradients before; None where the scope
            does not need it.
    """

    tokens: int
    trajectories: int = 0
    load_YE: Tensor | None = None

    @staticmethod
    def from_trajectories(trajectories: Sequence[Trajectory], *, tokens: CountedTokens = "all") -> "RouterStep":
        """Counts without loads, which is all that scope "trajectory" and the z-loss need.

        Args:
            trajectories: of the whole step, on all replicas.
            tokens: those that count.
        """
        counts = [len(each) if tokens == "all" else each.num_trained for each in trajectories]
        return RouterStep(tokens=sum(counts), trajectories=sum(count > 0 for count in counts))

    @staticmethod
    def from_statistics(microbatches: Sequence[RouterStatistics]) -> "RouterStep":
        """Adds up all microbatches of a step (of this replica; `all_reduce` adds the others')."""
        return RouterStep(
            tokens=sum(each.tokens for each in microbatches),
            trajectories=sum(each.trajectories for each in microbatches),
            load_YE=torch.stack([each.load_YE for each in microbatches]).sum(0),
        )

    def all_reduce(self) -> "RouterStep":
        """Sums over all replicas of the default process group; every replica must call it."""
        device = "cpu" if self.load_YE is None else self.load_YE.device
        counts = torch.tensor([self.tokens, self.trajectories], device=device)
        torch.distributed.all_reduce(counts)
        load_YE = None if self.load_YE is None else self.load_YE.clone()
        if load_YE is not None:
            torch.distributed.all_reduce(load_YE)
        tokens, trajectories = counts.tolist()
        return RouterStep(tokens=tokens, trajectories=trajectories, load_YE=load_YE)


def load_balancing_loss(
    statistics: RouterStatistics,
    *,
    layers: Layers = "pooled",
    load_per: LoadPer = "token",
    step: RouterStep | None = None,
) -> Tensor:
    """E sum_e f_e P_e, where f_e is the load of expert e and P_e the mean of its routing probability.

    Gradients flow through P only. Switch Transformer (arXiv:2101.03961, eq. 4-6), without its coefficient. With
    `layers="pooled"` and `load_per="token"`, over a batch, it is transformers' `load_balancing_loss_func`; with scope
    "trajectory" and `load_per="assignment"` the sequence-wise loss of DeepSeek-V3 (arXiv:2412.19437).

    The loss is not linear in the batch, so the scope of the statistics decides what f and P are taken over:

    - "microbatch": its tokens. Another plan gives another loss.
    - "step": f is that of the step (`step.load_YE`), and P is the microbatch's sum over the step's tokens. The losses
      of the step's microbatches add up to the step's loss, and their gradients to its gradient, whatever the plan.
    - "trajectory": each trajectory alone, then the mean over trajectories: over those of the step with `step`, so
      that microbatches add up, else over those of the microbatch.

    Args:
        statistics: of one microbatch.
        layers: how layers are put together.
        load_per: what the load is a share of.
        step: needed in scope "step", possible in scope "trajectory", refused in scope "microbatch".

    Returns:
        A scalar, in the dtype of the sums; 0 where no token counts.

    Raises:
        ValueError: an unknown name, or a `step` that is missing, too much or of another model.
    """
    if load_per not in ("token", "assignment"):
        raise ValueError(f"load_per: expected 'token' or 'assignment', got {load_per!r}")
    tokens_U = _denominator(statistics, step)
    load_UYE, prob_UYE = statistics.load_UYE, statistics.prob_UYE
    num_layers, num_experts = load_UYE.shape[1:]
    if statistics.scope == "step":
        if step is None or step.load_YE is None or step.load_YE.shape != load_UYE.shape[1:]:
            got = "none" if step is None or step.load_YE is None else f"{list(step.load_YE.shape)}"
            raise ValueError(
                f"step: scope 'step' expected loads [{num_layers}, {num_experts}] of the whole step, got {got}; run "
                "all its microbatches without gradients first and pass RouterStep.from_statistics(...)"
            )
        load_UYE = step.load_YE.to(load_UYE.device).unsqueeze(0)
    _check_layers(layers)
    if layers == "pooled":
        load_UYE, prob_UYE = load_UYE.sum(1, keepdim=True), prob_UYE.sum(1, keepdim=True)
        tokens_U = tokens_U * num_layers
    share_UYE = load_UYE.to(torch.float64) / tokens_U[:, None, None]
    if load_per == "assignment":
        share_UYE = share_UYE / statistics.experts_per_token
    mean_UYE = prob_UYE / tokens_U.to(prob_UYE.dtype)[:, None, None]
    loss_UY = num_experts * (share_UYE.to(prob_UYE.dtype) * mean_UYE).sum(-1)
    return _over_units(loss_UY, statistics, layers, step)


def router_z_loss(statistics: RouterStatistics, *, layers: Layers = "pooled", step: RouterStep | None = None) -> Tensor:
    """Mean over tokens of the squared log-sum-exp of the router's logits: ST-MoE (arXiv:2202.08906).

    Args:
        statistics: of one microbatch.
        layers: "pooled" and "mean": also the mean over layers; "sum": the sum over layers.
        step: as for `load_balancing_loss`; its loads are not needed.

    Returns:
        A scalar, without a coefficient.

    Raises:
        ValueError: as `load_balancing_loss`.
    """
    _check_layers(layers)
    tokens_U = _denominator(statistics, step)
    loss_UY = statistics.z_UY / tokens_U.to(statistics.z_UY.dtype)[:, None]
    return _over_units(loss_UY, statistics, "sum" if layers == "sum" else "mean", step)


def _check_layers(layers: str) -> None:
    if layers not in ("pooled", "mean", "sum"):
        raise ValueError(f"layers: expected 'pooled', 'mean' or 'sum', got {layers!r}")


def _denominator(statistics: RouterStatistics, step: RouterStep | None) -> Tensor:
    """Tokens that each unit's sums are divided by, at least 1, fp64 [U] on the device of the sums."""
    tokens_U = statistics.tokens_U
    if statistics.scope == "microbatch" and step is not None:
        raise ValueError(
            "step: scope 'microbatch' divides by the tokens of the microbatch, so it takes none; choose scope 'step' "
            "or 'trajectory' for losses that add up over microbatches"
        )
    if statistics.scope == "step":
        if step is None:
            raise ValueError("step: scope 'step' divides by the tokens of the step; pass a RouterStep")
        tokens_U = torch.tensor([step.tokens])
    if step is not None and (statistics.tokens > step.tokens or statistics.trajectories > step.trajectories):
        raise ValueError(
            f"step: expected at least the microbatch's {statistics.tokens} tokens and {statistics.trajectories} "
            f"trajectories, got {step.tokens} and {step.trajectories}; was it counted over other trajectories, or "
            "over other tokens of them?"
        )
    return tokens_U.clamp(min=1).to(statistics.prob_UYE.device, torch.float64)


def _over_units(loss_UY: Tensor, statistics: RouterStatistics, layers: Layers, step: RouterStep | None) -> Tensor:
    loss_U = loss_UY.mean(1) if layers == "mean" else loss_UY.sum(1)
    if statistics.scope != "trajectory":
        return loss_U.sum()
    return loss_U.sum() / max(1, statistics.trajectories if step is None else step.trajectories)


def loss_free_bias(bias_YE: Tensor, load_YE: Tensor, *, rate: float) -> Tensor:
    """Next routing bias of loss-free balancing: b + rate sign(mean load - load) (arXiv:2408.15664).

    Args:
        bias_YE: [Y, E], added to the router's scores where experts are chosen.
        load_YE: int64 [Y, E]: logical load of the optimiser step, over all microbatches and replicas.
        rate: how far a bias moves, >= 0.
    """
    mean_Y1 = load_YE.to(torch.float64).mean(-1, keepdim=True)
    return bias_YE + rate * (mean_Y1 - load_YE).sign().to(bias_YE.dtype)


def max_violation(load_YE: Tensor) -> Tensor:
    """Largest load of an expert over the mean load, less 1, per layer: fp64 [Y] (MaxVio of arXiv:2408.15664)."""
    load_YE = load_YE.to(torch.float64)
    return load_YE.amax(-1) / load_YE.mean(-1).clamp(min=torch.finfo(torch.float64).tiny) - 1
