"""Which trajectories make which step: a pure function of data, seed and step, so that a resumed run sees the same."""

import hashlib
from collections.abc import Sequence

import numpy as np

from harts.trajectory import Trajectory

__all__ = ["Batches", "data_hash"]


class Batches:
    """Groups in a seeded order, each once an epoch; a step takes the next `groups_per_step` of them.

    Trajectories without a group are a group each. An epoch's last step has the groups that are left.
    """

    def __init__(self, trajectories: Sequence[Trajectory], *, groups_per_step: int, seed: int) -> None:
        self._all = tuple(trajectories)
        groups: dict[str, list[Trajectory]] = {}
        for index, trajectory in enumerate(trajectories):
            groups.setdefault(trajectory.group or f"\0{index}", []).append(trajectory)
        for name, members in groups.items():
            if not any(member.num_trained for member in members):
                raise ValueError(
                    f"group {name!r}: expected a trained token in one of its {len(members)} trajectories, got none; a "
                    f"step made of it would train nothing, so leave it out (first trajectory: {members[0].name})"
                )
        self._groups = list(groups.values())
        self._per_step, self._seed = groups_per_step, seed

    @property
    def num_groups(self) -> int:
        """Groups in the data."""
        return len(self._groups)

    @property
    def steps_per_epoch(self) -> int:
        """Steps in which every group comes once."""
        return -(-len(self._groups) // self._per_step)

    def of_step(self, step: int) -> list[Trajectory]:
        """Trajectories of optimiser step `step`, counted from 0."""
        epoch, place = divmod(step, self.steps_per_epoch)
        order = np.arange(len(self._groups))
        if self.steps_per_epoch > 1:  # a step with everything keeps the order of the file, as a saved plan does
            order = np.random.default_rng([self._seed, epoch]).permutation(order)
        chosen = order[place * self._per_step : (place + 1) * self._per_step]
        if len(chosen) == len(self._groups):
            return list(self._all)
        return [trajectory for group in chosen.tolist() for trajectory in self._groups[group]]


def data_hash(trajectories: Sequence[Trajectory]) -> str:
    """SHA-256 over all that training reads of the trajectories."""
    digest = hashlib.sha256()
    for trajectory in trajectories:
        digest.update(f"{trajectory.group}\0{trajectory.id}\0{len(trajectory)}\0{trajectory.temperature}".encode())
        digest.update(f"{trajectory.reward}".encode())
        for array in (
            trajectory.token_ids,
            trajectory.loss_mask,
            trajectory.logprobs,
            trajectory.ref_logprobs,
            trajectory.advantages,
            trajectory.merge_keys,
        ):
            digest.update(b"-" if array is None else array.tobytes())
        if trajectory.routes is not None:
            digest.update(trajectory.routes.tobytes())
    return digest.hexdigest()
