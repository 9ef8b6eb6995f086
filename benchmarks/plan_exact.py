"""Plans against an exact search, on random forests of up to 12 leaves with deep shared prefixes, one replica.

The exact least total of rows comes from a dynamic programme over all sets of leaves: 3^leaves steps, which is why this
is no test. One JSON line goes to stdout: quantiles of rows of the plan / rows of the best partition, and of the best
partition / lower bound.

    python benchmarks/plan_exact.py --forests 400
"""

import argparse
import json
import time

import numpy as np
from numpy.typing import NDArray

from harts.blocks import BLOCK
from harts.plan import lower_bound, make_plan
from harts.plan.leaves import Leaves
from harts.testing.trees import to_trajectories
from harts.trajectory import Trajectory
from harts.tree import PrefixTree
from record import provenance

NEVER = 2**60


def random_forest(rng: np.random.Generator, leaves: int) -> list[Trajectory]:
    """One to three trees; every node has 2 to 5 children and a segment of mostly up to 300, else up to 2,000 tokens."""
    rows: list[NDArray[np.int64]] = []

    def grow(path: NDArray[np.int64], below: int) -> None:
        longest = 300 if rng.random() < 0.7 else 2000
        path = np.concatenate([path, rng.integers(0, 2**31, rng.integers(1, longest))])
        if below == 1:
            rows.append(path)
            return
        for part in split(below, int(rng.integers(2, min(below, 5) + 1))):
            grow(path, part)

    def split(total: int, parts: int) -> list[int]:
        cuts = np.sort(rng.choice(np.arange(1, total), parts - 1, replace=False))
        return list(np.diff([0, *cuts, total]).tolist())

    for part in split(leaves, int(rng.integers(1, 4))):
        grow(np.zeros(0, np.int64), part)
    return to_trajectories(rng, rows)


def fewest_rows(leaves: Leaves, budget: int) -> int:
    """Least total rows over all partitions of the leaves into microbatches within the budget."""
    number = leaves.num_leaves
    rows, fed = np.zeros(2**number, np.int64), np.zeros(2**number, np.int64)
    highest = np.full(2**number, -1)
    common = leaves.common_L.tolist()
    for leaf in range(number):  # sets whose last leaf this is, from those without it
        shared = np.array([0] + [min(common[other + 1 : leaf + 1]) for other in range(leaf)])[highest[: 2**leaf] + 1]
        own = int(leaves.length_L[leaf])
        here = slice(2**leaf, 2 ** (leaf + 1))
        rows[here] = rows[: 2**leaf] + own - shared
        fed[here] = fed[: 2**leaf] + own - shared // BLOCK * BLOCK
        highest[here] = leaf
    cost = np.where(fed <= budget, rows, NEVER)
    best = np.zeros(2**number, np.int64)
    for chosen in range(1, 2**number):
        lowest = chosen & -chosen
        rest = chosen ^ lowest
        subsets = np.zeros(1, np.int64)
        for leaf in range(number):
            if rest >> leaf & 1:
                subsets = np.concatenate([subsets, subsets | 1 << leaf])
        best[chosen] = (cost[subsets | lowest] + best[rest ^ subsets]).min()
    return int(best[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--forests", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rng = np.random.default_rng(args.seed)
    over_best, over_bound = [], []
    start = time.perf_counter()
    for _ in range(args.forests):
        tree = PrefixTree.build(random_forest(rng, int(rng.integers(5, 13))))
        budget = int(max(map(len, tree.trajectories)) * rng.choice([1.0, 1.1, 1.2, 1.5, 2.0, 3.0]))
        best = fewest_rows(Leaves.of(tree), budget)
        plan = make_plan(tree, token_budget=budget)
        over_best.append((plan.unique_rows + plan.recomputed_rows) / best)
        over_bound.append(best / lower_bound(tree, token_budget=budget))
    result = {
        "benchmark": "plan_exact",
        "forests": args.forests,
        "seconds": round(time.perf_counter() - start, 1),
        **{f"plan_over_best_p{q}": round(float(np.percentile(over_best, q)), 5) for q in (50, 90, 99, 100)},
        "plans_that_are_best": sum(ratio == 1.0 for ratio in over_best),
        **{f"best_over_bound_p{q}": round(float(np.percentile(over_bound, q)), 5) for q in (50, 90, 99, 100)},
        **provenance(),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
