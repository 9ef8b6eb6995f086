"""A step of a tree in pieces against the same tree whole, on a GPU: seconds, peak memory, bits and gradients.

python benchmarks/gpu_streaming.py --workloads star3,think --out lines.jsonl
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import harts
from harts.chains import row_order
from harts.models.cuts import done_after, kept_in_one_sweep, subtree_starts
from harts.models.fuse import fuse
from harts.models.recompute import keep_activations, recompute_activations
from harts.testing.environment import environment
from harts.testing.shapes import build_model
from harts.testing.workloads import workload
from harts.vocabulary import remap_vocabulary

Step = Callable[[], Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workloads", default="star3")
    parser.add_argument("--arms", default="whole,pieces,one,two")
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--live-rows", type=int, help="of one sweep; left out: the least that keeps every piece")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    changes = {} if options.layers is None else {"num_hidden_layers": options.layers}
    model = fuse(harts.attach(build_model(changes, shape="qwen3.5-4b", dtype=torch.bfloat16, device="cuda")))
    for name in options.workloads.split(","):
        sizes = {"think": {"rollouts": 4}, "swe": {"rollouts": 2, "turns": 30}}.get(name, {})
        trajectories, _ = remap_vocabulary(workload(name, scale=options.scale, seed=0, **sizes))
        measure_workload(model, name, trajectories, options)


def measure_workload(
    model: nn.Module, name: str, trajectories: Sequence[harts.Trajectory], options: argparse.Namespace
) -> None:
    tree = harts.PrefixTree.build(trajectories)
    tree = tree.reordered(row_order(tree))
    share = -1.0 / sum(each.num_trained for each in trajectories)
    live = options.live_rows or least_live_rows(tree)

    def whole() -> Tensor:
        values = harts.logprobs(model, harts.pack(tree, device="cuda"))
        (values.sum() * share).backward()
        return values.detach()

    def two(budget: int) -> Step:
        def step() -> Tensor:
            values = harts.logprobs(model, tree, token_budget=budget)
            (values.sum() * share).backward()
            return values.detach()

        return step

    def one() -> Tensor:
        _, scores = harts.backward(model, tree, lambda _, s: s.logprobs_N.sum() * share, token_budget=live)
        return scores.logprobs_N

    arms: dict[str, tuple[Step, bool, int]] = {
        "whole": (whole, True, tree.num_rows),
        "pieces": (two(8192), False, 8192),
        "one": (one, False, live),
        "two": (two(live), False, live),
    }
    expected: tuple[Tensor, list[Tensor]] | None = None
    for arm in options.arms.split(","):
        step, recompute, rows = arms[arm]
        (recompute_activations if recompute else keep_activations)(model)
        try:
            line, result = measure_arm(model, step, options.turns)
        except torch.cuda.OutOfMemoryError as error:
            line, result = {"error": f"out of memory: {str(error).splitlines()[0][:200]}"}, None
        if result is not None and expected is not None:
            line |= differences(result, expected)
        expected = expected or result
        head = {"workload": name, "arm": arm, "rows": tree.num_rows, "tokens": tree.num_tokens, "most_rows": rows}
        record = {**head, "recompute": recompute, **line, "scale": options.scale, "machine": environment()}
        print(json.dumps(record), flush=True)
        with options.out.open("a") as file:
            file.write(json.dumps(record) + "\n")
        model.zero_grad(set_to_none=True)
        torch.cuda.empty_cache()


def least_live_rows(tree: harts.PrefixTree) -> int:
    """Fewest rows at once with which one sweep keeps every piece, in steps of 2 %."""
    packed, rows = harts.pack(tree), int(tree.depth_T.max()) + 1
    while True:
        pieces = packed.pieces(subtree_starts(tree, rows))
        sizes = [piece.num_rows for piece in pieces]
        if len(kept_in_one_sweep(sizes, done_after(pieces), rows)) == len(sizes):
            return rows
        rows += max(1, rows // 50)


def measure_arm(model: nn.Module, step: Step, turns: int) -> tuple[dict[str, Any], tuple[Tensor, list[Tensor]]]:
    seconds = []
    for turn in range(turns + 1):  # the first one warms up
        model.zero_grad(set_to_none=False)
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()
        start = time.perf_counter()
        values = step()
        torch.cuda.synchronize()
        if turn:
            seconds.append(time.perf_counter() - start)
    peak = torch.cuda.max_memory_allocated()
    grads = [each.grad.to("cpu", copy=True) for each in model.parameters() if each.grad is not None]
    line = {"seconds": seconds, "median_s": statistics.median(seconds), "peak_gib": peak / 2**30}
    return line, (values.cpu(), grads)


def differences(ours: tuple[Tensor, list[Tensor]], theirs: tuple[Tensor, list[Tensor]]) -> dict[str, float]:
    gaps = [
        float((a.cuda().float() - b.cuda().float()).norm() / b.cuda().float().norm().clamp_min(1e-30))
        for a, b in zip(ours[1], theirs[1], strict=True)
    ]
    return {
        "bits_equal": float((ours[0] == theirs[0]).float().mean()),
        "largest_logprob_difference": float((ours[0] - theirs[0]).abs().max()),
        "gradient_gap_median": float(np.median(gaps)),
        "gradient_gap_worst": max(gaps),
    }


if __name__ == "__main__":
    main()
