"""harts bench: how much faster is a tree than packed separate rows, and how near is that to the limit?"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import typer

from harts.cli import bench_options, options, output
from harts.cli.bench_job import Batch, Job
from harts.cli.bench_models import Models
from harts.cli.bench_report import Records, render
from harts.cli.bench_settings import CPU_BUDGET, Wishes
from harts.cli.model import Device, Model
from harts.models.device import to_device
from harts.testing.arms import ARMS, Arm
from harts.testing.workloads import shrink, workload

__all__ = ["bench"]

WORKLOADS = "tau,star3,think,flat,thin"

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
    memory: bench_options.MemoryLimit = None,
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

    Efficiency: speed-up over FLOP limit. Build, plan and layout are in the tree's time. Presets have hidden size 256.
    """
    on_cpu = _on_cpu(device, needs_gpu={"profile": profile is not None, "fuse": bool(fuse)})
    scale = scale if scale is not None else (0.1 if on_cpu and not data else 1.0)
    reading = {"rows": rows, "fmt": fmt, "fields": fields, "tokenizer": tokenizer, "limit": limit}
    batches = [_own(data, scale, **reading)] if data else _named(workloads, scale, seed, data_dir, on_cpu)
    _check_budget(batches, token_budget or (CPU_BUDGET if on_cpu and memory is None else None))
    job = Job(
        arms=_parse_arms(arms),
        times={"turns": turns, "once_above": once_above, "clock": clock},
        gradients=gradients,
        wishes=Wishes(
            token_budget=token_budget,
            memory=memory,
            recompute=recompute,
            keep_attention=keep_attention,
            fuse=fuse,
            deterministic=deterministic,
            cost_model=cost_model,
        ),
        about={"scale": scale, "seed": seed, "device": device},
        profile=profile,
    )
    models = Models(model, layers, dtype or ("float32" if on_cpu else "bfloat16"), device)
    _run(job, batches, models, Records(out), seconds, as_json)


def _run(job: Job, batches: Sequence[Batch], models: Models, records: Records, seconds: float, as_json: bool) -> None:
    with output.watch("bench") as tell:
        document = job.run(batches, models, records, seconds, tell)
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


def _own(data: Sequence[Path], scale: float, **reading: Any) -> Batch:
    trajectories = options.read_data(data, reasoning="keep", **reading)
    name = "+".join(path.name.partition(".")[0] for path in data)
    return Batch(name, {}, trajectories if scale == 1 else shrink(trajectories, scale))


def _named(workloads: str, scale: float, seed: int, data_dir: Path | None, on_cpu: bool) -> list[Batch]:
    found = []
    defaults = _CPU_SIZES if on_cpu else _GPU_SIZES
    for name, given in options.parse_workloads(workloads):
        sizes = {**defaults.get(name, {}), **given}
        found.append(Batch(name, sizes, workload(name, scale=scale, seed=seed, data_dir=data_dir, **sizes)))
    return found


def _parse_arms(text: str) -> tuple[Arm, ...]:
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in ARMS:
            raise ValueError(f"arms: expected some of {', '.join(ARMS)} with commas between, got {name!r}")
    return cast(tuple[Arm, ...], tuple(dict.fromkeys(names)))


def _check_budget(batches: Sequence[Batch], token_budget: int | None) -> None:
    for batch in batches:
        longest = max(map(len, batch.trajectories))
        if token_budget is not None and longest > token_budget:
            raise ValueError(
                f"token_budget: expected at least {longest}, the longest trajectory of {batch.name!r}, got "
                f"{token_budget}; raise it or lower --scale"
            )
