"""HARTS: train hybrid-attention language models on agent trajectories that share history.

A batch of trajectories becomes a prefix tree, every distinct token runs once, forward and backward, and the
log-probabilities come back trajectory by trajectory:

    tree = harts.PrefixTree.build(trajectories)
    packed = harts.pack(tree)
    harts.attach(model)
    logprobs = harts.logprobs(model, packed)
"""

from harts.layout import PackedTree, pack
from harts.models import attach, detach, logprobs
from harts.ops.kernels import Kernels
from harts.trajectory import Trajectory
from harts.tree import PrefixTree

__all__ = ["Kernels", "PackedTree", "PrefixTree", "Trajectory", "attach", "detach", "logprobs", "pack"]
