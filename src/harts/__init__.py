"""HARTS: train hybrid-attention language models on agent trajectories that share history.

A batch of trajectories becomes a prefix tree, every distinct token runs once, forward and backward, and the
log-probabilities come back trajectory by trajectory:

    trajectories = harts.read("rollouts.jsonl.gz")
    tree = harts.PrefixTree.build(trajectories)
    packed = harts.pack(tree)
    harts.attach(model)
    logprobs = harts.logprobs(model, packed)
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from harts.cost import CostModel
    from harts.formats import read, write
    from harts.layout import PackedTree, pack
    from harts.models import Scores, attach, detach, logprobs, logprobs_flat, logprobs_padded
    from harts.models.fuse import fuse, unfuse
    from harts.ops.kernels import Kernels
    from harts.plan import Plan, check_plan, make_plan
    from harts.slots import Microbatch, microbatches
    from harts.trajectory import Trajectory
    from harts.tree import PrefixTree

__all__ = [
    "CostModel",
    "Kernels",
    "Microbatch",
    "PackedTree",
    "Plan",
    "PrefixTree",
    "Scores",
    "Trajectory",
    "attach",
    "backward",
    "check_plan",
    "detach",
    "fuse",
    "logprobs",
    "logprobs_flat",
    "logprobs_padded",
    "make_plan",
    "microbatches",
    "pack",
    "read",
    "unfuse",
    "write",
]

# Loaded on first use: reading, inspecting and planning need neither torch nor transformers.
_MODULE_OF = {
    "CostModel": "harts.cost",
    "Kernels": "harts.ops.kernels",
    "Microbatch": "harts.slots",
    "PackedTree": "harts.layout",
    "Plan": "harts.plan",
    "PrefixTree": "harts.tree",
    "Scores": "harts.models",
    "Trajectory": "harts.trajectory",
    "attach": "harts.models",
    "backward": "harts.models",
    "check_plan": "harts.plan",
    "detach": "harts.models",
    "fuse": "harts.models.fuse",
    "logprobs": "harts.models",
    "logprobs_flat": "harts.models",
    "logprobs_padded": "harts.models",
    "make_plan": "harts.plan",
    "microbatches": "harts.slots",
    "pack": "harts.layout",
    "read": "harts.formats",
    "unfuse": "harts.models.fuse",
    "write": "harts.formats",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'harts' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULE_OF[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
