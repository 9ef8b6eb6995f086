"""What a run would do that looks healthy and is not: said before the first step."""

from collections.abc import Collection, Sequence

import numpy as np

from harts.train.config import TrainConfig
from harts.trajectory import Trajectory

__all__ = ["notices"]


def notices(config: TrainConfig, trajectories: Sequence[Trajectory], *, requires: Collection[str]) -> list[str]:
    """Sentences for people, none where all is well.

    Args:
        config: of the run.
        trajectories: with their advantages filled.
        requires: names of what the loss reads, `Loss.requires`.
    """
    found = []
    trained = [each for each in trajectories if each.num_trained]
    if trained and "advantages" in requires:
        zero = sum(each.advantages is not None and not np.any(each.advantages) for each in trained)
        if zero == len(trained):
            found.append(
                f"all {zero:,} trajectories have advantage zero (equal rewards in each group): rewards give no gradient"
            )
        elif zero:
            found.append(
                f"{zero:,} of {len(trained):,} trajectories have advantage zero: rewards give no gradient through them"
            )
    if trained and "old_logprobs" in requires and all(each.logprobs is None for each in trained):
        found.append(
            "the data bring no behaviour log-probs: they are computed from the weights of the step itself, so ratios "
            "are 1 and nothing is ever clipped"
        )
    return found
