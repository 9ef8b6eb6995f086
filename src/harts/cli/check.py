"""harts check: does a model give the same on a tree as on separate rows?"""

import dataclasses
from collections.abc import Sequence
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console

from harts.cli import options, output
from harts.cli.model import Device, DtypeChoice, Model, is_preset, load_model, to_dtype
from harts.models import attach
from harts.models.attach import find_backbone
from harts.models.describe import FamilyFacts, family_facts
from harts.testing.compare import Comparison, compare
from harts.testing.routes import RouteStability, has_routers, route_stability
from harts.testing.trees import AWKWARD, random_trajectories
from harts.testing.workloads import MissingData, workload
from harts.trajectory import Trajectory
from harts.vocabulary import remap_vocabulary

__all__ = ["check"]

WORKLOADS = (
    "star3,grpo,think:rollouts=2:turns=8,swe:rollouts=1:turns=24,search,flat,thin:rows=96,"
    "tau:groups=1,mint:groups=1,toolbench:groups=2,pi,openhands:groups=1"
)
"""All of them, with so few rows that separate rows one by one take seconds."""

_CATERPILLAR = 64
"""Trajectories of the awkward caterpillar that are run: all 1,000 would be half a million tokens one by one."""

PieceRows = Annotated[
    int | None, typer.Option(min=1, help="Run trees in pieces of at most so many rows.", show_default=False)
]
PieceMemory = Annotated[
    str | None, typer.Option(help="Run trees in the pieces that fit: 60GiB, auto.", show_default=False)
]

Batches = list[tuple[str, Sequence[Trajectory]]]


def check(
    data: options.OptionalData = None,
    model: Model = "tiny-qwen3.5",
    dtype: Annotated[
        DtypeChoice, typer.Option(help="Of the parameters; below float64 errors are compared.")
    ] = "float64",
    workloads: Annotated[
        str, typer.Option(help="Without DATA: NAME or NAME:SIZE=NUMBER, commas between; '' for the trees alone.")
    ] = WORKLOADS,
    scale: Annotated[float, typer.Option(help="Factor on the lengths of the workloads, above 0, at most 1.")] = 0.02,
    trees: Annotated[bool, typer.Option(help="Without DATA: awkward and random trees too.")] = True,
    token_budget: PieceRows = None,
    memory: PieceMemory = None,
    seed: Annotated[int, typer.Option(help="Of synthetic workloads, random trees and loss weights.")] = 0,
    rows: options.Rows = "trajectory",
    fmt: options.Format = "auto",
    fields: options.Fields = None,
    tokenizer: options.Tokenizer = None,
    reasoning: options.Reasoning = "keep",
    limit: options.Limit = None,
    data_dir: options.DataDir = None,
    device: Device = "cpu",
    as_json: options.Json = False,
) -> None:
    """Compare a model on a tree with separate rows run one by one through transformers' own code.

    Log-probs, entropies and the gradient of every parameter are compared. In float64 they have to agree to 1e-10 and
    1e-8; below, the tree's error against float64 may be 1.25 times that of separate rows in the same dtype, and of a
    mixture of experts it is told how often a token's experts differ from those on packed rows. Without DATA, awkward
    trees, random trees and all workloads at a small scale are run. Exits with 1 if a law does not hold.
    """
    left_out: list[str] = []
    if data:
        read = options.read_data(
            data, rows=rows, fmt=fmt, tokenizer=tokenizer, reasoning=reasoning, limit=limit, fields=fields
        )
        batches: Batches = [(", ".join(map(str, data)), read)]
    else:
        batches, left_out = _built_in(workloads, scale=scale, trees=trees, seed=seed, data_dir=data_dir)
    compared: list[tuple[str, Comparison]] = []
    routed: list[RouteStability] = []
    facts = None
    with output.watch("check") as tell:
        for name, trajectories in batches:
            tell(f"{name}, {len(trajectories)} rows, {sum(map(len, trajectories)):,} tokens")
            if is_preset(model) or not data:
                trajectories, ids = remap_vocabulary(trajectories)
                vocabulary = max(64, len(ids)) if is_preset(model) else None
                tested = load_model(model, dtype=to_dtype(dtype), device=device, vocab_size=vocabulary)
            else:
                tested = load_model(model, dtype=to_dtype(dtype), device=device)
            compared.append((name, compare(tested, trajectories, seed=seed, token_budget=token_budget, memory=memory)))
            facts = family_facts(find_backbone(tested).config)
            if dtype != "float64" and has_routers(tested):
                routed.append(route_stability(attach(tested), trajectories))
    document = _document(model, dtype, compared, facts) | {"token_budget": token_budget, "memory": memory}
    document |= _routes(routed) | {"left_out": left_out}
    output.emit(document, as_json, lambda console: _render(console, document, compared))
    if not document["ok"]:
        raise typer.Exit(1)


