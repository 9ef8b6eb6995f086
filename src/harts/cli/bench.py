"""harts bench: how much faster is a tree than packed separate rows, and how much could it be?"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from torch import nn

from harts.cli import options, output
from harts.cli.model import Device, DtypeChoice, Model, is_preset, load_model, to_dtype, vocabulary_of
from harts.cost import CostModel, model_identity
from harts.models import attach
from harts.models.attach import find_backbone
from harts.testing.measure import Arm, Clock, Measurement, measure
from harts.testing.workloads import remap_vocabulary, workload
from harts.trajectory import Trajectory

__all__ = ["bench"]

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
"""On a CPU, so that separate rows take a minute and not ten; sizes given on the command line come first."""

_TOLERANCE: Mapping[str, float] = {"float64": 1e-9, "float32": 1e-3, "bfloat16": 0.2}
"""Largest difference of log-probs (nats) between arms with which times are shown. `harts check` measures the rest."""


def bench(
    workloads: Annotated[
        str, typer.Option(help="NAME or NAME:SIZE=NUMBER, commas between; see harts.testing.workloads.")
    ] = "tau,star3,think,flat,thin",
    scale: Annotated[
        float | None, typer.Option(help="Factor on their lengths; 0.1 on a CPU and 1 elsewhere.", show_default=False)
    ] = None,
    token_budget: Annotated[int, typer.Option(min=1, help="Most rows of a microbatch, in every arm.")] = 8192,
    turns: Annotated[int, typer.Option(min=1, help="How often each arm is timed, in turn.")] = 3,
    clock: Annotated[
        Clock, typer.Option(help="wall, or cpu: processor time of this process, on a CPU that others use too.")
    ] = "wall",
    merged: Annotated[bool, typer.Option(help="Time rows merged while one is a prefix of the next, too.")] = False,
    cost_model: Annotated[
        Path | None, typer.Option(help="Cost model of harts calibrate, of this very model, that plans balance.")
    ] = None,
    model: Model = "tiny-qwen3.5",
    dtype: Annotated[DtypeChoice, typer.Option(help="Of the parameters.")] = "float32",
    device: Device = "cpu",
    seed: Annotated[int, typer.Option(help="Of synthetic workloads.")] = 0,
    data_dir: options.DataDir = None,
    as_json: options.Json = False,
) -> None:
    """Time forward and backward on a tree and on packed separate rows, through the same ops.

    The limit is the ratio of model FLOPs, without replayed rows; efficiency is speed-up over limit. The tree's time
    includes its build, plan and layout; that of separate rows has none of these. Speed-ups are medians over turns.
    Presets are given a hidden size of 256 and the vocabulary that occurs.
    """
    on_cpu = device == "cpu"
    scale = scale if scale is not None else (0.1 if on_cpu else 1.0)
    arms: tuple[Arm, ...] = ("rows", "merged", "tree") if merged else ("rows", "tree")
    batches = []
    for name, given in options.parse_workloads(workloads):
        sizes = {**(_CPU_SIZES.get(name, {}) if on_cpu else {}), **given}
        batches.append((name, sizes, workload(name, scale=scale, seed=seed, data_dir=data_dir, **sizes)))
        _check_budget(name, batches[-1][2], token_budget)
    results: list[dict[str, Any]] = []
    with output.watch("bench") as tell:
        for name, sizes, batch in batches:
            remapped, ids = remap_vocabulary(batch)
            timed = attach(_load(model, dtype, device, vocab_size=len(ids)))
            measured = measure(
                timed,
                remapped,
                token_budget=token_budget,
                turns=turns,
                arms=arms,
                cost_model=None if cost_model is None else CostModel.load(cost_model, model=_identity(timed)),
                clock=clock,
                progress=lambda text, name=name: tell(f"{name}, {text}"),  # type: ignore[misc]
            )
            results.append(_result(name, sizes, measured, _TOLERANCE[dtype], vocabulary_of(timed)))
    setting = {"model": model, "dtype": dtype, "device": device, "scale": scale, "token_budget": token_budget}
    ok = all(each["ok"] for each in results)
    document = {**setting, "turns": turns, "clock": clock, "ok": ok, "workloads": results}
    output.emit(document, as_json, lambda console: _render(console, document, results, merged))
    if not ok:
        raise typer.Exit(1)


def _identity(model: nn.Module) -> str:
    return model_identity(find_backbone(model).config)


def _check_budget(name: str, batch: Sequence[Trajectory], token_budget: int) -> None:
    longest = max(map(len, batch))
    if longest > token_budget:
        raise ValueError(
            f"token_budget: expected at least {longest}, the longest trajectory of workload {name!r}, came "
            f"{token_budget}; raise it or lower --scale"
        )


def _load(model: str, dtype: DtypeChoice, device: str, *, vocab_size: int) -> Any:
    if not is_preset(model):
        return load_model(model, dtype=to_dtype(dtype), device=device)
    changes = {**MODEL, "vocab_size": max(64, vocab_size)}
    if model.startswith("tiny-qwen3.5") or "next" in model:
        rotary = {"rope_type": "default", "rope_theta": 10_000_000.0, "partial_rotary_factor": 0.25}
        changes |= {**_LINEAR, "rope_parameters": {**rotary, "mrope_section": [4, 2, 2]}}
    return load_model(model, dtype=to_dtype(dtype), device=device, **changes)


def _result(
    name: str, sizes: Mapping[str, int], measured: Measurement, tolerance: float, vocabulary: int
) -> dict[str, Any]:
    """One workload's entry; no speeds where the arms do not agree."""
    ok = measured.logprob_max_abs <= tolerance
    arms = {}
    for arm, times in measured.arms.items():
        arms[arm] = {
            "seconds": list(times.seconds),
            "median_s": times.median_s,
            "prepare_s": times.prepare_s,
            "rows": times.counts.rows,
            "trained_rows": times.counts.trained_rows,
            "flops": times.flops,
            "gflops_per_s": times.flops_per_s / 1e9,
            "rows_per_s": times.rows_per_s,
            "microbatches": times.microbatches,
            "recomputed_rows": times.recomputed_rows,
            "replayed_rows": times.replayed_rows,
            "peak_bytes": measured.peak_bytes.get(arm),
        }
    rows, tree = measured.arms["rows"], measured.arms["tree"]
    speeds: dict[str, Any] = {
        "rows_s": rows.median_s,
        "tree_s": tree.median_s,
        "speedup": measured.speedup(),
        "efficiency": measured.efficiency,
    }
    if "merged" in measured.arms:
        speeds |= {"speedup_over_merged": measured.speedup("merged"), "efficiency_merged": measured.efficiency_merged}
    return {
        "workload": name,
        "sizes": dict(sizes),
        **(speeds if ok else dict.fromkeys(speeds)),
        "flop_limit": measured.flop_limit,
        "flop_limit_merged": measured.flop_limit_merged,
        "head_share": measured.head_share,
        "vocabulary": vocabulary,
        "logprob_max_abs": measured.logprob_max_abs,
        "ok": ok,
        "arms": arms if ok else {},
    }


