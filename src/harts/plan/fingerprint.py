"""A hash of a tree and of what it is planned with: a saved plan fits no other data."""

import hashlib
import json

import numpy as np

from harts.cost import CostModel
from harts.tree import PrefixTree

__all__ = ["fingerprint"]


def fingerprint(
    tree: PrefixTree, token_budget: int, num_replicas: int, key_cap: int | None, cost_model: CostModel
) -> str:
    """Hex digits that depend on every token and trained flag, on the order of trajectories, and on the arguments."""
    digest = hashlib.blake2b(digest_size=12)
    digest.update(json.dumps([token_budget, num_replicas, key_cap, cost_model.to_json()], sort_keys=True).encode())
    for array in (tree.token_ids_T, tree.start_S, tree.parent_S, tree.end_segment_B):
        digest.update(np.int64(len(array)).tobytes())
        digest.update(np.ascontiguousarray(array).data)
    for trajectory in tree.trajectories:
        digest.update(np.packbits(trajectory.loss_mask).data)
    digest.update(np.array([trajectory.temperature for trajectory in tree.trajectories]).data)
    return digest.hexdigest()
