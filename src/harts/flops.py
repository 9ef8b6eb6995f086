"""Model FLOPs of trees: what a step asks for, and how much a tree can save at most.

The formulas are in `harts.cost.config`.
"""

from typing import Any

from harts.cost import Counts, count, forward_flops, model_identity
from harts.tree import PrefixTree

__all__ = ["flop_limit", "flops", "forward_flops", "model_identity"]


def flops(
    config: Any, work: Counts | PrefixTree, *, backward: bool = True, recompute: bool = False, replayed: bool = False
) -> float:
    """Model FLOPs of a set of segments.

    Args:
        config: as for `forward_flops`.
        work: a tree, or counts of one or several.
        backward: a backward too, which counts twice its forward.
        recompute: activations are recomputed in the backward, which adds a forward.
        replayed: count replayed rows too, which the model itself does not ask for.
    """
    counts = count(work) if isinstance(work, PrefixTree) else work
    if not replayed:
        counts = counts.without_replay()
    return forward_flops(config).of(counts) * (1 + 2 * backward + (recompute and backward))


def flop_limit(config: Any, separate: Counts | PrefixTree, tree: Counts | PrefixTree) -> float:
    """The most that a tree can speed up a step: FLOPs of separate rows over those of the tree, no replayed rows."""
    return flops(config, separate) / flops(config, tree)