def _render(console: Console, document: Mapping[str, Any], results: Sequence[Mapping[str, Any]], merged: bool) -> None:
    shown = output.number
    times = output.table(
        f"{document['model']} in {document['dtype']} on {document['device']}, lengths x {document['scale']:g}, at most "
        f"{document['token_budget']:,} rows a microbatch, medians of {document['turns']} alternating turns, "
        f"{document['clock']} time",
        "workload",
        *("separate rows s", "tree s", "speed-up", "FLOP limit", "efficiency", "GFLOP/s: rows", "tree"),
        *("rows/s: rows", "tree", "replayed", "head", "log-prob"),
    )
    for each in results:
        name = ":".join([each["workload"], *(f"{size}={value}" for size, value in each["sizes"].items())])
        if not each["ok"]:
            times.add_row(name, *["-"] * 11, f"[bold red]{shown(each['logprob_max_abs'])}[/]")
            continue
        rows, tree = each["arms"]["rows"], each["arms"]["tree"]
        times.add_row(
            name,
            *(shown(each[key]) for key in ("rows_s", "tree_s", "speedup", "flop_limit", "efficiency")),
            *(shown(arm["gflops_per_s"], 1) for arm in (rows, tree)),
            *(shown(round(arm["rows_per_s"])) for arm in (rows, tree)),
            f"{tree['replayed_rows'] / tree['rows']:.1%}",
            f"{each['head_share']:.1%}",
            shown(each["logprob_max_abs"]),
        )
    console.print(times)
    if merged:
        over = output.table("\nOver rows merged while one is a prefix of the next", "workload", *_MERGED_COLUMNS)
        for each in results:
            if each["ok"]:
                values = (each[key] for key in ("speedup_over_merged", "flop_limit_merged", "efficiency_merged"))
                over.add_row(each["workload"], shown(each["arms"]["merged"]["median_s"]), *map(shown, values))
        console.print(over)
    for each in results:
        if not each["ok"]:
            console.print(
                f"[bold red]fails[/] {each['workload']}: log-probs of the arms differ by "
                f"{shown(each['logprob_max_abs'])}; no speed is shown. Run harts check with this model."
            )


_MERGED_COLUMNS = ("merged s", "speed-up", "FLOP limit", "efficiency")
