"""Advantages relative to a group: what one sample's reward is above that of its siblings."""

from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from harts.trajectory import Trajectory

__all__ = ["Scale", "Singletons", "fill_advantages", "group_advantages"]

Scale = Literal["std", "none"]
Singletons = Literal["error", "zero"]


def group_advantages(
    rewards: ArrayLike,
    groups: Sequence[Hashable],
    *,
    scale: Scale = "std",
    leave_one_out: bool = False,
    singletons: Singletons = "error",
    eps: float = 1e-6,
) -> NDArray[np.float64]:
    """The advantage of each sample of a group over the group.

    With the G rewards r of a group, their mean m and their sample standard deviation s (divisor G - 1):

    - `scale="std"`: (r - m) / (s + eps), as in GRPO (arXiv:2402.03300, section 4.1.2);
    - `scale="none"`: r - m, as in Dr. GRPO (arXiv:2503.20783);
    - `leave_one_out`: the baseline is the mean of the others, so that it does not depend on the sample's own reward:
      r - m becomes (r - m) G / (G - 1), as in RLOO (arXiv:2402.14740). With `scale="std"` s stays that of the group.

    Where all rewards of a group are equal, its advantages are exactly 0.

    Args:
        rewards: finite numbers [S].
        groups: for each sample the name or number of its group [S]; a group need not be contiguous.
        scale: "std" or "none".
        leave_one_out: whether a sample's own reward is left out of its baseline.
        singletons: a group of one has nothing to compare with: "error" refuses it, "zero" gives it advantage 0.
        eps: added to the standard deviation, >= 0.

    Returns:
        float64 [S].

    Raises:
        ValueError: a setting or a reward is not valid, the lengths differ, or a group has one member.
    """
    _check_settings(scale, singletons, eps)
    rewards_S = np.asarray(rewards, dtype=np.float64)
    if rewards_S.ndim != 1 or len(rewards_S) != len(groups):
        raise ValueError(
            f"rewards: expected one number per entry of groups ({len(groups)}), got shape {list(rewards_S.shape)}; "
            "pass flat sequences of one length"
        )
    if not np.isfinite(rewards_S).all():
        at = int(np.argmin(np.isfinite(rewards_S)))
        raise ValueError(f"rewards: expected finite numbers, got {rewards_S[at]} at {at}; fix or leave out the sample")
    members: dict[Hashable, list[int]] = {}
    for index, group in enumerate(groups):
        members.setdefault(group, []).append(index)
    advantages_S = np.zeros(len(rewards_S))
    for group, indices in members.items():
        if len(indices) == 1 and singletons == "error":
            raise ValueError(
                f"group {group!r}: expected two members or more, got one (sample {indices[0]}); it has no siblings to "
                "be compared with: sample more, give advantages yourself, or pass singletons='zero'"
            )
        advantages_S[indices] = _one_group(rewards_S[indices], scale, leave_one_out, eps)
    return advantages_S


def _check_settings(scale: str, singletons: str, eps: float) -> None:
    if scale not in ("std", "none"):
        raise ValueError(f"scale: expected one of std, none, got {scale!r}; choose one of them")
    if singletons not in ("error", "zero"):
        raise ValueError(f"singletons: expected one of error, zero, got {singletons!r}; choose one of them")
    if not (np.isfinite(eps) and eps >= 0):
        raise ValueError(f"eps: expected a finite number >= 0, got {eps}; correct it")


def _one_group(rewards_G: NDArray[np.float64], scale: Scale, leave_one_out: bool, eps: float) -> NDArray[np.float64]:
    size = len(rewards_G)
    if (rewards_G == rewards_G[0]).all():  # one member, or no variance: rounding must not be scaled up
        return np.zeros(size)
    centred_G: NDArray[np.float64] = rewards_G - rewards_G.mean()
    if leave_one_out:
        centred_G = centred_G * (size / (size - 1))
    if scale == "std":
        centred_G = centred_G / (float(rewards_G.std(ddof=1)) + eps)
    return centred_G


def fill_advantages(
    trajectories: Sequence[Trajectory],
    *,
    scale: Scale = "std",
    leave_one_out: bool = False,
    singletons: Singletons = "error",
    eps: float = 1e-6,
) -> list[Trajectory]:
    """The same trajectories with advantages: their own, where all have them, else those of their group's rewards.

    Args:
        trajectories: all trajectories of the optimiser step, so that groups are whole.
        scale, leave_one_out, singletons, eps: as for `group_advantages`.

    Raises:
        ValueError: some trajectories have advantages and some not, a reward or a group name is missing, or a group has
            one member. The message names the trajectory and the field.
    """
    having = [t.advantages is not None for t in trajectories]
    if all(having):
        return list(trajectories)
    if any(having):
        first = trajectories[having.index(False)]
        raise _missing(first, "advantages", "a number or one per token, as others of the step have")
    for trajectory in trajectories:
        if trajectory.reward is None:
            raise _missing(trajectory, "reward", "a number, as there are no advantages")
        if not trajectory.group:
            raise _missing(trajectory, "group", "a name, to find the samples of the same task")
    advantages_S = group_advantages(
        [t.reward for t in trajectories if t.reward is not None],
        [t.group for t in trajectories],
        scale=scale,
        leave_one_out=leave_one_out,
        singletons=singletons,
        eps=eps,
    )
    return [
        replace(trajectory, advantages=np.full(len(trajectory), advantage))
        for trajectory, advantage in zip(trajectories, advantages_S, strict=True)
    ]


def _missing(trajectory: Trajectory, name: str, expected: str) -> ValueError:
    return ValueError(
        f"trajectory {trajectory.name}, field {name}: expected {expected}, got none; give every trajectory its {name}"
    )
