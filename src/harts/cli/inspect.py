"""harts inspect: what a data set shares. Needs no torch."""

from collections.abc import Sequence
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.text import Text

from harts.blocks import Blocks
from harts.cli import explaining, options, output
from harts.cost import count
from harts.escapes import escaped
from harts.explain import explain as find_misses
from harts.explain.report import sizes_of
from harts.formats.decoding import decoder_for
from harts.formats.stability import template_stability
from harts.trajectory import Trajectory
from harts.tree import PrefixTree, count_rows_without_routes

__all__ = ["describe", "inspect"]


def inspect(
    data: options.Data,
    rows: options.Rows = "trajectory",
    fmt: options.Format = "auto",
    fields: options.Fields = None,
    tokenizer: options.Tokenizer = None,
    reasoning: options.Reasoning = "keep",
    limit: options.Limit = None,
    groups: Annotated[int, typer.Option(min=0, help="Groups to list, those with the most tokens first.")] = 10,
    explain: Annotated[
        bool, typer.Option("--explain", help="Say where rows stop sharing, why, what it costs.")
    ] = False,
    findings: Annotated[int, typer.Option(min=0, help="With --explain: near misses to list.")] = 12,
    as_json: options.Json = False,
) -> None:
    """Count what a data set shares: tokens, rows, segments, chains, replayed rows.

    Always say what a row is: with --rows turn every model call is a row, and rows share far more.
    """
    trajectories = options.read_data(
        data, rows=rows, fmt=fmt, tokenizer=tokenizer, reasoning=reasoning, limit=limit, fields=fields
    )
    document = describe(trajectories)
    if not explain:
        output.emit(document, as_json, lambda console: _render(console, document, groups))
        return
    report = find_misses(trajectories, decoder=decoder_for(list(data), fmt=fmt, tokenizer=tokenizer, fields=fields))
    document["explain"] = report.to_json()
    stability = None
    if tokenizer is not None:
        stability = template_stability(list(data), tokenizer=tokenizer, fmt=fmt, reasoning=reasoning, fields=fields)
        document["explain"]["template"] = None if stability is None else stability.to_json()

    def render(console: Console) -> None:
        _render(console, document, 0)
        explaining.render(console, report, findings=findings, groups=groups)
        explaining.render_stability(console, stability)

    output.emit(document, as_json, render)


def describe(trajectories: Sequence[Trajectory]) -> dict[str, Any]:
    """Counts of one tree over all trajectories, and of one tree per group.

    `sharing` is tokens per row of the one tree, `sharing_in_groups` of one tree a group, `sharing_of_prefixes` where
    only a trajectory that another one continues is merged. `sharing_of_calls` and `sharing_of_conversations` are what
    `sharing` is with --rows turn and with --rows trajectory, whichever was read: tokens of a row for each model call,
    and of rows merged while one is a prefix of the next, per row of the same tree. Where experts were recorded,
    `sharing_without_routes` is that of the one tree if they were not: the difference is what forcing them costs.
    """
    groups: dict[str, list[Trajectory]] = {}
    for trajectory in trajectories:
        groups.setdefault(trajectory.group, []).append(trajectory)
    by_group = [{"group": name, **_counts(members)} for name, members in groups.items()]
    tree = PrefixTree.build(trajectories)
    blocks = Blocks.of_tree(tree)
    sizes = sizes_of(tree)
    lengths = [len(trajectory) for trajectory in trajectories]
    whole = _counts(trajectories)
    return {
        "trajectories": len(trajectories),
        "groups": len(groups),
        **{name: whole[name] for name in ("tokens", "unique_tokens", "sharing")},
        "sharing_in_groups": whole["tokens"] / sum(each["unique_tokens"] for each in by_group),
        "sharing_of_prefixes": whole["tokens"] / sizes.prefix,
        "sharing_of_calls": sizes.per_call / sizes.tree,
        "sharing_of_conversations": sizes.prefix / sizes.tree,
        **_without_routes(trajectories),
        **{name: whole[name] for name in ("segments", "branch_depth", "trained_tokens", "trained_share")},
        "trained_rows": int(np.count_nonzero(tree.trained_T)),
        "nesting": blocks.nesting,
        "chains": blocks.chains.num_chains,
        "blocks": blocks.num_blocks,
        "replayed_rows": blocks.replayed_rows,
        "gathered_keys": int(blocks.chains.length_C.sum()),
        "longest": max(lengths),
        "median_length": float(np.median(lengths)),
        "by_group": by_group,
    }