def _built_in(workloads: str, *, scale: float, trees: bool, seed: int, data_dir: Any) -> tuple[Batches, list[str]]:
    """Batches, and which of the default workloads were left out, as their data are not in this repository."""
    named = options.parse_workloads(workloads) if workloads.strip() else []
    if not trees and not named:
        raise ValueError("workloads: expected at least one without trees, got none; there is nothing to check")
    batches: Batches = []
    left_out: list[str] = []
    for name, batch in AWKWARD.items() if trees else ():
        if name == "caterpillar":
            batches.append((f"awkward: {name}, first {_CATERPILLAR}", batch[:_CATERPILLAR]))
        elif any(each.loss_mask.any() for each in batch):  # a single token has nothing to train
            batches.append((f"awkward: {name}", batch))
    for index in range(3 if trees else 0):
        rng = np.random.default_rng([seed, index])
        batches.append((f"random: {index}", random_trajectories(rng, num_trajectories=4 + 4 * index, max_length=300)))
    for name, sizes in named:
        label = ":".join([name, *(f"{size}={value}" for size, value in sizes.items())])
        try:
            batches.append((f"workload: {label}", workload(name, scale=scale, seed=seed, data_dir=data_dir, **sizes)))
        except MissingData:
            if workloads != WORKLOADS:  # asked for by name
                raise
            left_out.append(name)
    return batches, left_out


def _document(
    model: str, dtype: str, compared: Sequence[tuple[str, Comparison]], facts: FamilyFacts | None
) -> dict[str, Any]:
    results = [result for _, result in compared]
    trained = sum(each.trained for each in results)
    equal = sum(each.logprob_bitwise_equal_fraction * each.trained for each in results)
    ratios = [each.logprob_error_ratio for each in results if each.logprob_error_ratio is not None]
    grad_ratios = [each.grad_error_ratio for each in results if each.grad_error_ratio is not None]
    return {
        "model": model,
        "dtype": dtype,
        "family": None if facts is None else dataclasses.asdict(facts),
        "logprob_max_abs": _largest([each.logprob_max_abs for each in results]),
        "entropy_max_abs": _largest([each.entropy_max_abs for each in results]),
        "logprob_bitwise_equal_fraction": equal / trained,
        "grad_max_rel": _largest([each.grad_max_rel for each in results]),
        "logprob_error_ratio": _largest(ratios) if ratios else None,
        "grad_error_ratio": _largest(grad_ratios) if grad_ratios else None,
        "ok": all(each.ok for each in results),
        "batches": [{"name": name, **dataclasses.asdict(each), "ok": each.ok} for name, each in compared],
    }


def _routes(routed: Sequence[RouteStability]) -> dict[str, float]:
    """Fractions over all batches of (token, layer) whose experts differ; nothing for a dense model."""
    total = sum(each.tokens * each.layers for each in routed)
    names = {"routes_differ_on_tree": "tree_fraction", "routes_differ_on_repeat": "repeat_fraction"}
    sums = {
        name: sum(getattr(each, field) * each.tokens * each.layers for each in routed) for name, field in names.items()
    }
    return {name: value / total for name, value in sums.items() if total}


def _pieces(document: dict[str, Any]) -> str:
    limits = [f"{document['token_budget']:,} rows"] if document["token_budget"] else []
    limits += [str(document["memory"])] if document["memory"] else []
    return f" in pieces of at most {' and '.join(limits)}" if limits else ""


def _largest(values: Sequence[float]) -> float:
    """The largest, or NaN if there is one."""
    return float(np.max(values))


def _render(console: Console, document: dict[str, Any], compared: Sequence[tuple[str, Comparison]]) -> None:
    shown = output.number
    exact = document["dtype"] == "float64"
    more = () if exact else ("error ratio: log-prob", "entropy", "gradient", "median parameter")
    results = output.table(
        f"{document['model']} in {document['dtype']}: a tree{_pieces(document)} against separate rows through "
        "transformers",
        "batch",
        *("rows", "tokens", "unique", "log-prob", "bits equal", "entropy", "gradient", *more, ""),
    )
    for name, each in compared:
        ratios = (
            each.logprob_error_ratio,
            each.entropy_error_ratio,
            each.grad_error_ratio,
            each.grad_error_ratio_median,
        )
        results.add_row(
            name,
            *(shown(value) for value in (each.trajectories, each.tokens, each.rows, each.logprob_max_abs)),
            f"{each.logprob_bitwise_equal_fraction:.1%}",
            *(shown(value) for value in (each.entropy_max_abs, each.grad_max_rel)),
            *(shown(value) for value in (() if exact else ratios)),
            output.marked("ok", "green") if each.ok else output.marked("fails", "bold red"),
        )
    console.print(results)
    if document["left_out"]:
        why = f"{', '.join(document['left_out'])}: their data are not here; name their folder with --data-dir"
        console.print(output.marked("\nleft out:", "yellow", why))
    console.print(
        f"\nLargest differences: log-prob {shown(document['logprob_max_abs'])}, entropy "
        f"{shown(document['entropy_max_abs'])}, gradient {shown(document['grad_max_rel'])} of its norm."
    )
    if "routes_differ_on_tree" in document:
        console.print(
            f"Experts differ at {document['routes_differ_on_tree']:.3%} of (token, layer) between the tree and packed "
            f"rows, at {document['routes_differ_on_repeat']:.3%} between two runs of packed rows."
        )
    for name, each in compared:
        for failure in each.failures:
            console.print(output.marked("fails", "bold red", f"{name}: {failure}"))
    if document["ok"]:
        console.print(output.marked("ok:", "bold green", f"every law holds on {len(compared)} batches."))
