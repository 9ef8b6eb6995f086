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
    # Each trajectory's flags begin a byte; they are packed at once, for trajectories can be many.
    length_B = np.diff(tree.offset_B1)
    padded_B = (length_B + 7) // 8 * 8
    flags = np.zeros(int(padded_B.sum()), np.bool_)
    shift_B = np.cumsum(padded_B) - padded_B - tree.offset_B1[:-1]
    mask_N = np.concatenate([trajectory.loss_mask for trajectory in tree.trajectories])
    flags[np.arange(len(mask_N)) + np.repeat(shift_B, length_B)] = mask_N
    digest.update(np.packbits(flags).data)
    digest.update(np.array([trajectory.temperature for trajectory in tree.trajectories]).data)
    return digest.hexdigest()
