"""Statistics of mixture-of-experts routers on a tree: every token of every trajectory counts, every row runs once.

A row counts as often as trajectories of its microbatch pass through it. All are pure functions of router logits, of the
experts chosen, and of how often rows count.
"""

from harts.ops.moe.counting import RouterSums, Scope, TokenCount, count_tokens, router_sums
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

__all__ = [
    "CountedTokens",
    "Layers",
    "LoadPer",
    "RouterStatistics",
    "RouterStep",
    "RouterSums",
    "Scope",
    "TokenCount",
    "count_tokens",
    "load_balancing_loss",
    "loss_free_bias",
    "max_violation",
    "router_sums",
    "router_z_loss",
]
