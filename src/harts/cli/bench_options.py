"""Options of `harts bench`; those that other commands have too are in `harts.cli.options`."""

from pathlib import Path
from typing import Annotated

import typer

from harts.cli.model import DtypeChoice
from harts.testing.measure import Clock

__all__ = [
    "Arms",
    "ClockChoice",
    "CostModelFile",
    "Deterministic",
    "Dtype",
    "Fuse",
    "Gradients",
    "KeepAttention",
    "Layers",
    "MemoryLimit",
    "OnceAbove",
    "Out",
    "Profile",
    "Recompute",
    "Scale",
    "Seconds",
    "Seed",
    "TokenBudget",
    "Turns",
    "Workloads",
]

Workloads = Annotated[
    str, typer.Option(help="Without DATA: NAME or NAME:SIZE=NUMBER, commas between; see harts.testing.workloads.")
]
Scale = Annotated[
    float | None, typer.Option(help="Factor on their lengths; 0.1 on a CPU and 1 elsewhere.", show_default=False)
]
TokenBudget = Annotated[
    int | None,
    typer.Option(min=1, help="Most rows of a microbatch, in every arm; 8192, on a GPU the tree's.", show_default=False),
]
MemoryLimit = Annotated[
    str | None,
    typer.Option(
        "--memory",
        help="60GiB, auto: each arm in one call at its best within it, in pieces, recomputed or not.",
        show_default=False,
    ),
]
Turns = Annotated[int, typer.Option(min=1, help="How often each arm is timed, in turn.")]
Arms = Annotated[str, typer.Option(help="Commas between: rows, merged, tree, shuffled, plain (no HARTS).")]
OnceAbove = Annotated[float, typer.Option(help="An arm whose turn takes more seconds than this has only one.")]
Seconds = Annotated[float, typer.Option(help="Leave out what would not end in this time.")]
ClockChoice = Annotated[
    Clock, typer.Option(help="wall, or cpu: processor time of this process, on a CPU that others use too.")
]
Recompute = Annotated[
    bool | None,
    typer.Option("--recompute/--no-recompute", help="Of activations; yes on a GPU.", show_default=False),
]
KeepAttention = Annotated[
    bool, typer.Option(help="Where activations are recomputed, keep the outputs of full attention.")
]
Fuse = Annotated[
    bool | None,
    typer.Option("--fuse/--no-fuse", help="Norms, MLPs, gates; on a GPU where possible.", show_default=False),
]
Deterministic = Annotated[bool, typer.Option(help="Gradients have the same bits in every run.")]
Gradients = Annotated[bool, typer.Option(help="Errors of bf16 gradients against fp32 instead of times.")]
CostModelFile = Annotated[
    Path | None, typer.Option(help="Cost model of harts calibrate, of this very model, that plans balance.")
]
Layers = Annotated[int | None, typer.Option(min=1, help="Of a preset or shape.", show_default=False)]
Dtype = Annotated[
    DtypeChoice | None, typer.Option(help="Of the parameters; float32, on a GPU bfloat16.", show_default=False)
]
Seed = Annotated[int, typer.Option(help="Of synthetic workloads.")]
Out = Annotated[
    Path | None, typer.Option(help="Add a JSON line per workload; lines of this setting are not measured again.")
]
Profile = Annotated[Path | None, typer.Option(help="Also write which kernels a call of each arm spends time in.")]
