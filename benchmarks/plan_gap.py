"""The gap between plans and their lower bound, on real trajectories and on the synthetic workloads.

Every source is planned for budgets of 2, 3, 4 and 8 times its longest trajectory and 1 to 64 replicas. One JSON line a
plan goes to stdout, and at the end a summary: the largest gap and its quantiles over plans of at least 8 slots, and
over those of fewer.

    python benchmarks/plan_gap.py DATA_FOLDER [--cost flops]
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from harts.cost import CostModel
from harts.formats import read
from harts.plan import make_plan
from harts.testing.workloads import WORKLOADS, workload
from harts.trajectory import Trajectory
from harts.tree import PrefixTree
from record import provenance

QWEN35_4B = {
    "model_type": "qwen3_5_text", "vocab_size": 248_320, "hidden_size": 2560, "intermediate_size": 9216,
    "num_hidden_layers": 32, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 256,
    "full_attention_interval": 4, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
}  # fmt: skip
BUDGETS = (2, 3, 4, 8)
REPLICAS = (1, 2, 4, 8, 16, 32, 64)


def sources(folder: Path) -> Iterator[tuple[str, str, list[Trajectory]]]:
    """Name, kind of row, trajectories."""
    for file in sorted(folder.glob("*.jsonl.gz")):
        for rows in ("trajectory", "turn"):
            yield file.name.removesuffix(".jsonl.gz"), rows, read(file, rows=rows)  # type: ignore[arg-type]
    for name, about in WORKLOADS.items():
        if not about.files:
            yield name, "workload", workload(name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--cost", choices=["rows", "flops"], default="rows")
    parser.add_argument("--only", help="only sources of this name")
    args = parser.parse_args()
    cost_model = CostModel.of_rows() if args.cost == "rows" else CostModel.from_config(QWEN35_4B)
    gaps: dict[str, list[float]] = {"at least 8 slots": [], "fewer slots": []}
    about = {"cost": args.cost, **provenance()}
    for name, rows, trajectories in sources(args.folder):
        if args.only and name != args.only:
            continue
        tree = PrefixTree.build(trajectories)
        longest = max(map(len, trajectories))
        for times in BUDGETS:
            for replicas in REPLICAS:
                plan = make_plan(tree, token_budget=times * longest, num_replicas=replicas, cost_model=cost_model)
                gaps["at least 8 slots" if plan.slots >= 8 else "fewer slots"].append(plan.gap)
                line = {
                    "benchmark": "plan_gap", "source": name, "rows": rows, "unique_rows": tree.num_rows,
                    "longest": longest, "budget_over_longest": times, "replicas": replicas, "slots": plan.slots,
                    "gap": round(plan.gap, 4), "recomputed_share": round(plan.recomputed_rows / plan.unique_rows, 4),
                    "idle_fraction": round(plan.idle_fraction, 4), "plan_s": round(plan.plan_s, 3),
                }  # fmt: skip
                print(json.dumps(line), flush=True)
    for kind, values in gaps.items():
        quantiles = {f"p{q}": round(float(np.percentile(values, q)), 4) for q in (50, 90, 99, 100)} if values else {}
        over = sum(value > 0.05 for value in values)
        summary = {"benchmark": "plan_gap summary", "plans": kind, "number": len(values), "over_5_percent": over}
        print(json.dumps({**summary, **quantiles, **about}))


if __name__ == "__main__":
    main()
