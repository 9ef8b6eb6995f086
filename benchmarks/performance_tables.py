"""Makes the tables of docs/performance.md from the lines in benchmarks/results.

    python benchmarks/performance_tables.py --write

Without `--write` it ends with 1 if a table is not that of the lines. Each row of a table is of one commit, which stands
in its last column; where the two arms of a row are of two commits, both do. Of several measurements of one thing the
last line counts.
"""

import argparse
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "performance.md"
RESULTS = ROOT / "benchmarks" / "results"

Line = dict[str, Any]

NAMES: Mapping[str, str] = {
    "think": "`think`, 4 rollouts x 20 turns",
    "swe": "`swe`, 2 rollouts x 30 turns",
    "tau": "`tau`, 6 groups",
    "mint": "`mint`, 12 groups",
    "pi": "`pi`, first 30k tokens",
}
GPU_ORDER = ["star3", "grpo", "think", "swe", "search", "tau", "mint", "flat", "thin", "openhands", "pi"]
GPU_GOALS = {**dict.fromkeys(GPU_ORDER[:7], "0.97"), **dict.fromkeys(("flat", "thin"), "speed-up 0.99")}
CPU_GOALS = {**dict.fromkeys(("tau", "star3", "think"), "0.8"), **dict.fromkeys(("flat", "thin"), "speed-up 0.97")}
TWO_PROCESSES = {("mint", "rows"): ("6a71298ceab5", "6fc0b88fe3b6")}
"""Commits of tree and other arm, where they did not run side by side."""


def read(name: str) -> list[Line]:
    return [json.loads(line) for line in (RESULTS / name).read_text(encoding="utf-8").splitlines()]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="put the tables into the page")
    options = parser.parse_args()
    page = PAGE.read_text(encoding="utf-8")
    new = page
    for name, rows in tables().items():
        new = put(new, name, rows)
    if options.write:
        PAGE.write_text(new, encoding="utf-8")
    elif new != page:
        print("docs/performance.md: the tables are not those of benchmarks/results; run with --write")
        return 1
    return 0


def tables() -> dict[str, list[str]]:
    """Rows of each table, by the name in its markers."""
    gpu = read("bench_gpu.jsonl")
    dense = [line for line in gpu if line["model"] == "qwen3.5-4b" and line["layers"] == 32]
    experts = [line for line in gpu if line["model"] == "qwen3.5-35b-a3b"]
    return {
        "gpu": [*gpu_rows(dense, recompute=True), *gpu_rows(dense, recompute=False), *plain_rows()],
        "experts": list(expert_rows(experts)),
        "cpu": list(cpu_rows(read("bench_cpu.jsonl"))),
        "layouts": [
            f"| {each['case']} | {each['median_s']:.3f} s | {each['goal_s']:.3f} s | {each['commit'][:7]} |"
            for each in read("tree_and_layout.jsonl")
        ],
    }


def put(page: str, name: str, rows: Sequence[str]) -> str:
    """The page with these rows below the two heading lines between the table's markers."""
    pattern = re.compile(rf"(<!-- table {name} -->\n(?:\|.*\n){{2}})(?:\|.*\n)*(<!-- end -->)")
    if len(pattern.findall(page)) != 1:
        raise ValueError(f"docs/performance.md: expected one table between markers named {name}; put them there")
    return pattern.sub(lambda found: found[1] + "".join(f"{row}\n" for row in rows) + found[2], page)


def pairs(lines: Sequence[Line]) -> Iterator[tuple[Line, Line, str]]:
    """For each other arm, separate rows first: the line of the tree, the line of the arm, and the arm."""
    for over in ("rows", "merged"):
        both = [line for line in lines if {"tree", over} <= line["arms"].keys()]
        if not both or (over == "merged" and is_same(both[-1]) and any("rows" in line["arms"] for line in lines)):
            continue
        commits = TWO_PROCESSES.get((both[-1]["workload"], over))
        if commits is None:
            yield both[-1], both[-1], over
        else:
            tree, other = (
                next(line for line in lines if line["machine"]["commit"] == commit and arm in line["arms"])
                for commit, arm in zip(commits, ("tree", over), strict=True)
            )
            yield tree, other, over


def is_same(line: Line) -> bool:
    """Whether merging merges nothing."""
    limits = line["flop_limit"]
    return "rows" in limits and limits["rows"] == limits["merged"]


def gpu_rows(lines: Sequence[Line], *, recompute: bool) -> Iterator[str]:
    for workload in GPU_ORDER:
        found = [
            line
            for line in lines
            if line["workload"] == workload and line["recompute"] == recompute and not line.get("keep_attention")
        ]
        for tree, other, over in pairs(found):
            name = NAMES.get(workload, f"`{workload}`") + ("" if recompute else ", no recomputation")
            goal = GPU_GOALS.get(workload, "") if recompute else ""
            yield compared(tree, other, over, name, size_of(found, tree), goal=goal)


