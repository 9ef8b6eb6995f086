"""Times the tree gated delta rule on a GPU: the whole op against fla-core, and the recurrence against its bounds.

    python benchmarks/ops_gated_delta_rule.py [--out FILE]

Prints one JSON object a line, with the GPU, versions, commit and command; `--out` appends them to a file too. Shapes
are those of Qwen3.5-4B: 16 key heads, 32 value heads, K = V = 128, bfloat16. Times are medians in milliseconds.

- op: forward and backward of `star3` against fla-core's `chunk_gated_delta_rule` on one sequence of as many rows, and
  on the rows of all trajectories packed; `ratio` is per row, the goal is 1.05 against one sequence.
- recurrence: forward and backward recurrence of a tree alone, against the larger of its longest path alone and as many
  rows in 64 equal sequences; the goal is 1.3. (One launch a round instead of one for all was slower everywhere: the
  lines with "rounds" in results/ are of commit e834267, the last that could do it.)
- kernels: each kernel of the op by itself, from PyTorch's profiler.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton
from torch import Tensor
from triton.testing import do_bench

from harts.blocks import BLOCK, Blocks
from harts.layout import PackedTree, pack
from harts.ops.gated_delta_rule.triton import (
    gated_delta_rule_triton,
    make_launch_plan,
    run_blocks,
    run_state_gradients,
    run_states,
)
from harts.testing.workloads import workload
from harts.trajectory import Trajectory
from harts.tree import PrefixTree

HEADS, GROUPS, SIZE = 16, 32, 128
RECURRENCES: dict[str, dict[str, int]] = {
    "star3": {},
    "think": {"rollouts": 4, "turns": 20},
    "swe": {"rollouts": 2, "turns": 30},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="file to append the lines to")
    parser.add_argument("parts", nargs="*", default=["op", "recurrence", "kernels"], help="which parts to run")
    arguments = parser.parse_args()
    run = {"op": time_op, "recurrence": time_recurrences, "kernels": time_kernels}
    about = describe_run()
    for part in arguments.parts:
        for line in run[part]():
            text = json.dumps({"benchmark": "ops_gated_delta_rule", "part": part, **line, **about})
            print(text, flush=True)
            if arguments.out:
                with arguments.out.open("a") as file:
                    file.write(text + "\n")


def describe_run() -> dict[str, str]:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    try:
        import fla

        fla_version = fla.__version__
    except ImportError:
        fla_version = "none"
    return {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "fla": fla_version,
        "commit": commit.stdout.strip() or "unknown",
        "command": " ".join(sys.argv),
    }


def make_inputs(rows: int) -> list[Tensor]:
    """q, k, v, g and beta; a token keeps 90 to 99.9 % of the state."""
    generator = torch.Generator("cuda").manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, device="cuda", generator=generator)

    decay = 1 - torch.rand(rows, GROUPS, device="cuda", generator=generator) * 0.099 - 1e-3
    q, k, v = (draw(rows, heads, SIZE).bfloat16() for heads in (HEADS, HEADS, GROUPS))
    return [q, k, v, decay.log(), draw(rows, GROUPS).sigmoid().bfloat16()]


def median_ms(run: Callable[[], object], repeat_ms: int = 100) -> float:
    return float(do_bench(run, warmup=25, rep=repeat_ms, return_mode="median"))


# -- the whole op ------------------------------------------------------------------------------------------------------


def time_op() -> Iterator[dict[str, Any]]:
    trajectories = workload("star3")
    packed = pack(PrefixTree.build(trajectories), device="cuda")
    separate = sum(len(trajectory) for trajectory in trajectories)
    one = time_fla([packed.num_rows])
    yield {"case": "fla, one sequence", "rows": packed.num_rows, **one}
    yield {"case": "fla, packed rows", "rows": separate, **time_fla([len(trajectory) for trajectory in trajectories])}
    ours = time_ours(packed)
    ratios = {f"ratio_{name}": ours[f"{name}_ms"] / one[f"{name}_ms"] for name in ("forward", "both")}
    yield {"case": "tree", "rows": packed.num_rows, **ours, **ratios}
    yield {"case": "tree, recompute", "rows": packed.num_rows, **time_ours(packed, recompute=True)}
    path = pack(PrefixTree.build([make_path(packed.num_rows)]), device="cuda")
    yield {"case": "ours, one sequence", "rows": packed.num_rows, **time_ours(path)}


def time_ours(packed: PackedTree, **options: bool) -> dict[str, float]:
    inputs = [x.requires_grad_() for x in make_inputs(packed.num_rows)]
    return time_both(lambda: gated_delta_rule_triton(*inputs, packed, **options), inputs)


def time_fla(lengths: Sequence[int]) -> dict[str, float]:
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    inputs = [x.unsqueeze(0).requires_grad_() for x in make_inputs(sum(lengths))]
    ends = torch.tensor([0, *np.cumsum(lengths).tolist()], dtype=torch.int32, device="cuda")
    return time_both(lambda: chunk_gated_delta_rule(*inputs, use_qk_l2norm_in_kernel=True, cu_seqlens=ends)[0], inputs)


def time_both(forward: Callable[[], Tensor], inputs: list[Tensor]) -> dict[str, float]:
    do = torch.randn_like(forward().detach())
    with torch.no_grad():
        forward_ms = median_ms(forward)
    return {
        "forward_ms": forward_ms,
        "both_ms": median_ms(lambda: torch.autograd.grad(forward(), inputs, do), 200),
    }


# -- the recurrence ----------------------------------------------------------------------------------------------------


def time_recurrences() -> Iterator[dict[str, Any]]:
    for name, sizes in RECURRENCES.items():
        packed = pack(PrefixTree.build(workload(name, **sizes)), device="cuda")
        cut = Blocks.of(packed.chains)
        longest, rows = cut.longest_path * BLOCK, cut.num_blocks * BLOCK
        path = time_recurrence(pack_rows([longest]))
        even = time_recurrence(pack_rows([rows // 64] * 64))
        ours = time_recurrence(packed)
        bounds = {key: max(path[key], even[key]) for key in ours}
        yield {
            "case": name,
            "chains": packed.chains.num_chains,
            "blocks": cut.num_blocks,
            "longest_path_blocks": cut.longest_path,
            **ours,
            **{f"longest_path_{key}": value for key, value in path.items()},
            **{f"equal_sequences_{key}": value for key, value in even.items()},
            **{f"ratio_{key.removesuffix('_ms')}": ours[key] / bounds[key] for key in ours},
        }


def make_path(rows: int, seed: int = 0) -> Trajectory:
    token_ids = np.random.default_rng(seed).integers(0, 50_000, rows).astype(np.int32)
    return Trajectory(token_ids=token_ids, loss_mask=np.arange(rows) > 0)


def pack_rows(lengths: Iterable[int]) -> PackedTree:
    trajectories = [make_path(length, seed) for seed, length in enumerate(lengths)]
    return pack(PrefixTree.build(trajectories, share="none"), device="cuda")


def time_recurrence(packed: PackedTree) -> dict[str, float]:
    q, k, v, g, beta = make_inputs(packed.num_rows)
    plan = make_launch_plan(q, v, packed)
    blocks, _ = run_blocks(q, k, v, g, beta, None, plan)
    u, do, local = (torch.randn_like(blocks.written) for _ in range(3))
    forward_ms = median_ms(lambda: run_states(blocks.k_unit, blocks.w, u, blocks.gamma, plan))
    backward_ms = median_ms(lambda: run_state_gradients(blocks, do, local, plan))
    return {"forward_ms": forward_ms, "backward_ms": backward_ms}


# -- kernel by kernel --------------------------------------------------------------------------------------------------


def time_kernels() -> Iterator[dict[str, Any]]:
    packed = pack(PrefixTree.build(workload("star3")), device="cuda")
    inputs = [x.requires_grad_() for x in make_inputs(packed.num_rows)]
    do = torch.randn_like(inputs[2])
    runs = 5

    def run() -> None:
        torch.autograd.grad(gated_delta_rule_triton(*inputs, packed)[0], inputs, do)

    run()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(runs):
            run()
        torch.cuda.synchronize()
    for event in sorted(profile.key_averages(), key=lambda event: -event.device_time_total):
        yield {"case": event.key[:80], "launches": event.count / runs, "ms": event.device_time_total / 1e3 / runs}


if __name__ == "__main__":
    main()
