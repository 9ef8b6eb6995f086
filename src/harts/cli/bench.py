"""harts bench: how much faster is a tree than packed separate rows, and how near is that to the limit?"""

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import typer
from torch import nn

from harts.cli import bench_options, options, output
from harts.cli.bench_report import Records, render, report
from harts.cli.model import Device, DtypeChoice, Model, is_preset, load_model, to_dtype, vocabulary_of
from harts.cost import CostModel, count, model_identity
from harts.files import check_target
from harts.formats import check_vocabulary
from harts.models import attach, default_kernels
from harts.models.attach import find_backbone
from harts.models.device import to_device
from harts.models.fuse import can_fuse
from harts.models.recompute import check_kept
from harts.ops.kernels import Kernels
from harts.testing.arms import ARMS, Arm, Setting, prepare, run_step, set_up
from harts.testing.environment import environment, profiled
from harts.testing.gradients import gradient_errors
from harts.testing.measure import measure
from harts.testing.shapes import SHAPES, build_model
from harts.testing.workloads import shrink, workload
from harts.train.batches import data_hash
from harts.trajectory import Trajectory
from harts.tree import PrefixTree
from harts.vocabulary import remap_vocabulary

__all__ = ["bench"]

WORKLOADS = "tau,star3,think,flat,thin"

