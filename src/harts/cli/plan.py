"""harts plan: microbatches of a data set on slots and replicas. Needs no torch."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from harts.cli import options, output
from harts.cost import CostModel
from harts.plan import Microbatch, Plan, check_plan, make_plan
from harts.tree import PrefixTree

__all__ = ["plan"]

_COLUMNS = 8
"""Replicas that get a column each; more are summed up slot by slot."""
_BAR = 10

Replicas = Annotated[int, typer.Option(help="Data-parallel replicas, which meet at the end of every slot.")]
Budget = Annotated[
    int, typer.Option(help="Most unique + recomputed + replayed rows of a microbatch.", show_default=False)
]


def plan(
    data: options.Data,
    token_budget: Budget,
    replicas: Replicas = 1,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="JSON file to write; harts train can run it.")] = None,
    check: Annotated[bool, typer.Option(help="Check the laws of the plan too: build every microbatch.")] = False,
    cost_model: Annotated[Path | None, typer.Option(help="From harts calibrate; without it rows are balanced.")] = None,
    key_cap: Annotated[int | None, typer.Option(help="Most gathered keys of a microbatch.")] = None,
    slots: Annotated[int, typer.Option(min=0, help="Slots to list.")] = 20,
    rows: options.Rows = "trajectory",
    fmt: options.Format = "auto",
    fields: options.Fields = None,
    tokenizer: options.Tokenizer = None,
    reasoning: options.Reasoning = "keep",
    limit: options.Limit = None,
    as_json: options.Json = False,
) -> None:
    """Cut a data set into microbatches and place them on replicas, with a lower bound on the time of any plan.

    Speed-up is predicted over separate rows spread evenly over the replicas, with the cost model's own unit. With
    --check, exits with 1 if a law does not hold.
    """
    trajectories = options.read_data(
        data, rows=rows, fmt=fmt, tokenizer=tokenizer, reasoning=reasoning, limit=limit, fields=fields
    )
    tree = PrefixTree.build(trajectories)
    price = CostModel.load(cost_model) if cost_model is not None else None
    made = make_plan(tree, token_budget=token_budget, num_replicas=replicas, cost_model=price, key_cap=key_cap)
    document: dict[str, Any] = {**made.to_json(), "speedup": made.speedup}
    if out is not None:
        made.save(out)
        document["out"] = str(out)
    if check:
        document |= _checked(tree, made)
    output.emit(document, as_json, lambda console: _render(console, made, document, slots))
    if not document.get("ok", True):
        raise typer.Exit(1)


def _checked(tree: PrefixTree, made: Plan) -> dict[str, Any]:
    try:
        check_plan(tree, made)
    except ValueError as error:
        return {"ok": False, "failure": str(error)}
    return {"ok": True}


def _render(console: Console, made: Plan, document: dict[str, Any], most: int) -> None:
    shown = output.number
    unit = {"rows": "rows", "flops": "FLOPs", "seconds": "s"}[made.cost_model.unit]

    def price(value: float) -> str:
        return f"{round(value):,} {unit}" if unit == "rows" else f"{value:.4g} {unit}"

    values = {
        "slots x replicas": f"{shown(made.slots)} x {shown(made.replicas)}",
        "rows": f"{shown(made.unique_rows)} unique, {shown(made.recomputed_rows)} recomputed, "
        f"{shown(made.replayed_rows)} replayed",
        "makespan": f"{price(made.makespan)}, {made.gap:.1%} above the lower bound of {price(made.lower_bound)}",
        "idle": f"{made.idle_fraction:.1%}",
        "speed-up": f"{made.speedup:.2f}x over separate rows (predicted)",
        "planned in": f"{made.plan_s:.3f} s",
    }
    console.print(output.key_values(f"Plan with a budget of {made.token_budget:,} rows a microbatch", values))
    if most:
        _list_slots(console, made, most)
    for hint in made.hints:
        console.print(output.marked("hint", "bold yellow", hint))
    if "out" in document:
        console.print(f"written to {document['out']}", highlight=False)
    if "ok" in document:
        well = output.marked("ok:", "bold green", "every law holds")
        console.print(well if document["ok"] else Text(document["failure"], "bold red"))


def _list_slots(console: Console, made: Plan, most: int) -> None:
    wide = made.replicas <= _COLUMNS
    heads = (
        tuple(f"replica {replica}" for replica in range(made.replicas))
        if wide
        else ("least full", "mean", "fullest", "recomputed", "replayed", "empty")
    )
    title = "\nShare of the budget" + (", of which recomputed" if wide and made.recomputed_rows else "")
    grid = output.table(title, "slot", *heads, "idle", left=1 + (made.replicas if wide else 0))
    fill = made.fill()
    for at, slot in enumerate(made.microbatches[:most]):
        cost = max(one.cost for one in slot)
        idle = f"{max(0.0, 1 - sum(one.cost for one in slot) / (cost * len(slot))):.1%}"
        if wide:
            grid.add_row(str(at), *(_cell(one, made.token_budget) for one in slot), idle)
        else:
            sums = (sum(one.recomputed_rows for one in slot), sum(one.replayed_rows for one in slot))
            empty = sum(one.is_empty for one in slot)
            shares = (f"{value:.1%}" for value in (fill[at].min(), fill[at].mean(), fill[at].max()))
            grid.add_row(str(at), *shares, *(output.number(value) for value in (*sums, empty)), idle)
    console.print(grid)
    if made.slots > most:
        console.print(f"… {made.slots - most} more slots; --slots {made.slots} lists all", style="dim")


def _cell(one: Microbatch, budget: int) -> Text:
    """A bar of the budget: what is unique, what is recomputed, what is free."""
    if one.is_empty:
        return Text("empty", style="dim")
    filled = min(_BAR, max(1, round(_BAR * one.budget_rows / budget)))
    again = min(filled - 1, round(filled * one.recomputed_rows / one.budget_rows)) if one.recomputed_rows else 0
    cell = Text("▰" * (filled - again), style="cyan")
    cell.append("▰" * again, style="red").append("▱" * (_BAR - filled), style="dim")
    cell.append(f" {one.budget_rows / budget:.0%}", style="default")
    if one.recomputed_rows:
        cell.append(f" {one.recomputed_rows / one.budget_rows:.0%}", style="red")
    return cell
