"""Times training steps of a model of a shape of Qwen3.5 on a CUDA GPU: tree, merged rows, packed rows, plain.

    python benchmarks/gpu_step.py star3 grpo think:rollouts=4 --out benchmarks/results/gpu_step.jsonl
    python benchmarks/gpu_step.py star3 think swe tau --shape qwen3.5-35b-a3b --layers 24 --out results.jsonl

Workloads run one after the other, arms too; each arm adds one line to the file, and lines that are there already (same
workload, arm, setting and commit) are not measured again. `--seconds` stops before an arm that would not fit.
"""

import argparse
import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from harts.cost import count
from harts.flops import flops
from harts.models.attach import find_backbone
from harts.ops.kernels import Kernels
from harts.testing.gpu_step import (
    Setting,
    environment,
    gradient_errors,
    profiled,
    summarise,
    time_arm,
)
from harts.testing.shapes import SHAPES, build_model
from harts.testing.workloads import remap_vocabulary, workload
from harts.trajectory import Trajectory
from harts.tree import PrefixTree


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="+", help="names of harts.testing.workloads, sizes as name:size=number,...")
    parser.add_argument("--arms", nargs="+", default=["tree", "merged", "rows"])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shape", choices=list(SHAPES), default="qwen3.5-4b")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--attention", default=None, help="varlen or fa4; the fastest installed if not given")
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--no-recompute", action="store_true")
    parser.add_argument("--no-fuse", action="store_true")
    parser.add_argument("--chunk-rows", type=int, default=None)
    parser.add_argument(
        "--token-budget",
        type=int,
        default=None,
        help="default: the rows of the tree and its replayed rows, at least 65,536",
    )
    parser.add_argument("--repeats", type=int, default=3, help="of arms that take less than 10 s")
    parser.add_argument("--profile", type=Path, default=None, help="write a table of one tree step's kernels here")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="of the whole run")
    parser.add_argument("--commit", default=None, help="where the checkout has no git, the commit that it is of")
    parser.add_argument("--save", type=Path, default=None, help="write the workloads here as .npz, and stop")
    parser.add_argument("--gradients", action="store_true", help="errors of gradients against fp32, no times")
    arguments = parser.parse_args()
    if arguments.save:
        for name in arguments.workloads:
            save_workload(name, arguments.save)
        return
    deadline = time.monotonic() + arguments.seconds
    about = environment(arguments.commit)
    if arguments.gradients:
        for name in arguments.workloads:
            measure_gradients(name, arguments, about)
        return
    model = build_model({"num_hidden_layers": arguments.layers}, shape=arguments.shape)
    print(f"model built, {sum(p.numel() for p in model.parameters()) / 1e9:.2f} billion parameters", flush=True)
    for name in arguments.workloads:
        measure_workload(model, name, arguments, about, deadline)


def measure_workload(
    model: torch.nn.Module, name: str, arguments: argparse.Namespace, about: dict[str, str], deadline: float
) -> None:
    trajectories = read_workload(name)
    stem = Path(name.partition(":")[0]).stem
    name = stem if name.endswith(".npz") else name
    config = find_backbone(model).config
    trajectories, _ = remap_vocabulary(trajectories)
    tree = PrefixTree.build(trajectories)
    longest = max(len(trajectory) for trajectory in trajectories)
    setting = setting_of(arguments, max(count(tree).linear_rows, longest, 65_536))
    known = [json.loads(line) for line in arguments.out.read_text().splitlines()] if arguments.out.exists() else []
    records: list[dict[str, Any]] = []
    found: dict[str, torch.Tensor] = {}
    for arm in arguments.arms:
        header = {"workload": name, "shape": arguments.shape, "layers": arguments.layers, **about}
        done = [r for r in known if r.get("arm") == arm and is_same(r, header, setting)]
        if done:
            records.append(done[-1])
            continue
        share = {"tree": "tree", "merged": "prefix"}.get(arm, "none")
        work = flops(config, count(PrefixTree.build(trajectories, share=share)), recompute=setting.recompute)
        expected = work / (150e12 if arm == "plain" else 280e12)
        if time.monotonic() + 1.3 * expected > deadline:
            print(f"{name} {arm}: left out, {expected:.0f} s would not fit", flush=True)
            continue
        repeats = arguments.repeats if expected < 10 else 1
        # Arms are checked against packed rows if those ran before, else against the tree.
        baseline_N = found.get("rows", found.get("tree"))
        record, found[arm] = time_arm(
            model, arm, trajectories, setting, repeats=repeats, warm_up=1, baseline_N=baseline_N
        )
        record["checked_against"] = None if baseline_N is None else "rows" if "rows" in found else "tree"
        if record["check"] == "none":
            compare_digests(record, [*known, *records], header)
        records.append({**record, **header})
        with arguments.out.open("a") as file:
            file.write(json.dumps(records[-1]) + "\n")
        shown = ("median_s", "tflop_per_s", "peak_gib", "check", "logprob_max_abs", "bitwise_equal", "microbatches")
        print(name, arm, {key: record.get(key) for key in shown}, flush=True)
        if arguments.profile and arm == "tree":
            with profiled(str(arguments.profile.with_suffix(f".{stem}.txt"))):
                time_arm(model, arm, trajectories, setting, repeats=1, warm_up=0)
        torch.cuda.empty_cache()
    print(name, json.dumps(summarise(records, config, trajectories)), flush=True)


