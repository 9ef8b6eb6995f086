"""Checks over many trajectories, before any compute."""

from collections.abc import Iterable, Sequence

import numpy as np

from harts.trajectory import Trajectory

__all__ = ["check_ids", "check_vocabulary", "untrained"]


def untrained(name: str, count: int) -> ValueError:
    """The error about `count` trajectories without a trained token."""
    return ValueError(
        f"{name}: expected a trained token, got none in {count} trajectories; field loss_mask is 0 everywhere (in "
        "chat rows: no assistant message, or ignore_loss on each)"
    )


def check_vocabulary(trajectories: Iterable[Trajectory], vocab_size: int) -> None:
    """Raise ValueError on the first token id that is not in [0, vocab_size)."""
    for trajectory in trajectories:
        outside = trajectory.token_ids >= vocab_size
        if outside.any():
            at = int(np.argmax(outside))
            raise ValueError(
                f"trajectory {trajectory.name}, field token_ids: expected ids below the vocabulary size {vocab_size}, "
                f"got {trajectory.token_ids[at]} at position {at}; were the tokens made with another tokenizer?"
            )


def check_ids(trajectories: Sequence[Trajectory]) -> None:
    """Raise ValueError on the first id that an earlier trajectory has."""
    seen: dict[str, int] = {}
    for index, trajectory in enumerate(trajectories):
        if trajectory.id in seen:
            raise ValueError(
                f"trajectory {trajectory.id!r}, field id: expected a unique name, got the same at "
                f"{seen[trajectory.id]} and {index}; give every trajectory its own"
            )
        seen[trajectory.id] = index
