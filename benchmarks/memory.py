"""Asked, predicted and real peak memory of trees in pieces, on random trees and workloads: JSON lines.

    python benchmarks/memory.py --out memory.jsonl

On a CPU tensors are counted op by op, so models are tiny; on a GPU the allocator counts.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

import harts
from harts.models import recompute_activations, tiny_model
from harts.models.memory import choose_one_sweep, choose_two_sweeps
from harts.models.memory.meter import Meter, allocated_bytes, parameter_bytes
from harts.models.scorer import Scorer
from harts.models.streaming import in_one_sweep, in_two_sweeps
from harts.testing.environment import environment
from harts.testing.trees import random_trajectories
from harts.testing.workloads import workload
from harts.trajectory import Trajectory

SHARES = (0.3, 0.5, 0.8, 1.5)
"""Of what the tree takes whole, beside the model."""


def batches(random: int) -> Iterator[tuple[str, list[Trajectory]]]:
    for name in ("star3", "flat", "search"):
        yield name, workload(name, scale=0.03, vocab_size=200)
    for seed in range(random):
        yield f"random {seed}", random_trajectories(np.random.default_rng(seed), max_length=200 + 40 * (seed % 10))


def peak(model: torch.nn.Module, device: torch.device, run: Callable[[], object]) -> int:
    model.zero_grad()
    resident = allocated_bytes(device) or parameter_bytes(model)
    with Meter(device) as meter:
        run()
    return resident + meter.peak


def measure(model: torch.nn.Module, packed: harts.PackedTree, share: float, whole: int) -> Iterator[dict[str, Any]]:
    resident = allocated_bytes(packed.device) or parameter_bytes(model)
    memory = resident + int(share * (whole - resident))
    for sweeps, choose in (("two", choose_two_sweeps), ("one", choose_one_sweep)):
        model.zero_grad()
        line: dict[str, Any] = {"rows": packed.num_rows, "sweeps": sweeps, "whole": whole, "asked": memory}
        try:
            choice = choose(Scorer(model, packed, None, {}), packed, memory, None)
        except ValueError as error:
            yield line | {"refused": str(error).split(",")[0]}
            continue

        def run(choice: Any = choice, sweeps: str = sweeps) -> None:
            if sweeps == "two":
                in_two_sweeps(choice.stream, choice.keep).logprobs_N.sum().backward()
            else:
                in_one_sweep(choice.stream, lambda _, scores: scores.logprobs_N.sum(), choice.keep)

        line |= {"pieces": len(choice.stream.pieces), "kept": len(choice.keep), "rows_again": choice.rows_again}
        yield line | {"predicted": choice.peak_bytes, "peak": peak(model, packed.device, run)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default="tiny-qwen3.5,tiny-qwen3,tiny-lfm2")
    parser.add_argument("--random", type=int, default=16, help="random trees a model")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    device = torch.device(options.device)
    about = {
        "what": "memory",
        **environment(),
        "command": " ".join(["python", *sys.argv]),
    }
    with options.out.open("w") as file:
        for name in options.models.split(","):
            for recompute in (False, True):
                model = harts.attach(tiny_model(name).to(device))
                if recompute:
                    recompute_activations(model)
                ratios: list[tuple[float, float]] = []
                for batch, trajectories in batches(options.random):
                    packed = harts.pack(harts.PrefixTree.build(trajectories), device=device)
                    whole = peak(model, device, lambda p=packed, m=model: harts.logprobs(m, p).sum().backward())
                    model.zero_grad()
                    for share in SHARES:
                        for line in measure(model, packed, share, whole):
                            of = {"model": name, "recompute": recompute, "batch": batch, "share": share}
                            print(json.dumps(about | of | line), file=file, flush=True)
                            if "peak" in line:
                                ratios.append((line["peak"] / line["asked"], line["peak"] / line["predicted"]))
                asked, predicted = np.array(ratios).T
                print(
                    f"{name}, recompute {recompute}: {len(ratios)} runs, peak over asked at most {asked.max():.3f}, "
                    f"over predicted {predicted.min():.3f} to {predicted.max():.3f}, median {np.median(predicted):.3f}",
                    file=sys.stderr,
                )


if __name__ == "__main__":
    main()
