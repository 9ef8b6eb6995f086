"""Tokens that several trajectories train: whether each counts as often as it is trained, or once.

After a compaction, in a tree search, or where a session was rewound, one sampled token lies in several trajectories. On
separate rows, and on the tree by default, it is trained by each of them. `own_once` gives the weights with which it is
trained once: 1/k in each of the k trajectories of its rollout that train it, so that its objective is their mean.

A token is the same where the prefix tree has one row for it: all before it, merge keys and recorded experts agree.
"""

from collections.abc import Hashable, Sequence

import numpy as np
from numpy.typing import NDArray

from harts.trajectory import Trajectory
from harts.tree import PrefixTree

__all__ = ["own_once"]


def own_once(
    trajectories: Sequence[Trajectory], rollouts: Sequence[Hashable] | None = None
) -> list[NDArray[np.float64]]:
    """The weight of each token, float64 [L] a trajectory: 1/k where trained, 0 elsewhere.

    Args:
        trajectories: those of the whole optimiser step.
        rollouts: what was sampled together, a name for each trajectory: only within it is an equal token one token.
            Independent samples of one task must have names of their own: what they have in common was sampled once by
            each. None: the trajectories' groups, right where a group is one session or one search.

    Raises:
        ValueError: another number of names than trajectories, or no names and a trajectory without a group.
    """
    if rollouts is None:
        unnamed = next((trajectory for trajectory in trajectories if not trajectory.group), None)
        if unnamed is not None:
            raise ValueError(
                f"trajectory {unnamed.name}, field group: expected the rollout that it is of, as shared tokens are "
                "trained once, got none; name it, or pass rollouts"
            )
        rollouts = [trajectory.group for trajectory in trajectories]
    if len(rollouts) != len(trajectories):
        raise ValueError(
            f"rollouts: expected a name for each trajectory ({len(trajectories)}), got {len(rollouts)}; name each"
        )
    numbers: dict[Hashable, int] = {}
    number_of_B = [numbers.setdefault(name, len(numbers)) for name in rollouts]
    tree = PrefixTree.build(trajectories)
    lengths = [len(trajectory) for trajectory in trajectories]
    trained_N = np.concatenate([trajectory.loss_mask for trajectory in trajectories])
    key_N = tree.row_of_N * len(numbers) + np.repeat(np.asarray(number_of_B, np.int64), lengths)
    weight_N = np.zeros(len(trained_N))
    _, place_T, count_K = np.unique(key_N[trained_N], return_inverse=True, return_counts=True)
    weight_N[trained_N] = 1 / count_K[place_T]
    return np.split(weight_N, np.cumsum(lengths)[:-1])
