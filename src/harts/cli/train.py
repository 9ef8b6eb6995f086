"""harts train: a TOML file and an output folder in, a trained model out."""

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from transformers.utils import logging

from harts.cli import options, output
from harts.train import Interrupted, TrainConfig, Trainer, fields
from harts.train.config import TABLES
from harts.train.firstlook import FirstLook, first_look

__all__ = ["train"]

_LINE = (
    "loss", "reward_mean", "reward_std", "learning_rate", "grad_norm", "ref_kl", "old_kl", "clip_fraction_low",
    "clip_fraction_high", "entropy",
)  # fmt: skip


def train(
    config: Annotated[Path, typer.Argument(help="TOML file with the settings, see examples/.", show_default=False)],
    out: Annotated[
        Path | None, typer.Option(help="Folder for metrics, config and checkpoints.", show_default=False)
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest checkpoint in --out.")] = False,
    look: Annotated[bool, typer.Option("--look/--no-look", help="Measure speed-up and agreement first.")] = True,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Print all settings as a TOML file, and do nothing.")
    ] = False,
    as_json: options.Json = False,
    **changes: str | None,
) -> None:
    """Train a model on trajectories that share history; every distinct token runs once.

    Every setting of the file has an option, those of its tables with a dot: --learning-rate 1e-6 --loss.kl-coef 0.1.
    Interrupt it at any time: the step in hand is finished, a checkpoint written, and --resume goes on exactly there.
    """
    logging.set_verbosity_error()  # transformers warns of slow fall-backs that HARTS does not use
    logging.disable_progress_bar()
    settings = TrainConfig.load(config, _changes(changes))
    if print_config:
        text = fields.to_toml(settings.to_dict())
        output.PlainConsole(soft_wrap=True).print(text, end="", highlight=False)
        return
    if out is None:
        raise ValueError("harts train: expected a folder for what the run writes, got none; pass --out DIR")
    console = output.PlainConsole(stderr=True, soft_wrap=True)
    trainer = Trainer(settings, out, resume=resume, log=lambda line: console.print(line, highlight=False))
    try:
        document = _run(trainer, console, look)
    except Interrupted as interrupted:
        output.complain(str(interrupted))
        raise typer.Exit(130) from None
    finally:
        trainer.close()
    if trainer.replicas.rank == 0:
        output.emit(document, as_json, lambda to: _render(to, document))


_SETTINGS = fields.fields_of(TrainConfig, TABLES)
_TABLE = "__"  # stands for the dot in names of parameters
_HELP = {
    "data": "Trajectories.",
    "steps": "Optimiser steps.",
    "token_budget": "Rows of a microbatch at most.",
    "plan": "Plan of harts plan -o to follow in every step.",
    "cost_model": "Cost model of harts calibrate to plan with.",
    "device": "cpu, cuda, ...",
}


def _changes(given: Mapping[str, str | None]) -> dict[str, Any]:
    """Settings that were given as options, by name; names that others use go through, to be refused by the config."""
    named = {name.replace(_TABLE, "."): text for name, text in given.items() if text is not None}
    return {name: fields.parse(text, _SETTINGS[name]) if name in _SETTINGS else text for name, text in named.items()}


def _with_settings(function: Callable[..., None]) -> None:
    """Gives the function a parameter for each setting; typer makes options of them."""
    signature = inspect.signature(function)
    fixed = [each for each in signature.parameters.values() if each.kind != each.VAR_KEYWORD]
    made = []
    for name in [*_SETTINGS, *fields.SYNONYMS]:
        known = name in _SETTINGS
        option = typer.Option(
            "--" + name.replace("_", "-"),
            help=_HELP.get(name, ""),
            metavar=fields.describe(_SETTINGS[name]) if known else None,
            hidden=not known,
            show_default=False,
            rich_help_panel="Settings, instead of the file's",
        )
        annotation = Annotated[str | None, option]
        key = name.replace(".", _TABLE)
        made.append(inspect.Parameter(key, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation))
    function.__signature__ = signature.replace(parameters=[*fixed, *made])  # type: ignore[attr-defined]


