"""Branch points of a tree and the rows below each of their children."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from harts.tree import PrefixTree

__all__ = ["Branch", "branches_of"]


@dataclass(frozen=True)
class Branch:
    """A place where rows part: `depth` tokens agree, and each child has rows of its own behind them.

    Attributes:
        depth: tokens before it, 0 above the roots.
        children: names of the rows below each child, in the order of the tree.
        segments: the child segments.
    """

    depth: int
    children: tuple[list[int], ...]
    segments: tuple[int, ...]


def branches_of(tree: PrefixTree, names: Sequence[int]) -> list[Branch]:
    """All branch points in preorder, parents before children; `names` names the tree's trajectories in order."""
    order = np.argsort(tree.end_segment_B, kind="stable")
    ends = tree.end_segment_B[order]
    named = np.asarray(names)[order].tolist()
    stop_S = np.arange(tree.num_segments) + tree.sum_over_subtrees(np.ones(tree.num_segments, np.int64))
    low_S, high_S = np.searchsorted(ends, np.arange(tree.num_segments)), np.searchsorted(ends, stop_S)
    below: dict[int, list[int]] = {}
    for segment, parent in enumerate(tree.parent_S.tolist()):
        below.setdefault(parent, []).append(segment)
    depth_S = tree.depth_S.tolist()
    branches = []
    for parent in sorted(below):
        segments = below[parent]
        if len(segments) > 1:
            children = tuple(named[low_S[segment] : high_S[segment]] for segment in segments)
            branches.append(Branch(depth_S[segments[0]], children, tuple(segments)))
    return branches
