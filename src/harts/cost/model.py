"""CostModel: predicts time and memory of a microbatch, from FLOPs or fitted to timed runs."""

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from harts.cost.config import forward_flops, model_identity
from harts.cost.counts import Coefficients, Counts
from harts.cost.least_squares import non_negative_least_squares
from harts.files import write_text

__all__ = ["CostModel", "TimedRun"]

Unit = Literal["rows", "flops", "seconds"]

_FORMAT = "harts cost model 2"


@dataclass(frozen=True, kw_only=True)
class TimedRun:
    """One measured microbatch: its counts, seconds of forward and backward, and peak bytes where known."""

    counts: Counts
    seconds: float
    bytes: float | None = None


@dataclass(frozen=True, kw_only=True)
class CostModel:
    """Predicts time and memory of a microbatch from its counts.

    Attributes:
        time: cost of one forward and backward, in `unit`.
        unit: `"rows"` (rows run, the default of a plan), `"flops"` or `"seconds"`.
        memory: peak bytes; all zero where nothing is known.
        model: what the model is called in messages; see `model_identity`. Empty for any model.
    """

    time: Coefficients
    unit: Unit
    memory: Coefficients = field(default_factory=Coefficients)
    model: str = ""

    def __post_init__(self) -> None:
        if self.unit not in ("rows", "flops", "seconds"):
            raise ValueError(f"unit: expected 'rows', 'flops' or 'seconds', got {self.unit!r}")
        if not any(self.time.values):
            raise ValueError("time: expected a coefficient above 0, got only zeros; a plan needs something to balance")

    @staticmethod
    def of_rows() -> "CostModel":
        """The plainest model: a row costs 1, all else nothing."""
        return CostModel(time=Coefficients(rows=1.0), unit="rows")

    @staticmethod
    def from_config(config: Any, *, recompute: bool = False, keep_attention: bool = False) -> "CostModel":
        """Default of a model: FLOPs of forward and backward, replayed rows included. See `harts.cost.config`.

        Args:
            config: a transformers config or its dictionary.
            recompute: activations are recomputed in the backward, which costs another forward.
            keep_attention: outputs of full attention are not; see `harts.models.recompute_activations`.

        Raises:
            ValueError: the config lacks a size, or has a layer type that HARTS does not run.
        """
        forward = forward_flops(config)
        time = forward.scaled(4.0 if recompute else 3.0)
        if recompute and keep_attention:
            time = dataclasses.replace(time, pairs=3.0 * forward.pairs, window_pairs=3.0 * forward.window_pairs)
        return CostModel(time=time, unit="flops", model=model_identity(config))

    @staticmethod
    def fit(runs: Sequence[TimedRun], *, model: str = "") -> "CostModel":
        """Fits the coefficients to timed runs by non-negative least squares on relative errors.

        Args:
            runs: at least two, of different sizes. Coefficients of counts that never change are not told apart from
                a constant; runs should differ in length, sharing and number of trajectories.
            model: identity of the model that was timed.

        Raises:
            ValueError: fewer than two runs, or a time or a memory that is not finite and above 0.
        """
        if len(runs) < 2:
            raise ValueError(f"runs: expected at least 2 timed runs, got {len(runs)}; time microbatches of other sizes")
        windows = {run.counts.window for run in runs}
        if len(windows) > 1:
            raise ValueError(f"runs: expected counts of one window, got {sorted(windows, key=str)}; count them again")
        (window,) = windows
        counts_RK = np.array([run.counts.values for run in runs], np.float64)
        time = _fit_relative(counts_RK, [run.seconds for run in runs], window, "seconds")
        memory = Coefficients()
        known = [at for at, run in enumerate(runs) if run.bytes is not None]
        if len(known) >= 2:
            memory = _fit_relative(counts_RK[known], [runs[at].bytes or 0.0 for at in known], window, "bytes")
        return CostModel(time=time, unit="seconds", memory=memory, model=model)

    def check_model(self, identity: str) -> None:
        """Raises ValueError if this was made for a model other than `identity`."""
        if self.model and self.model != identity:
            raise ValueError(
                f"cost model: expected one of {identity}, got one of {self.model}; calibrate this model, or leave the "
                "cost model out to use its FLOPs"
            )

    # -- files ----------------------------------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """A JSON-able dictionary that `from_json` reads."""
        return {"format": _FORMAT, **dataclasses.asdict(self)}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> "CostModel":
        """Reads what `to_json` wrote; raises ValueError on anything else."""
        if not isinstance(data, Mapping) or data.get("format") != _FORMAT:
            raise ValueError(
                f"cost model: expected a JSON object of format {_FORMAT!r}; write one with harts calibrate"
            )
        fields = {key: value for key, value in data.items() if key != "format"}
        try:
            time, memory = Coefficients(**fields.pop("time")), Coefficients(**fields.pop("memory"))
            return CostModel(time=time, memory=memory, **fields)
        except (KeyError, TypeError) as error:
            raise ValueError(f"cost model: a field is missing or unknown ({error}); calibrate again") from error

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes a JSON file, under a temporary name first; errors as of `harts.files.replacing`."""
        write_text(path, json.dumps(self.to_json(), indent=1) + "\n")

    @staticmethod
    def load(path: str | os.PathLike[str], *, model: str | None = None) -> "CostModel":
        """Reads a JSON file.

        Args:
            path: written by `save`.
            model: identity of the model it is for; one fitted for another model is refused.

        Raises:
            ValueError: no such file, another kind of file, or one fitted for another model; the message names `path`.
        """
        if not Path(path).is_file():
            got = "a folder" if Path(path).is_dir() else "no such file"
            raise ValueError(f"cost model {path}: expected a file, got {got}; write one with harts calibrate")
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"cost model {path}: expected JSON ({error}); write one with harts calibrate") from error
        try:
            cost_model = CostModel.from_json(data)
            if model is not None:
                cost_model.check_model(model)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
        return cost_model


def _fit_relative(
    counts_RK: NDArray[np.float64], measured: Sequence[float], window: int | None, what: str
) -> Coefficients:
    target_R = np.asarray(measured, np.float64)
    if not (np.isfinite(target_R).all() and (target_R > 0).all()):
        raise ValueError(f"{what}: expected finite numbers above 0, got {min(measured)} to {max(measured)}; time again")
    scale_K = np.maximum(np.abs(counts_RK).max(axis=0), 1.0)
    matrix_RK = counts_RK / scale_K / target_R[:, None]
    solution_K = non_negative_least_squares(matrix_RK, np.ones(len(target_R))) / scale_K
    names = [field.name for field in dataclasses.fields(Coefficients) if field.name != "window"]
    return Coefficients(**dict(zip(names, solution_K.tolist(), strict=True)), window=window)