_with_settings(train)


def _run(trainer: Trainer, console: Console, look: bool) -> dict[str, Any]:
    seen: FirstLook | None = None
    finished = trainer.step >= trainer.config.steps
    if finished:
        console.print(
            f"already at step {trainer.step} of {trainer.config.steps}; raise steps to go on", highlight=False
        )
    if look and trainer.replicas.size == 1 and not finished:
        with output.watch("a first look at the data (--no-look goes without)") as tell:
            seen = first_look(trainer, progress=tell)
        console.print(_describe(seen), highlight=False)
    bar = Progress(
        TextColumn("step"), MofNCompleteColumn(), BarColumn(), TimeElapsedColumn(), TextColumn("left"),
        TimeRemainingColumn(), console=console, disable=trainer.replicas.rank != 0 or not console.is_terminal,
    )  # fmt: skip
    with bar:
        task = bar.add_task("train", total=trainer.config.steps, completed=trainer.step)
        for metrics in trainer.run():
            bar.update(task, completed=metrics.step)
            if trainer.replicas.rank == 0:
                console.print(_line(metrics.to_dict(), trainer.config.steps), highlight=False)
    records = trainer.metrics.records() if trainer.metrics is not None else []
    return {
        "out": str(trainer.out),
        "steps": trainer.step,
        "notes": trainer.notices,
        "first_look": None if seen is None else dataclasses.asdict(seen),
        "first": records[0] if records else None,
        "last": records[-1] if records else None,
        "sharing": sum(r["tokens"] for r in records) / sum(r["unique_rows"] for r in records) if records else None,
    }


def _describe(seen: FirstLook) -> str:
    return (
        f"first look: the first step shares {seen.sharing:.1f}x; on {seen.rows_looked_at} of its rows "
        f"({seen.tokens:,} tokens, {seen.unique_rows:,} unique) the tree is {seen.speedup:.2f}x as fast as separate "
        f"rows, and the largest log-prob difference is {seen.logprob_max_abs:.1e}"
    )


def _line(record: dict[str, Any], steps: int) -> str:
    parts = [f"step {record['step']:>{len(str(steps))}}/{steps}"]
    parts += [f"{name} {output.number(record[name], 4)}" for name in _LINE if record.get(name) is not None]
    parts.append(f"{record['tokens']:,} tokens in {record['unique_rows']:,} rows ({record['sharing']:.1f}x)")
    parts.append(f"{record['replayed_rows']:,} replayed, {record['trained_rows']:,} trained")
    parts.append(f"{record['seconds']:.2f} s, {record['rows_per_s']:,.0f} rows/s")
    predicted, taken = record["predicted"], record["compute_seconds"]
    if record["predicted_unit"] == "seconds":
        parts.append(f"{taken:.2f} s of compute, {predicted:.2f} s predicted")
    elif record["predicted_unit"] == "flops":
        parts.append(f"{predicted / taken / 1e9:,.0f} GFLOP/s")
    return "  ".join(parts)


def _render(console: Console, document: dict[str, Any]) -> None:
    first, last, seen = document["first"], document["last"], document["first_look"]
    values = {"steps": str(document["steps"])}
    if first is not None:
        values["sharing"] = f"{document['sharing']:.2f}x"
        values["loss"] = f"{first['loss']:.4f} -> {last['loss']:.4f}"
    if seen is not None:
        values["speed-up"] = f"{seen['speedup']:.2f}x over packed separate rows ({seen['tokens']:,} tokens)"
        values["largest log-prob difference"] = f"{seen['logprob_max_abs']:.1e}"
    values["written to"] = document["out"]
    for index, note in enumerate(document["notes"], start=1):
        values[f"note {index}"] = note
    console.print(output.key_values("harts train", values))