MODEL: Mapping[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
"""Sizes of a preset that is timed, and of its linear attention: a tiny model would time little but overhead."""

_LINEAR: Mapping[str, Any] = {
    "num_hidden_layers": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
}

_CPU_SIZES: Mapping[str, Mapping[str, int]] = {
    "think": {"rollouts": 2},
    "swe": {"rollouts": 1},
    "search": {"depth": 5},
    "tau": {"groups": 2},
    "mint": {"groups": 1},
    "toolbench": {"groups": 4},
    "openhands": {"groups": 1},
}
_GPU_SIZES: Mapping[str, Mapping[str, int]] = {"think": {"rollouts": 4}, "swe": {"rollouts": 2, "turns": 30}}
"""Sizes so that separate rows take a minute or two; sizes given on the command line come first."""

_CPU_BUDGET, _GPU_BUDGET = 8_192, 65_536


@dataclass(frozen=True, eq=False)
class _Batch:
    """What is timed: a workload, or the user's data."""

    name: str
    sizes: Mapping[str, int]
    trajectories: Sequence[Trajectory]


def bench(
    data: options.OptionalData = None,
    workloads: bench_options.Workloads = WORKLOADS,
    arms: bench_options.Arms = "rows,tree",
    turns: bench_options.Turns = 3,
    once_above: bench_options.OnceAbove = 60.0,
    seconds: bench_options.Seconds = float("inf"),
    gradients: bench_options.Gradients = False,
    scale: bench_options.Scale = None,
    token_budget: bench_options.TokenBudget = None,
    clock: bench_options.ClockChoice = "wall",
    recompute: bench_options.Recompute = None,
    keep_attention: bench_options.KeepAttention = False,
    fuse: bench_options.Fuse = None,
    deterministic: bench_options.Deterministic = False,
    cost_model: bench_options.CostModelFile = None,
    model: Model = "tiny-qwen3.5",
    layers: bench_options.Layers = None,
    dtype: bench_options.Dtype = None,
    device: Device = "cpu",
    seed: bench_options.Seed = 0,
    out: bench_options.Out = None,
    profile: bench_options.Profile = None,
    rows: options.Rows = "turn",
    fmt: options.Format = "auto",
    fields: options.Fields = None,
    tokenizer: options.Tokenizer = None,
    limit: options.Limit = None,
    data_dir: options.DataDir = None,
    as_json: options.Json = False,
) -> None:
    """Time forward and backward on a tree and on packed separate rows, through the same ops.

    Efficiency is speed-up over FLOP limit, which leaves replayed rows out. The tree's time includes build, plan and
    layout, that of separate rows does not. Presets have a hidden size of 256; qwen3.5-4b, qwen3.5-35b-a3b are shapes.
    """
    on_cpu = _on_cpu(device, needs_gpu={"profile": profile is not None, "fuse": bool(fuse)})
    scale = scale if scale is not None else (0.1 if on_cpu and not data else 1.0)
    reading = {"rows": rows, "fmt": fmt, "fields": fields, "tokenizer": tokenizer, "limit": limit}
    batches = [_own(data, scale, **reading)] if data else _named(workloads, scale, seed, data_dir, on_cpu)
    _check_budget(batches, token_budget or (_CPU_BUDGET if on_cpu else None))
    job = _Job(
        arms=_parse_arms(arms),
        times={"turns": turns, "once_above": once_above, "clock": clock},
        gradients=gradients,
        token_budget=token_budget,
        recompute=recompute,
        keep_attention=keep_attention,
        fuse=fuse,
        deterministic=deterministic,
        cost_model=cost_model,
        about={"scale": scale, "seed": seed, "device": device},
        profile=profile,
    )
    models = _Models(model, layers, dtype or ("float32" if on_cpu else "bfloat16"), device)
    with output.watch("bench") as tell:
        document = job.run(batches, models, Records(out), seconds, tell)
    output.emit(document, as_json, lambda console: render(console, document))
    if not document["ok"]:
        raise typer.Exit(1)


def _on_cpu(device: str, *, needs_gpu: Mapping[str, bool]) -> bool:
    """Whether a CPU is timed; then options that are about a GPU's kernels are refused where they are given."""
    on_cpu = to_device(device).type == "cpu"
    for name, is_given in needs_gpu.items():
        if is_given and on_cpu:
            raise ValueError(f"{name}: expected a CUDA device, whose kernels it is about, got {device!r}; leave it out")
    return on_cpu


def _own(data: Sequence[Path], scale: float, **reading: Any) -> _Batch:
    trajectories = options.read_data(data, reasoning="keep", **reading)
    name = "+".join(path.name.partition(".")[0] for path in data)
    return _Batch(name, {}, trajectories if scale == 1 else shrink(trajectories, scale))


def _named(workloads: str, scale: float, seed: int, data_dir: Path | None, on_cpu: bool) -> list[_Batch]:
    found = []
    defaults = _CPU_SIZES if on_cpu else _GPU_SIZES
    for name, given in options.parse_workloads(workloads):
        sizes = {**defaults.get(name, {}), **given}
        found.append(_Batch(name, sizes, workload(name, scale=scale, seed=seed, data_dir=data_dir, **sizes)))
    return found


def _parse_arms(text: str) -> tuple[Arm, ...]:
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in ARMS:
            raise ValueError(f"arms: expected some of {', '.join(ARMS)} with commas between, got {name!r}")
    return cast(tuple[Arm, ...], tuple(dict.fromkeys(names)))


def _check_budget(batches: Sequence[_Batch], token_budget: int | None) -> None:
    for batch in batches:
        longest = max(map(len, batch.trajectories))
        if token_budget is not None and longest > token_budget:
            raise ValueError(
                f"token_budget: expected at least {longest}, the longest trajectory of {batch.name!r}, got "
                f"{token_budget}; raise it or lower --scale"
            )


@dataclass(frozen=True, eq=False)
class _Models:
    """Makes the model that a batch is timed on; of a shape or directory there is one for all batches."""

    name: str
    layers: int | None
    dtype: DtypeChoice
    device: str
    made: dict[str, nn.Module] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.layers is not None and not self.are_random:
            raise ValueError(
                f"layers: expected none with a saved model, got {self.layers} for {self.name!r}; all of its layers run"
            )

    @property
    def are_random(self) -> bool:
        """Whether the weights are random, so that ids of the data can be numbered anew."""
        return is_preset(self.name) or self.name in SHAPES

    def get(self, vocabulary: int) -> nn.Module:
        """The model; `vocabulary` is that of a preset."""
        changes: dict[str, Any] = {} if self.layers is None else {"num_hidden_layers": self.layers}
        dtype = to_dtype(self.dtype)
        if is_preset(self.name):
            return _sized_preset(self.name, changes, max(64, vocabulary), dtype=dtype, device=self.device)
        if self.name not in self.made:
            if self.name in SHAPES:
                self.made[self.name] = build_model(changes, shape=self.name, dtype=dtype, device=self.device)  # type: ignore[arg-type]
            else:
                self.made[self.name] = load_model(self.name, dtype=dtype, device=self.device)
        return self.made[self.name]


def _sized_preset(name: str, changes: Mapping[str, Any], vocabulary: int, **place: Any) -> nn.Module:
    sizes: dict[str, Any] = {**MODEL, "vocab_size": vocabulary}
    if name.startswith("tiny-qwen3.5") or "next" in name:
        rotary = {"rope_type": "default", "rope_theta": 10_000_000.0, "partial_rotary_factor": 0.25}
        sizes |= {**_LINEAR, "rope_parameters": {**rotary, "mrope_section": [4, 2, 2]}}
    return load_model(name, **place, **{**sizes, **changes})


@dataclass(frozen=True, kw_only=True, eq=False)
class _Job:
    """What is measured of each batch."""

    arms: tuple[Arm, ...]
    times: Mapping[str, Any]
    gradients: bool
    token_budget: int | None
    recompute: bool | None
    keep_attention: bool
    fuse: bool | None
    deterministic: bool
    cost_model: Path | None
    about: Mapping[str, Any]
    profile: Path | None

    @property
    def on_cpu(self) -> bool:
        """Whether the model runs on the CPU."""
        return to_device(self.about["device"]).type == "cpu"

    def run(
        self,
        batches: Sequence[_Batch],
        models: _Models,
        records: Records,
        seconds: float,
        tell: Callable[[str], None],
    ) -> dict[str, Any]:
        """Measures what `records` does not hold yet, and returns the document of all."""
        if self.profile is not None:
            check_target(self.profile)
            if self.gradients:
                raise ValueError("profile: expected times, whose calls it looks into, got --gradients; leave one out")
        stop = time.monotonic() + seconds
        machine = environment()
        results: list[dict[str, Any]] = []
        for batch in batches:
            trajectories, vocabulary = batch.trajectories, 0
            if models.are_random:  # a trained router chooses by what the ids mean
                trajectories, ids = remap_vocabulary(batch.trajectories)
                vocabulary = len(ids)
            model = models.get(vocabulary)
            check_vocabulary(trajectories, vocabulary_of(model))
            setting = self._setting(model, trajectories)
            header = {
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
                "recompute": setting.recompute,
                "keep_attention": setting.keep_attention,
                "fused": setting.fused,
                "kernels": dataclasses.asdict(setting.kernels or Kernels()),
                "cost_model": None if setting.cost_model is None else dataclasses.asdict(setting.cost_model),
                "measured": "gradients" if self.gradients else list(self.arms),
                **({} if self.gradients else self.times),
                "machine": machine,
            }
            found = records.find(header)
            if found is None:
                found = self._measure(model, trajectories, setting, stop - time.monotonic(), header, records, tell)
            if self.profile is not None:
                arms = [arm for arm in self.arms if arm in found.get("arms", ())]
                self._profile(self.profile, batch.name, arms, model, trajectories, setting)
            results.append(found)
        return {"ok": all(each["ok"] for each in results), "workloads": results}

    def _setting(self, model: nn.Module, trajectories: Sequence[Trajectory]) -> Setting:
        longest = max(map(len, trajectories))
        whole = max(count(PrefixTree.build(trajectories)).linear_rows, longest, _GPU_BUDGET)
        budget = self.token_budget or (_CPU_BUDGET if self.on_cpu else whole)
        price = None
        if self.cost_model is not None:
            price = CostModel.load(self.cost_model, model=model_identity(find_backbone(model).config))
        kernels = default_kernels(model, deterministic=self.deterministic)
        recompute = not self.on_cpu if self.recompute is None else self.recompute
        check_kept(kernels, recompute=recompute, keep_attention=self.keep_attention)
        return Setting(
            token_budget=budget,
            kernels=kernels,
            fused=can_fuse(attach(model)) if self.fuse is None else self.fuse,
            recompute=recompute,
            keep_attention=self.keep_attention,
            cost_model=price,
        )

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
