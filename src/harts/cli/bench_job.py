"""What `harts bench` does with each batch: makes its model, measures its arms, keeps the record."""

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from harts.cli.bench_models import Models
from harts.cli.bench_report import Records, report
from harts.cli.bench_settings import Wishes
from harts.cli.model import vocabulary_of
from harts.cost import model_identity
from harts.files import check_target
from harts.formats import check_vocabulary
from harts.models.attach import find_backbone
from harts.models.device import to_device
from harts.ops.kernels import Kernels
from harts.testing.arms import Arm, Setting, prepare, run_step, set_up
from harts.testing.environment import environment, profiled
from harts.testing.gradients import gradient_errors
from harts.testing.measure import measure
from harts.train.batches import data_hash
from harts.trajectory import Trajectory
from harts.vocabulary import remap_vocabulary

__all__ = ["Batch", "Job"]


@dataclass(frozen=True, eq=False)
class Batch:
    """What is timed: a workload, or the user's data."""

    name: str
    sizes: Mapping[str, int]
    trajectories: Sequence[Trajectory]


@dataclass(frozen=True, kw_only=True, eq=False)
class Job:
    """What is measured of each batch.

    Attributes:
        arms: which.
        times: turns, once_above and clock, as for `measure`.
        gradients: their errors instead of times.
        wishes: how the arms run.
        about: scale, seed and device, for the record.
        profile: also write what a call of each arm spends time in.
    """

    arms: tuple[Arm, ...]
    times: Mapping[str, Any]
    gradients: bool
    wishes: Wishes
    about: Mapping[str, Any]
    profile: Path | None

    def run(
        self,
        batches: Sequence[Batch],
        models: Models,
        records: Records,
        seconds: float,
        tell: Callable[[str], None],
    ) -> dict[str, Any]:
        """Measures what `records` does not hold yet, and returns the document of all."""
        if self.profile is not None:
            check_target(self.profile)
            if self.gradients:
                raise ValueError("profile: expected times, whose calls it looks into, got --gradients; leave one out")
        if self.wishes.memory is not None and (self.gradients or self.profile is not None):
            raise ValueError("memory: expected times of arms, got --gradients or --profile; leave one of the two out")
        stop = time.monotonic() + seconds
        machine = environment()
        on_cpu = to_device(self.about["device"]).type == "cpu"
        results: list[dict[str, Any]] = []
        for batch in batches:
            trajectories, vocabulary = batch.trajectories, 0
            if models.are_random:  # a trained router chooses by what the ids mean
                trajectories, ids = remap_vocabulary(batch.trajectories)
                vocabulary = len(ids)
            model = models.get(vocabulary)
            check_vocabulary(trajectories, vocabulary_of(model))
            setting = self.wishes.setting(model, trajectories, on_cpu=on_cpu)
            header = self._header(batch, trajectories, models, model, setting, machine)
            found = records.find(header)
            if found is None:
                found = self._measure(model, trajectories, setting, stop - time.monotonic(), header, records, tell)
            if self.profile is not None:
                arms = [arm for arm in self.arms if arm in found.get("arms", ())]
                self._profile(self.profile, batch.name, arms, model, trajectories, setting)
            results.append(found)
        return {"ok": all(each["ok"] for each in results), "workloads": results}

    def _header(
        self,
        batch: Batch,
        trajectories: Sequence[Trajectory],
        models: Models,
        model: nn.Module,
        setting: Setting,
        machine: Mapping[str, Any],
    ) -> dict[str, Any]:
        """What tells one measurement from another."""
        return {
            "workload": batch.name,
            "sizes": dict(batch.sizes),
            "trajectories": len(trajectories),
            "data": data_hash(batch.trajectories)[:16],
            **self.about,
            "model": models.name,
            "architecture": model_identity(find_backbone(model).config),
            "layers": find_backbone(model).config.num_hidden_layers,
            "dtype": models.dtype,
            "vocabulary": vocabulary_of(model),
            "token_budget": setting.token_budget,
            "memory": setting.memory,
            "recompute": setting.recompute,
            "keep_attention": setting.keep_attention,
            "fused": setting.fused,
            "kernels": dataclasses.asdict(setting.kernels or Kernels()),
            "cost_model": None if setting.cost_model is None else dataclasses.asdict(setting.cost_model),
            "measured": "gradients" if self.gradients else list(self.arms),
            **({} if self.gradients else self.times),
            "machine": machine,
        }

    def _measure(
        self,
        model: nn.Module,
        trajectories: Sequence[Trajectory],
        setting: Setting,
        seconds: float,
        header: Mapping[str, Any],
        records: Records,
        tell: Callable[[str], None],
    ) -> dict[str, Any]:
        name = header["workload"]
        if self.gradients:
            tell(f"{name}, gradients")
            errors = gradient_errors(model, trajectories, setting)
            return records.put(header, {"ok": True, "gradients": dataclasses.asdict(errors)}, whole=True)
        measured = measure(
            model,
            trajectories,
            setting,
            arms=self.arms,
            seconds=seconds,
            progress=lambda text: tell(f"{name}, {text}"),
            keep=lambda part: records.keep(header, report(part, header)),
            **self.times,
        )
        turns, once_above = self.times["turns"], self.times["once_above"]
        whole = "time" not in measured.left_out.values() and all(
            len(each.step_seconds) == turns or each.step_seconds[0] > once_above for each in measured.arms.values()
        )
        return records.put(header, report(measured, header), whole=whole)

    def _profile(
        self,
        path: Path,
        name: str,
        arms: Sequence[Arm],
        model: nn.Module,
        trajectories: Sequence[Trajectory],
        setting: Setting,
    ) -> None:
        """A call of each arm that ran: of a microbatch, or of a trajectory in the arm plain."""
        for arm in arms:
            set_up(model, arm, setting)
            batch = prepare(trajectories, arm, setting, device=self.about["device"])
            run_step(model, batch, kernels=setting.kernels, most=1)  # compiles, where the times were in the file
            title = f"{name}, {arm}, a call of {batch.packed[0].num_rows:,} rows"
            with profiled(path.with_name(f"{name}_{arm}_{path.name}"), title):
                run_step(model, batch, kernels=setting.kernels, most=1)
            model.zero_grad(set_to_none=True)
