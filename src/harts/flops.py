"""Model FLOPs of trees: what a step asks for, and how much a tree can save at most.

The formulas are in `harts.cost.config` and `harts.cost.mixers`.
"""

from typing import Any

from harts.cost import Counts, count, forward_flops, model_identity
from harts.tree import PrefixTree

__all__ = ["flop_limit", "flops", "forward_flops", "model_identity"]


def flops(
    config: Any,
    work: Counts | PrefixTree,
    *,
    backward: bool = True,
    recompute: bool = False,
    keep_attention: bool = False,
    replayed: bool = False,
) -> float:
    """Model FLOPs of a set of segments.

    Args:
        config: as for `forward_flops`.
        work: a tree, or counts of one or several, with the config's window.
        backward: a backward too, which counts twice its forward.
        recompute: activations are recomputed in the backward, which adds a forward.
        keep_attention: outputs of full attention are not, which takes its scores and sums out of that forward.
        replayed: count replayed rows too, which the model itself does not ask for.
    """
    forward = forward_flops(config)
    counts = count(work, forward.window) if isinstance(work, PrefixTree) else work
    if not replayed:
        counts = counts.without_replay()
    total = forward.of(counts) * (1 + 2 * backward + (recompute and backward))
    return total - forward.attention(counts) * (keep_attention and recompute and backward)


def flop_limit(
    config: Any,
    separate: Counts | PrefixTree,
    tree: Counts | PrefixTree,
    *,
    recompute: bool = False,
    keep_attention: bool = False,
) -> float:
    """The most that a tree can speed up a step: FLOPs of separate rows over those of the tree, no replayed rows.

    Recomputing all activations does not change it; keeping attention's outputs does, by the pairs a row of each.
    """
    theirs, ours = (
        flops(config, work, recompute=recompute, keep_attention=keep_attention) for work in (separate, tree)
    )
    return theirs / ours
