"""How often a mixture of experts runs a token on other experts on the tree than on packed rows, and twice the same.

    python benchmarks/moe_routes.py star3 think --layers 8 --out benchmarks/results/moe_routes.jsonl

A model of Qwen3.5-35B-A3B's shape with random weights, in bf16 and fp32, with routers as they are and in exact mode
(fp32, ties by index). Adds one line for each. In fp32 the ops are the plain ones, as the fast kernels are for bf16.
"""

import argparse
import dataclasses
import json
from pathlib import Path

import torch

from harts.ops.kernels import Kernels
from harts.testing.environment import environment
from harts.testing.routes import route_stability
from harts.testing.shapes import build_model
from harts.testing.workloads import workload
from harts.vocabulary import remap_vocabulary


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="+", help="names of harts.testing.workloads")
    parser.add_argument("--scale", type=float, default=0.25, help="of their lengths: a batch is one microbatch here")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--commit", default=None, help="where the checkout has no git, the commit that it is of")
    arguments = parser.parse_args()
    about = {"layers": arguments.layers, "scale": arguments.scale, **environment(arguments.commit)}
    for dtype in (torch.bfloat16, torch.float32):
        changes = {"num_hidden_layers": arguments.layers}
        model = build_model(changes, shape="qwen3.5-35b-a3b", device=arguments.device, dtype=dtype).eval()
        plain = Kernels(min_rows=Kernels.fastest().min_rows)
        kernels = Kernels.fastest() if dtype == torch.bfloat16 else plain
        for name in arguments.workloads:
            trajectories, _ = remap_vocabulary(workload(name, scale=arguments.scale))
            for exact in (False, True):
                found = route_stability(model, trajectories, kernels=kernels, exact=exact)
                line = {"workload": name, **dataclasses.asdict(found), "kernels": vars(kernels), **about}
                print(json.dumps(line), flush=True)
                with arguments.out.open("a") as file:
                    file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
