"""Mixtures of experts on a tree: every row runs once, every token of every trajectory counts.

`run_experts` and `router_logits` are functions of single rows and know no tree. The statistics of routers count a row
as often as trajectories of its microbatch pass through it: pure functions of router logits, of the experts chosen, and
of how often rows count.
"""

from harts.ops.moe.counting import RouterSums, Scope, TokenCount, count_tokens, router_sums
from harts.ops.moe.experts import run_experts
from harts.ops.moe.gating import Gating, Scores, router_scores, routing_probabilities
from harts.ops.moe.losses import (
    CountedTokens,
    Layers,
    LoadPer,
    RouterStatistics,
    RouterStep,
    load_balancing_loss,
    loss_free_bias,
    max_violation,
    router_z_loss,
)
from harts.ops.moe.router import router_logits, router_logits_reference

__all__ = [
    "CountedTokens",
    "Gating",
    "Layers",
    "LoadPer",
    "RouterStatistics",
    "RouterStep",
    "RouterSums",
    "Scope",
    "Scores",
    "TokenCount",
    "count_tokens",
    "load_balancing_loss",
    "loss_free_bias",
    "max_violation",
    "router_logits",
    "router_logits_reference",
    "router_scores",
    "router_sums",
    "router_z_loss",
    "routing_probabilities",
    "run_experts",
]
