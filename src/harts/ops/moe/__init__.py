"""Mixtures of experts on a tree: every row runs once, every token of every trajectory counts.

`run_experts` and `router_logits` are functions of single rows and know no tree. The sums of routers count a row as
often as trajectories of its microbatch pass through it: pure functions of router logits, of the experts chosen, and of
how often rows count. Losses made of them are in `harts.models.router_losses`.
"""

from harts.ops.moe.counting import RouterSums, Scope, TokenCount, count_tokens, router_sums
from harts.ops.moe.experts import run_experts
from harts.ops.moe.gating import Gating, Scores, router_scores, routing_probabilities
from harts.ops.moe.router import router_logits, router_logits_reference

__all__ = [
    "Gating",
    "RouterSums",
    "Scope",
    "Scores",
    "TokenCount",
    "count_tokens",
    "router_logits",
    "router_logits_reference",
    "router_scores",
    "router_sums",
    "routing_probabilities",
    "run_experts",
]
