"""What a router makes of its logits: scores, the experts chosen, their weights.

Functions of single rows, which know no tree. Models choose and weigh by themselves; these are for experts that are
forced, and for logits that are computed otherwise (`harts.ops.moe.router_logits`).

Shape suffixes: T rows, E experts, K experts per token, G groups of experts.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

__all__ = ["Gating", "Scores", "router_scores", "routing_probabilities"]

Scores = Literal["softmax", "sigmoid"]
"""`softmax` over all experts, or `sigmoid` of each expert's logit by itself."""


@dataclass(frozen=True, kw_only=True)
class Gating:
    """How experts are chosen and weighed.

    Attributes:
        scores: of all experts, from their logits.
        normalized: whether the scores of the chosen experts are divided by their sum.
        epsilon: added to that sum.
        floor: the least that the sum may be.
        scale: what all weights are multiplied by.
        groups: experts come in so many groups of neighbours, and only those of the best groups may be chosen.
        chosen_groups: how many groups are the best.
        group_best: a group is as good as so many of its best experts together.
    """

    scores: Scores = "softmax"
    normalized: bool = True
    epsilon: float = 0.0
    floor: float = 0.0
    scale: float = 1.0
    groups: int = 1
    chosen_groups: int = 1
    group_best: int = 2

    def choose(self, scores_TE: Tensor, per_token: int, bias_E: Tensor | None = None) -> Tensor:
        """The best experts, int64 [T, K], best first; of two equal ones, and of two equal groups, the lower.

        Args:
            scores_TE: of `router_scores`.
            per_token: K.
            bias_E: added where experts are chosen, and only there.
        """
        if bias_E is not None:
            scores_TE = scores_TE + bias_E.to(scores_TE.dtype)
        if self.chosen_groups < self.groups:
            scores_TGE = scores_TE.view(len(scores_TE), self.groups, -1)
            group_TG = scores_TGE.topk(min(self.group_best, scores_TGE.shape[-1]), dim=-1).values.sum(-1)
            best_TG = _largest(group_TG, self.chosen_groups)
            out_TG = torch.ones_like(group_TG, dtype=torch.bool).scatter(1, best_TG, False)
            scores_TE = scores_TGE.masked_fill(out_TG.unsqueeze(-1), float("-inf")).flatten(1)
        return _largest(scores_TE, per_token)

    def weigh(self, scores_TE: Tensor, chosen_TK: Tensor) -> Tensor:
        """Weights [T, K] of chosen experts, differentiable."""
        weight_TK = scores_TE.gather(1, chosen_TK)
        if self.normalized:
            total_T1 = weight_TK.sum(-1, keepdim=True) + self.epsilon
            weight_TK = weight_TK / (total_T1.clamp(min=self.floor) if self.floor else total_T1)
        return weight_TK if self.scale == 1 else weight_TK * self.scale


def router_scores(logits_TE: Tensor, scores: Scores) -> Tensor:
    """Scores of all experts, [T, E], in at least fp32.

    Raises:
        ValueError: an unknown name.
    """
    logits_TE = logits_TE.to(torch.promote_types(logits_TE.dtype, torch.float32))
    if scores == "softmax":
        return logits_TE.softmax(-1)
    if scores == "sigmoid":
        return logits_TE.sigmoid()
    raise ValueError(f"scores: expected 'softmax' or 'sigmoid', got {scores!r}")


def routing_probabilities(logits_TE: Tensor, scores: Scores) -> Tensor:
    """What a balancing loss takes the mean of: scores that sum to 1 over the experts, [T, E], in at least fp32."""
    scores_TE = router_scores(logits_TE, scores)
    return scores_TE if scores == "softmax" else scores_TE / scores_TE.sum(-1, keepdim=True)


def _largest(values_TX: Tensor, number: int) -> Tensor:
    """Places of the largest, largest first; a stable sort puts the lower of two equal ones first."""
    return values_TX.sort(dim=-1, descending=True, stable=True).indices[:, :number]
