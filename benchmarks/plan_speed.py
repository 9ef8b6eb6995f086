"""How long planning takes: groups x 16 trajectories with a shared prompt, rows growing, 64 replicas.

Each group has a prompt of 1,500 tokens; each of its 16 trajectories branches off the prompt or off an earlier one and
adds 300 to 1,500 tokens. One JSON line a size goes to stdout: seconds of the wall and of the processor for `make_plan`
(the tree is built before).

    python benchmarks/plan_speed.py --groups 8 16 32 64 128 256 640
"""

import argparse
import json
import time

import numpy as np

from harts.plan import make_plan
from harts.testing.trees import to_trajectories
from harts.tree import PrefixTree
from record import provenance


def build_tree(groups: int, seed: int = 0) -> PrefixTree:
    """A forest of `groups` trees of 16 trajectories each."""
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(groups):
        prompt = rng.integers(0, 50_000, 1500)
        group: list[np.ndarray] = []
        for _ in range(16):
            base = group[rng.integers(len(group))] if group and rng.random() < 0.5 else prompt
            kept = base[: rng.integers(len(prompt), len(base) + 1)]
            group.append(np.concatenate([kept, rng.integers(0, 50_000, rng.integers(300, 1500))]))
        rows += group
    return PrefixTree.build(to_trajectories(rng, rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, nargs="+", default=[8, 16, 32, 64, 128, 256, 640])
    parser.add_argument("--replicas", type=int, default=64)
    parser.add_argument("--token-budget", type=int, default=16_384)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    about = provenance()
    for groups in args.groups:
        tree = build_tree(groups)
        wall, cpu = [], []
        for _ in range(args.repeats):
            start = time.perf_counter(), time.process_time()
            plan = make_plan(tree, token_budget=args.token_budget, num_replicas=args.replicas)
            wall.append(time.perf_counter() - start[0])
            cpu.append(time.process_time() - start[1])
        result = {
            "benchmark": "plan_speed",
            "groups": groups,
            "trajectories": tree.num_trajectories,
            "tokens": tree.num_tokens,
            "rows": tree.num_rows,
            "replicas": args.replicas,
            "token_budget": args.token_budget,
            "slots": plan.slots,
            "gap": round(plan.gap, 4),
            "best_wall_s": round(min(wall), 4),
            "best_cpu_s": round(min(cpu), 4),
            **about,
        }
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
