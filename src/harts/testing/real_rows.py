"""Real rows for the workloads: finds their files, takes whole groups, shortens.

Shape suffixes: T rows of the prefix tree, R runs.
"""

import dataclasses
import os
from collections.abc import Sequence
from os import PathLike
from pathlib import Path

import numpy as np

from harts.formats import iter_trajectories
from harts.trajectory import Trajectory
from harts.tree import PrefixTree

__all__ = ["MissingData", "read_real", "shrink"]

_CHECKOUT = Path(__file__).resolve().parents[3]
_PER_TOKEN = ("token_ids", "loss_mask", "logprobs", "ref_logprobs", "advantages", "merge_keys", "routes")


def read_real(
    name: str,
    files: Sequence[str],
    *,
    scale: float,
    data_dir: str | PathLike[str] | None,
    groups: int | None,
    max_length: int | None,
) -> list[Trajectory]:
    """The first `groups` groups of a file, one row a model call, in ChatML and the Qwen vocabulary.

    Args:
        name: of the workload, for messages.
        files: names that the file goes by.
        scale: factor on lengths, see `shrink`.
        data_dir: where to look; None looks into the usual places.
        groups: None takes all.
        max_length: calls with more tokens than this are left out; None takes all.
    """
    path = _find(name, files, data_dir)
    taken: dict[str, None] = {}
    trajectories = []
    for trajectory in iter_trajectories(path, rows="turn"):
        if trajectory.group not in taken:
            if len(taken) == groups:
                break
            taken[trajectory.group] = None
        if max_length is None or len(trajectory) <= max_length:
            trajectories.append(trajectory)
    if groups is not None and len(taken) < groups:
        raise ValueError(f"workload {name!r}, groups: expected at most the {len(taken)} in {path}, got {groups}")
    if not trajectories:
        raise ValueError(f"workload {name!r}, max_length: no call of {path} has at most {max_length} tokens; raise it")
    return trajectories if scale == 1 else shrink(trajectories, scale)


class MissingData(ValueError):
    """The file of a real workload is not there."""


def _find(name: str, files: Sequence[str], data_dir: str | PathLike[str] | None) -> Path:
    if data_dir is not None:
        places = [Path(data_dir)]
    else:
        named = os.environ.get("HARTS_DATA")
        places = [Path(named)] if named else []
        places += [_CHECKOUT.parent / "shared" / "data", _CHECKOUT / "examples" / "data"]
    for place in places:
        for file in files:
            if (place / file).is_file():
                return place / file
    raise MissingData(
        f"workload {name!r}: expected {' or '.join(files)} in {', '.join(map(str, places))}, found none; put the file "
        "there, or name its directory with data_dir (--data-dir) or the environment variable HARTS_DATA"
    )


def shrink(trajectories: Sequence[Trajectory], scale: float) -> list[Trajectory]:
    """Shortens trajectories so that their tree keeps its shape.

    Every segment of their prefix tree is cut into runs of trained and of untrained rows, and each run of n rows keeps
    its first ceil(scale n). All turns, branch points and ends stay where they are in the tree, and what is shared stays
    shared; the text no longer reads well.

    Args:
        trajectories: at least one.
        scale: share to keep, in (0, 1].
    """
    if not 0 < scale <= 1:
        raise ValueError(f"scale: expected a share above 0 and at most 1, got {scale}")
    tree = PrefixTree.build(trajectories)
    starts_T = np.zeros(tree.num_rows, np.bool_)
    starts_T[tree.start_S] = True
    starts_T[1:] |= tree.trained_T[1:] != tree.trained_T[:-1]
    start_R = np.flatnonzero(starts_T)
    length_R = np.diff(np.append(start_R, tree.num_rows))
    kept_R = np.ceil(length_R * scale)
    place_T = np.arange(tree.num_rows) - np.repeat(start_R, length_R)
    keep_T = place_T < np.repeat(kept_R, length_R)
    shorter = []
    for index, trajectory in enumerate(trajectories):
        keep = keep_T[tree.rows_of(index)]
        values = {name: getattr(trajectory, name) for name in _PER_TOKEN}
        cut = {name: value[keep] for name, value in values.items() if value is not None}
        shorter.append(dataclasses.replace(trajectory, **cut))
    return shorter