def _without_routes(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    if all(trajectory.routes is None for trajectory in trajectories):
        return {}
    return {"sharing_without_routes": sum(map(len, trajectories)) / count_rows_without_routes(trajectories)}


def _counts(trajectories: Sequence[Trajectory]) -> dict[str, Any]:
    tree = PrefixTree.build(trajectories)
    counts = count(tree)
    trained = sum(trajectory.num_trained for trajectory in trajectories)
    return {
        "trajectories": len(trajectories),
        "tokens": tree.num_tokens,
        "unique_tokens": tree.num_rows,
        "sharing": tree.sharing,
        "segments": tree.num_segments,
        "branch_depth": _branch_depth(tree),
        "chains": counts.chains,
        "replayed_rows": counts.replayed_rows,
        "trained_tokens": trained,
        "trained_share": trained / tree.num_tokens,
    }


def _branch_depth(tree: PrefixTree) -> int:
    """Most branch points on a path from a root."""
    children = np.bincount(tree.parent_S[tree.parent_S >= 0], minlength=tree.num_segments)
    branches = (children > 1).tolist()
    depth: list[int] = []
    for segment, parent in enumerate(tree.parent_S.tolist()):
        depth.append((depth[parent] if parent >= 0 else 0) + branches[segment])
    return max(depth)


def _render(console: Console, document: dict[str, Any], most: int) -> None:
    shown = output.number
    values = {
        "trajectories": f"{shown(document['trajectories'])} in {shown(document['groups'])} groups",
        "tokens": f"{shown(document['tokens'])}, the longest trajectory {shown(document['longest'])}",
        "unique tokens": shown(document["unique_tokens"]),
        "sharing": f"{document['sharing']:.2f}x in one tree, {document['sharing_in_groups']:.2f}x with a tree a group, "
        f"{document['sharing_of_prefixes']:.2f}x where only whole prefixes merge",
        "by what a row is": f"{document['sharing_of_calls']:.2f}x with one a model call (chat: --rows turn), "
        f"{document['sharing_of_conversations']:.2f}x with one a conversation (--rows trajectory)",
        "trained tokens": f"{shown(document['trained_tokens'])} ({document['trained_share']:.1%} of all), "
        f"{shown(document['trained_rows'])} of them distinct",
        "segments": f"{shown(document['segments'])}, at most {shown(document['branch_depth'])} branch points on a path",
        "chains": f"{shown(document['chains'])}, nested {shown(document['nesting'])} deep",
        "replayed rows": f"{shown(document['replayed_rows'])} "
        f"({document['replayed_rows'] / document['unique_tokens']:.1%} of the unique ones)",
    }
    if "sharing_without_routes" in document:
        values["sharing without routes"] = f"{document['sharing_without_routes']:.2f}x if no experts were recorded"
    console.print(output.key_values("One tree over all trajectories", values))
    listed = sorted(document["by_group"], key=lambda each: -int(each["tokens"]))[:most]
    if not listed:
        return
    columns = ("trajectories", "tokens", "unique_tokens", "sharing", "segments", "branch_depth", "chains")
    groups = output.table(
        f"\nThe {len(listed)} of {document['groups']} groups with the most tokens, a tree each",
        "group",
        *(name.replace("_", " ") for name in columns),
        "trained",
    )
    for each in listed:
        groups.add_row(
            Text(escaped(each["group"]) or "-"),
            *(shown(each[name]) for name in columns),
            f"{each['trained_share']:.1%}",
        )
    console.print(groups)
