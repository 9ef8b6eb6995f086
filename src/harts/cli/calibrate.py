"""harts calibrate: times a model on this machine and writes its cost model."""

from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer
from rich.console import Console

from harts.cli import options, output
from harts.cli.model import Device, DtypeChoice, Model, load_model, to_dtype
from harts.files import check_target
from harts.models import attach, default_kernels, recompute_activations
from harts.models.fuse import can_fuse, fuse
from harts.models.recompute import check_kept
from harts.testing.calibrate import calibrate as measure

__all__ = ["calibrate"]


def calibrate(
    out: Annotated[Path, typer.Option("--out", "-o", help="JSON file to write.", show_default=False)],
    model: Model = "tiny-qwen3.5",
    dtype: Annotated[DtypeChoice, typer.Option(help="Of the parameters.")] = "float32",
    device: Device = "cpu",
    vocab_size: Annotated[
        int | None, typer.Option(min=16, help="Of a preset; harts train says how many ids its data have.")
    ] = None,
    max_rows: Annotated[int, typer.Option(min=512, help="Rows of the largest microbatch timed.")] = 4096,
    recompute: Annotated[bool, typer.Option(help="Recompute activations in the backward.")] = True,
    keep_attention: Annotated[bool, typer.Option(help="Then keep the outputs of full attention.")] = False,
    as_json: options.Json = False,
) -> None:
    """Time a model on trees of different shapes and write a cost model that plan, train and bench read.

    Reports how far a model fitted to all other runs is off on each run: what to expect of its predictions.
    """
    check_target(out)
    loaded = attach(load_model(model, dtype=to_dtype(dtype), device=device, vocab_size=vocab_size))
    check_kept(default_kernels(loaded), recompute=recompute, keep_attention=keep_attention)
    if recompute:
        recompute_activations(loaded, keep_attention=keep_attention)
    if can_fuse(loaded):  # as harts train does
        fuse(loaded)
    with output.watch("calibrating") as tell:
        found = measure(loaded, max_rows=max_rows, kernels=default_kernels(loaded), log=tell)
    found.cost_model.save(out)
    document: dict[str, Any] = {
        "out": str(out),
        "cost_model": found.cost_model.to_json(),
        "runs": len(found.runs),
        "median_error": median(found.left_out_errors),
        "max_error": max(found.left_out_errors),
    }
    output.emit(document, as_json, lambda console: _render(console, document))


def _render(console: Console, document: dict[str, Any]) -> None:
    values = {
        "timed runs": str(document["runs"]),
        "error on a run left out": f"{document['median_error']:.1%} (median), {document['max_error']:.1%} (worst)",
    }
    for name, value in document["cost_model"]["time"].items():
        if value and name != "window":
            values[name] = f"{value:.3e} s"
    console.print(output.key_values(f"cost model -> {document['out']}", values))
