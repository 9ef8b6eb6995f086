"""Renumbers token ids, so that a small model needs no larger head than its data.

Shape suffixes: N tokens of all trajectories, V distinct token ids.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from harts.trajectory import Trajectory

__all__ = ["remap_vocabulary"]


def remap_vocabulary(trajectories: Sequence[Trajectory]) -> tuple[list[Trajectory], NDArray[np.int32]]:
    """Renumbers token ids to 0, 1, ... in the order of the ids that occur.

    A model made for the remapped rows has no larger head than they need.

    Args:
        trajectories: at least one.

    Returns:
        The same trajectories with new ids, and int32 [V]: the old id of each new one.
    """
    if len(trajectories) == 0:
        raise ValueError("trajectories: expected at least one, got none")
    old_V, new_N = np.unique(np.concatenate([each.token_ids for each in trajectories]), return_inverse=True)
    parts = np.split(new_N.astype(np.int32), np.cumsum([len(each) for each in trajectories])[:-1])
    remapped = [dataclasses.replace(each, token_ids=ids) for each, ids in zip(trajectories, parts, strict=True)]
    return remapped, old_V
