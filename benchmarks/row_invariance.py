"""Whether the bits of a row of x @ weight^T depend on how many rows come with it, on a CUDA GPU; JSON Lines.

    python benchmarks/row_invariance.py --out benchmarks/results/row_invariance.jsonl

For the products of Qwen3.5-4B and Qwen3.5-35B-A3B: the numbers of rows at which the first rows have other bits than
within 65,536, and whether the order of the rows matters. `Kernels.min_rows` rests on it; see docs/numerics.md.
"""

import argparse
import json
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import linear

from harts.testing.environment import environment

MOST = 65_536
# fmt: off
ROWS = [
    1, 2, 8, 16, 32, 33, 64, 65, 100, 128, 129, 192, 256, 257, 300, 384, 500, 512, 513, 600, 640, 700, 768, 900, 1000,
    1024, 1025, 1300, 1500, 1536, 2000, 2048, 2100, 2500, 3000, 3072, 4000, 4096, 5000, 6000, 6144, 7000, 8192, 9000,
    10_000, 12_000, 12_288, 14_000, 16_384, 20_000, 24_576, 30_000, 32_768, 40_000, 50_000, 60_000, MOST,
]
# fmt: on
PRODUCTS = {
    "4b: q, or q k v of linear attention": (2560, 8192),
    "4b: k, v": (2560, 1024),
    "4b: o": (4096, 2560),
    "4b: gate of linear attention": (2560, 4096),
    "4b: step sizes": (2560, 32),
    "4b: gate and up": (2560, 9216),
    "4b: down": (9216, 2560),
    "35b: q": (2048, 8192),
    "35b: k, v": (2048, 512),
    "35b: o": (4096, 2048),
    "35b: step sizes": (2048, 32),
    "35b: router": (2048, 256),
    "35b: shared expert, gate and up": (2048, 512),
    "35b: shared expert, down": (512, 2048),
    "35b: gate of the shared expert": (2048, 1),
}
WIDE = ("4b: step sizes", "35b: step sizes", "35b: router", "35b: gate of the shared expert")
EXPERTS = {"35b: experts, gate and up": (2048, 1024), "35b: experts, down": (512, 2048)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    about = environment()
    draw = torch.Generator("cuda").manual_seed(0)
    for dtype, names in ((torch.bfloat16, tuple(PRODUCTS)), (torch.float32, WIDE)):
        for name in names:
            inner, outer = PRODUCTS[name]
            x = torch.randn(MOST, inner, device="cuda", dtype=dtype, generator=draw)
            weight = torch.randn(outer, inner, device="cuda", dtype=dtype, generator=draw) / inner**0.5
            whole = linear(x, weight)
            order = torch.randperm(MOST, device="cuda", generator=draw)
            write(
                arguments.out,
                {
                    "product": name,
                    "dtype": str(dtype).removeprefix("torch."),
                    "in": inner,
                    "out": outer,
                    "rows_that_differ": [n for n in ROWS if not torch.equal(linear(x[:n], weight), whole[:n])],
                    "order_matters": not torch.equal(linear(x[order], weight), whole[order]),
                    **about,
                },
            )
    for name, (inner, outer) in EXPERTS.items():
        x = torch.randn(MOST, inner, device="cuda", dtype=torch.bfloat16, generator=draw)
        weight = torch.randn(256, outer, inner, device="cuda", dtype=torch.bfloat16, generator=draw) / inner**0.5
        expert = torch.randint(0, 256, (MOST,), device="cuda", generator=draw)
        whole = grouped(x, weight, expert)
        differ = [n for n in ROWS if not torch.equal(grouped(x[:n], weight, expert[:n]), whole[:n])]
        line = {"product": name, "dtype": "bfloat16", "in": inner, "out": outer, "rows_that_differ": differ}
        write(arguments.out, {**line, **about})


def grouped(x_TD: Tensor, weight_EOD: Tensor, expert_T: Tensor) -> Tensor:
    """Each row times its expert's weight, by one grouped product."""
    order = expert_T.sort(stable=True).indices
    ends = torch.bincount(expert_T, minlength=len(weight_EOD)).cumsum(0).int()
    out = torch._grouped_mm(x_TD[order], weight_EOD.mT, offs=ends)
    back = torch.empty_like(out)
    back[order] = out
    return back


def write(path: Path, line: dict[str, object]) -> None:
    print(json.dumps(line), flush=True)
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
