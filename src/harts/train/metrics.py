"""What a step reports, and the JSON Lines file it goes to."""

import json
import math
import os
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from harts.files import write_text

__all__ = ["MetricsFile", "StepMetrics"]


@dataclass(frozen=True, kw_only=True)
class StepMetrics:
    """One optimiser step.

    Attributes:
        step: counted from 1.
        learning_rate: of this step.
        grad_norm: before it was scaled down.
        trajectories, tokens: of the step.
        reward_mean, reward_std: of its trajectories that have a reward, the spread as of a whole population; None where
            none has.
        unique_rows: distinct tokens of the step's tree.
        recomputed_rows: prefix rows run again because a tree was cut over microbatches.
        replayed_rows: rows fed again to the linear-attention recurrence only.
        trained_rows: rows that reach the head.
        sharing: tokens / unique_rows.
        microbatches, slots: of the plan.
        idle_fraction: share of the replicas' predicted time spent waiting.
        predicted: the plan's makespan, in `predicted_unit` ("flops", or "seconds" with a calibrated cost model).
        predicted_bytes, peak_bytes: peak memory of the largest microbatch, where a cost model calibrated on a GPU
            predicts it, and of the step as it was, on a GPU; else None.
        seconds: of the whole step; plan_seconds: of building tree, plan and layouts in this process (on a GPU during
            the step before; another process makes the plan); compute_seconds: of all forward and backward passes on
            the slowest replica, which `predicted` stands for.
        rows_per_s: (unique + recomputed rows) / seconds.
        kernels: implementations of the ops.
        fused: whether norms, MLPs, gates and experts run fused (`harts.models.fuse`).
        router_loss, router_max_violation: of a mixture-of-experts model whose routers are asked: balancing loss and
            z-loss times their coefficients, and the largest expert load over the mean load, less 1, mean over layers.
        loss: parts of the loss and its statistics; see `harts.losses.LossMetrics`.
    """

    step: int
    learning_rate: float
    grad_norm: float
    trajectories: int
    tokens: int
    reward_mean: float | None
    reward_std: float | None
    unique_rows: int
    recomputed_rows: int
    replayed_rows: int
    trained_rows: int
    sharing: float
    microbatches: int
    slots: int
    idle_fraction: float
    predicted: float
    predicted_unit: str
    predicted_bytes: float | None
    peak_bytes: float | None
    seconds: float
    plan_seconds: float
    compute_seconds: float
    rows_per_s: float
    kernels: dict[str, Any]
    fused: bool
    router_loss: float | None
    router_max_violation: float | None
    loss: dict[str, float]

    def to_dict(self) -> dict[str, Any]:
        """One flat record, fit for JSON: infinite numbers are None. The loss's entries keep their own names."""
        record = {entry.name: getattr(self, entry.name) for entry in fields(self) if entry.name != "loss"}
        clash = record.keys() & self.loss.keys()
        record |= {(f"loss_{name}" if name in clash else name): value for name, value in self.loss.items()}
        return {name: None if _is_infinite(value) else value for name, value in record.items()}


def _is_infinite(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


class MetricsFile:
    """JSON Lines, one record a step, each written whole. Opening it for a resumed run drops later steps' records.

    Args:
        path: the file.
        steps_done: of the checkpoint that the run goes on from; 0 at the start.

    Raises:
        ValueError: a line is no record; or steps were done, and the file is not there or lacks their last records.
    """

    def __init__(self, path: Path, *, steps_done: int) -> None:
        self._path = path
        kept = self.check(path, steps_done=steps_done)
        write_text(path, "".join(f"{line}\n" for line in kept))

    @staticmethod
    def check(path: Path, *, steps_done: int) -> list[str]:
        """The records of the steps that were done, as lines; refuses what the class refuses, and writes nothing."""
        if steps_done and not path.exists():
            raise ValueError(
                f"{path}: expected the records of steps 1 to {steps_done}, got no such file; put it back, or make an "
                "empty file to go on without them"
            )
        kept = [(step, line) for step, line in _lines(path) if step <= steps_done]
        first = kept[0][0] if kept else steps_done + 1
        found = [step for step, _ in kept]
        if found != list(range(first, steps_done + 1)):
            raise ValueError(
                f"{path}: expected a record of each step up to {steps_done}, in order, got {found[-1]} last of "
                f"{len(found)}; put the file back, or empty it to go on without them"
            )
        return [line for _, line in kept]

    def append(self, metrics: StepMetrics) -> None:
        """Adds a record and has it on disk behind it."""
        with self._path.open("r+", encoding="utf-8") as file:  # which makes no new file where the old one is gone
            file.seek(0, os.SEEK_END)
            file.write(json.dumps(metrics.to_dict(), allow_nan=False) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def records(self) -> list[dict[str, Any]]:
        """All records."""
        return [json.loads(line) for _, line in _lines(self._path)]


def _lines(path: Path) -> list[tuple[int, str]]:
    """Step and text of each whole line; one cut off by a crash is not a record.

    Raises:
        ValueError: a line is no record; its number is named.
    """
    if not path.exists():
        return []
    found = []
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], start=1):
        if not line.strip():
            continue
        try:
            found.append((int(json.loads(line)["step"]), line.decode()))
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(
                f"{path}:{number}: expected a JSON record with a step, got {line[:40]!r}; delete the line, or put the "
                "file back"
            ) from error
    return found
