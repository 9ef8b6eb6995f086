"""harts show: the prefix tree of a data set, in the terminal or as an HTML page. Needs no torch."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from harts.cli import options, output
from harts.files import check_target
from harts.formats.decoding import Decoder, decoder_for
from harts.plan import make_plan
from harts.tree import PrefixTree
from harts.viz import draw_tree, render_page, write_page

__all__ = ["show"]


def show(
    data: options.Data,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="HTML page to write: the tree, its plan, an attention mask.")
    ] = None,
    replicas: Annotated[int, typer.Option(help="Replicas of the plan on the page.")] = 1,
    token_budget: Annotated[
        int | None, typer.Option(help="Budget of that plan; twice the longest trajectory if not given.")
    ] = None,
    max_lines: Annotated[int, typer.Option(min=0, help="Lines in the terminal; 0 for all.")] = 60,
    rows: options.Rows = "trajectory",
    fmt: options.Format = "auto",
    fields: options.Fields = None,
    tokenizer: options.Tokenizer = None,
    reasoning: options.Reasoning = "keep",
    limit: options.Limit = None,
    as_json: options.Json = False,
) -> None:
    """Draw the prefix tree of a data set: segments with tokens, trajectories through them, trained share, text.

    With -o FILE.html the same as a page to zoom, search and read, which needs no network. Rows of token ids are shown
    as text if --tokenizer names the tokenizer that made them.
    """
    if out is not None:
        _check_page(out)
    trajectories = options.read_data(
        data, rows=rows, fmt=fmt, tokenizer=tokenizer, reasoning=reasoning, limit=limit, fields=fields
    )
    decoder = decoder_for(list(data), fmt=fmt, tokenizer=tokenizer, fields=fields)
    tree = PrefixTree.build(trajectories)
    document: dict[str, Any] = {
        "trajectories": tree.num_trajectories,
        "tokens": tree.num_tokens,
        "unique_tokens": tree.num_rows,
        "sharing": tree.sharing,
        "num_segments": tree.num_segments,
    }
    if out is not None:
        budget = token_budget if token_budget is not None else 2 * max(map(len, trajectories))
        plan = make_plan(tree, token_budget=budget, num_replicas=replicas)
        title = ", ".join(path.name.removesuffix(".gz").removesuffix(".jsonl") for path in data)
        write_page(out, render_page(tree, plan, title=title, decoder=decoder))
        document |= {"out": str(out), "token_budget": budget, "replicas": replicas, "slots": plan.slots}
    if as_json:
        document["segments"] = _segments(tree, decoder)
    output.emit(document, as_json, lambda console: _render(console, document, tree, decoder, max_lines))


def _check_page(out: Path) -> None:
    """Refuses a name that does not say HTML: the page would lie in a file that opens as something else."""
    if out.suffix.lower() not in (".html", ".htm"):
        raise ValueError(
            f"{out}: expected -o with a name that ends in .html or .htm, got {out.name!r}; show writes a page"
        )
    check_target(out)


def _segments(tree: PrefixTree, decoder: Decoder | None) -> list[dict[str, Any]]:
    ends: dict[int, list[str]] = {}
    for trajectory, segment in zip(tree.trajectories, tree.end_segment_B.tolist(), strict=True):
        ends.setdefault(segment, []).append(trajectory.id)
    listed = []
    for segment, (start, length) in enumerate(zip(tree.start_S.tolist(), tree.length_S.tolist(), strict=True)):
        token_ids = tree.token_ids_T[start : start + length]
        listed.append(
            {
                "parent": int(tree.parent_S[segment]),
                "depth": int(tree.depth_S[segment]),
                "tokens": length,
                "multiplicity": int(tree.multiplicity_S[segment]),
                "trained": int(tree.trained_T[start : start + length].sum()),
                "ends": ends.get(segment, []),
                "text": None if decoder is None else decoder.text(token_ids),
            }
        )
    return listed


def _render(
    console: Console, document: dict[str, Any], tree: PrefixTree, decoder: Decoder | None, max_lines: int
) -> None:
    console.print(
        f"{document['trajectories']:,} trajectories, {document['tokens']:,} tokens, {tree.num_rows:,} of them distinct "
        f"({tree.sharing:.2f}x) in {tree.num_segments:,} segments",
        highlight=False,
    )
    if "out" in document:
        console.print(f"written to {document['out']}", highlight=False)
        return
    console.print("tokens x trajectories, trained share, ends of trajectories, text", style="dim")
    for line in draw_tree(tree, decoder=decoder, max_lines=max_lines, width=max(40, console.width)):
        console.print(line)