def size_of(lines: Sequence[Line], tree: Line) -> str:
    tokens = next((line["arms"]["rows"]["rows"] for line in lines if "rows" in line["arms"]), None)
    before = "" if tokens is None else f"{tokens:,} "
    return f"{before}-> {tree['arms']['tree']['rows']:,}"


def compared(tree: Line, other: Line, over: str, name: str, size: str, *, goal: str) -> str:
    ours, theirs = tree["arms"]["tree"], other["arms"][over]
    letter = {"rows": "A = B" if is_same(other) else "A", "merged": "B"}[over]
    limit = theirs["tflops"] / ours["tflops"]
    together = tree is other
    speedup = tree["speedup"][over] if together else theirs["median_s"] / ours["median_s"]
    alone = theirs["median_s"] / (ours["median_s"] - ours["prepare_s"]) / limit
    if together and tree.get("step_efficiency"):
        alone = tree["step_efficiency"][over]
    commits = tree["machine"]["commit"][:7] + ("" if together else f", {letter} {other['machine']['commit'][:7]}")
    cells = (
        name,
        size,
        f"{seconds(ours['median_s'])} s",
        f"{ours['tflops_per_s']:.0f}",
        f"{letter} ({seconds(theirs['median_s'])} s, {theirs['tflops_per_s']:.0f})",
        f"{len(ours['seconds'])} / {len(theirs['seconds'])}",
        ratio(speedup),
        ratio(limit),
        f"{speedup / limit:.3f}",
        f"{alone:.3f}",
        goal,
        commits,
    )
    return "| " + " | ".join(cells) + " |"


def plain_rows() -> Iterator[str]:
    """The tree over transformers without HARTS, which an earlier script timed."""
    lines = read("gpu_step.jsonl")
    plain = next(line for line in lines if line["arm"] == "plain")
    tree = next(
        line
        for line in lines
        if line["arm"] == "tree" and line["workload"] == plain["workload"] and line["commit"] == plain["commit"]
    )
    yield (
        f"| `{plain['workload']}`, over D | {tree['tokens']:,} -> {tree['rows']:,} | {seconds(tree['median_s'])} s | "
        f"{tree['tflop_per_s']:.0f} | D ({seconds(plain['median_s'])} s, {plain['tflop_per_s']:.0f}) | "
        f"{len(tree['seconds'])} / {len(plain['seconds'])} | {ratio(plain['median_s'] / tree['median_s'])} | | | | 8 | "
        f"{plain['commit'][:7]} |"
    )


def expert_rows(lines: Sequence[Line]) -> Iterator[str]:
    for workload in ("star3", "think", "swe", "tau"):
        found = [line for line in lines if line["workload"] == workload]
        for line, _, over in pairs(found):
            ours, theirs = line["arms"]["tree"], line["arms"][over]
            letter = {"rows": "A = B" if is_same(line) else "A", "merged": "B"}[over]
            limit = theirs["tflops"] / ours["tflops"]
            name = NAMES.get(workload, f"`{workload}`")
            yield (
                f"| {name} | {line['layers']} | {seconds(ours['median_s'])} s | {ours['tflops_per_s']:.0f} | "
                f"{letter} ({seconds(theirs['median_s'])} s, {theirs['tflops_per_s']:.0f}) | "
                f"{ratio(line['speedup'][over])} | {ratio(limit)} | {line['speedup'][over] / limit:.3f} | 0.95 | "
                f"{line['machine']['commit'][:7]} |"
            )


def cpu_rows(lines: Sequence[Line]) -> Iterator[str]:
    last = {line["workload"]: line for line in lines}
    for workload, line in last.items():
        rows, tree = line["arms"]["rows"], line["arms"]["tree"]
        yield (
            f"| `{workload}` | {rows['median_s']:.2f} s | {tree['median_s']:.2f} s | {line['speedup']['rows']:.2f} | "
            f"{line['flop_limit']['rows']:.2f} | {line['efficiency']['rows']:.3f} | {CPU_GOALS.get(workload, '')} | "
            f"{rows['rows_per_s']:,.0f} / {tree['rows_per_s']:,.0f} | {line['machine']['commit'][:7]} |"
        )


def seconds(value: float) -> str:
    return f"{value:.2f}" if value < 20 else f"{value:.1f}" if value < 100 else f"{value:.0f}"


def ratio(value: float) -> str:
    return f"{value:.3f}" if value < 1 else f"{value:.2f}" if value < 10 else f"{value:.1f}"


if __name__ == "__main__":
    sys.exit(main())