def compare_digests(record: dict[str, Any], others: list[dict[str, Any]], header: dict[str, str]) -> None:
    """An arm with no other to check against in this process may have one in the file."""
    for other in others:
        same = all(other.get(key) == header[key] for key in ("workload", "layers", "gpu"))
        if same and other["arm"] != record["arm"] and other.get("logprob_digest") == record["logprob_digest"]:
            record |= {"check": "passed", "bitwise_equal": 1.0, "logprob_max_abs": 0.0, "checked_against": other["arm"]}


def setting_of(arguments: argparse.Namespace, token_budget: int) -> Setting:
    kernels = Kernels.fastest(deterministic=arguments.deterministic)
    chosen = {"attention": arguments.attention, "chunk_rows": arguments.chunk_rows}
    return Setting(
        kernels=dataclasses.replace(kernels, **{name: value for name, value in chosen.items() if value is not None}),
        fused=not arguments.no_fuse and arguments.shape == "qwen3.5-4b",  # what is fused is dense
        recompute=not arguments.no_recompute,
        token_budget=arguments.token_budget or token_budget,
    )


def measure_gradients(name: str, arguments: argparse.Namespace, about: dict[str, str]) -> None:
    trajectories, _ = remap_vocabulary(read_workload(name))
    changes = {"num_hidden_layers": arguments.layers}
    errors = gradient_errors(trajectories, setting_of(arguments, 65_536), changes)
    line = {"workload": name, "layers": arguments.layers, **errors, **about}
    print(json.dumps(line), flush=True)
    with arguments.out.open("a") as file:
        file.write(json.dumps(line) + "\n")


def read_workload(name: str) -> list[Trajectory]:
    """A workload by name and sizes, or of a file that `--save` wrote where there is a tokenizer."""
    if name.endswith(".npz"):
        with np.load(name) as file:
            cuts = np.cumsum(file["lengths"])[:-1]
            pieces = zip(np.split(file["token_ids"], cuts), np.split(file["loss_mask"], cuts), strict=True)
            return [Trajectory(token_ids=ids, loss_mask=mask) for ids, mask in pieces]
    stem, _, sizes = name.partition(":")
    return workload(stem, **{key: int(value) for key, value in (s.split("=") for s in sizes.split(",") if s)})


def save_workload(name: str, directory: Path) -> None:
    """Writes the token ids and loss masks of a workload, renamed to small ids, for a machine without a tokenizer."""
    trajectories, _ = remap_vocabulary(read_workload(name))
    np.savez_compressed(
        directory / f"{name.partition(':')[0]}.npz",
        token_ids=np.concatenate([trajectory.token_ids for trajectory in trajectories]),
        loss_mask=np.concatenate([trajectory.loss_mask for trajectory in trajectories]),
        lengths=np.array([len(trajectory) for trajectory in trajectories]),
    )


def is_same(record: dict[str, Any], header: dict[str, Any], setting: Setting) -> bool:
    same = all(record.get(key) == header[key] for key in ("workload", "layers", "commit", "gpu"))
    same = same and record.get("shape", "qwen3.5-4b") == header["shape"]
    kernels = record["kernels"] == "transformers" or record["kernels"] == vars(setting.kernels)
    return same and kernels and record["recompute"] == setting.recompute


if __name__ == "__main__":
    main()
