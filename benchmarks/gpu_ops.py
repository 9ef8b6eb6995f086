"""Times the ops of one Qwen3.5-4B layer and head on a CUDA GPU, over the tree of a workload; JSON Lines.

    python benchmarks/gpu_ops.py --out benchmarks/results/gpu_ops.jsonl [--only attention] [--workload star3]

Every line has the GPU, versions and the command. `floor_ms` is the time of the bytes that must move at 4.3 TB/s (what
a copy reaches on an H200), or of the FLOPs at 790 TFLOP/s (what a large matrix product reaches there).
"""

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from harts.cli.options import parse_workloads
from harts.layout import PackedTree, pack
from harts.ops import attention, causal_conv1d, fused, row_logprobs
from harts.ops.attention import branches, default_impl
from harts.ops.attention.calls import forward_calls
from harts.ops.attention.fa4 import FlashAttention4, has_fa4
from harts.ops.rows import group_rows, segment_sum
from harts.testing.environment import environment
from harts.testing.workloads import workload
from harts.tree import PrefixTree

BYTES_PER_MS, FLOPS_PER_MS = 4.3e9, 790e9
HIDDEN, MIDDLE, VOCABULARY = 2560, 9216, 248_320
CASES: dict[str, Callable[[PackedTree], Iterator[dict[str, Any]]]] = {}


def case(maker: Callable[[PackedTree], Iterator[dict[str, Any]]]) -> Callable[[PackedTree], Iterator[dict[str, Any]]]:
    CASES[maker.__name__] = maker
    return maker


def draw(*shape: int, scale: float = 1.0) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16) * scale


def median_ms(run: Callable[[], object], repeats: int = 9) -> float:
    """Median over repeats, after two runs that compile and warm up; the cache is overwritten before each."""
    cache = torch.empty(2**28, dtype=torch.uint8, device="cuda")
    for _ in range(2):
        run()
    times = []
    for _ in range(repeats):
        cache.zero_()
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop))
    return sorted(times)[len(times) // 2]


def timed(name: str, op: Callable[..., Any], inputs: list[Tensor], repeats: int = 9, **more: Any) -> dict[str, Any]:
    """Forward, and forward + backward with the gradients of all inputs."""
    leaves = [x.requires_grad_() for x in inputs]
    with torch.no_grad():
        forward = median_ms(lambda: op(*leaves), repeats)

    def both() -> None:
        out = op(*leaves)
        out = out[0] if isinstance(out, tuple) else out
        torch.autograd.grad(out, leaves, torch.ones_like(out))

    total = median_ms(both, repeats)
    return {"op": name, "forward_ms": round(forward, 3), "both_ms": round(total, 3), **more}


def floor_of_bytes(tensors_read_and_written: int, rows: int, width: int) -> float:
    return round(2 * tensors_read_and_written * rows * width / BYTES_PER_MS, 3)


@case
def conv(packed: PackedTree) -> Iterator[dict[str, Any]]:
    rows = packed.num_rows
    inputs = [draw(rows, 8192), draw(8192, 4)]
    for impl in ("triton", "reference"):
        op = lambda x, w, impl=impl: causal_conv1d(x, w, None, packed, impl=impl)  # noqa: E731
        yield timed("conv", op, inputs, impl=impl, floor_ms=floor_of_bytes(2 + 3, rows, 8192))


@case
def elementwise(packed: PackedTree) -> Iterator[dict[str, Any]]:
    rows = packed.num_rows
    angles = [draw(rows, 64), draw(rows, 64)]
    for impl in ("triton", "reference"):
        options: Any = {"impl": impl}
        ops: list[tuple[str, Callable[..., Any], list[Tensor], int, int]] = [
            (
                "rms_norm",
                lambda x, w, o=options: fused.rms_norm(x, w, eps=1e-6, zero_centred=True, **o),
                [draw(rows, HIDDEN), draw(HIDDEN)],
                5,
                HIDDEN,
            ),
            (
                "gated_rms_norm",
                lambda x, g, w, o=options: fused.gated_rms_norm(x, g, w, eps=1e-6, **o),
                [draw(rows * 32, 128), draw(rows * 32, 128), draw(128)],
                8,
                4096,
            ),
            (
                "swiglu",
                lambda g, u, o=options: fused.swiglu(g, u, **o),
                [draw(rows, MIDDLE), draw(rows, MIDDLE)],
                8,
                MIDDLE,
            ),
            (
                "sigmoid_gate",
                lambda x, g, o=options: fused.sigmoid_gate(x, g, **o),
                [draw(rows, 16, 256), draw(rows, 16, 512)[..., 256:]],
                8,
                4096,
            ),
            ("rotary", lambda x, o=options: fused.rotary(x, *angles, **o), [draw(rows, 16, 256)], 4, 4096),
        ]
        for name, op, inputs, tensors, width in ops:
            yield timed(name, op, inputs, impl=impl, floor_ms=floor_of_bytes(tensors, rows, width))


@case
def rows(packed: PackedTree) -> Iterator[dict[str, Any]]:
    """The gather of keys, and two ways of adding their gradients."""
    index = forward_calls(packed)[0].keys
    if isinstance(index, slice):
        return
    values, x = draw(len(index), 4, 256), draw(packed.num_rows, 4, 256)
    groups = group_rows(index, packed.num_rows)
    floor = floor_of_bytes(1, len(index) + packed.num_rows, 1024)
    for name, run in (
        ("segment_sum", lambda: segment_sum(values, groups)),
        ("index_add_", lambda: torch.zeros_like(x).index_add_(0, index, values)),
        ("index_select", lambda: x.index_select(0, index)),
    ):
        yield {"op": name, "forward_ms": round(median_ms(run), 3), "floor_ms": floor, "keys": len(index)}


@case
def head(packed: PackedTree) -> Iterator[dict[str, Any]]:
    hidden, weight = draw(packed.num_rows, HIDDEN), draw(VOCABULARY, HIDDEN, scale=0.02)
    head_rows = len(packed.head_row_U)
    flops = 2 * head_rows * HIDDEN * VOCABULARY
    for impl, chunk in [("triton", 2048), ("triton", 3328), ("triton", 4096), ("triton", 6656), ("chunked", 4096)]:
        if chunk > 4096 and head_rows < chunk:
            continue
        op = lambda h, w, impl=impl, chunk=chunk: row_logprobs(h, w, packed, chunk_rows=chunk, impl=impl)  # noqa: E731
        torch.cuda.reset_peak_memory_stats()
        line = timed("head", op, [hidden, weight], repeats=3, impl=impl, chunk_rows=chunk, head_rows=head_rows)
        # a product forward and three backward, one of them the forward's again
        tflops = 4 * flops / line["both_ms"] / 1e9
        yield {
            **line,
            "floor_ms": round(4 * flops / FLOPS_PER_MS, 3),
            "tflops_of_4_products": round(tflops, 1),
            "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2),
        }


@case
def attend(packed: PackedTree) -> Iterator[dict[str, Any]]:
    rows = packed.num_rows
    pairs = int((packed.position_T + 1).sum())
    inputs = [draw(rows, 16, 256), draw(rows, 4, 256), draw(rows, 4, 256)]
    flops = 4 * pairs * 16 * 256 * 3.5  # backward: 5 products to the forward's 2
    for impl in ("varlen", *(("fa4",) if has_fa4() else ())):
        for deterministic in (False, True):
            op = lambda *x, impl=impl, d=deterministic: attention(  # noqa: E731
                *x, packed, scale=256**-0.5, impl=impl, deterministic=d
            )
            line = timed("attention", op, inputs, repeats=5, impl=impl, deterministic=deterministic)
            yield {
                **line,
                "floor_ms": round(flops / FLOPS_PER_MS, 3),
                "tflops": round(flops / line["both_ms"] / 1e9, 1),
            }


@case
def attend_backward(packed: PackedTree) -> Iterator[dict[str, Any]]:
    """What a pass over a query has to save for a branch to run by itself; see `harts.ops.attention.branches`."""
    rows, chosen = packed.num_rows, (branches.QUERY_COST, branches.GATHERED_QUERY_COST)
    inputs = [draw(rows, 16, 256), draw(rows, 4, 256), draw(rows, 4, 256)]
    pairs = int((packed.position_T + 1).sum())
    gaps = FlashAttention4(inputs[0], inputs[2]).leaves_gaps if default_impl() == "fa4" else False
    try:
        for cost in (0.0, 0.6, 1.2, 2.4, float("inf")):
            branches.QUERY_COST = branches.GATHERED_QUERY_COST = cost
            fresh = dataclasses.replace(packed)  # plans are kept per layout
            calls = [call for stage in branches.plan_backward(fresh, gaps=gaps).stages for call in stage.calls]
            op = lambda *x, fresh=fresh: attention(*x, fresh, scale=256**-0.5, impl=default_impl())  # noqa: E731
            line = timed("attention", op, inputs, repeats=5, impl=default_impl(), query_cost=str(cost))
            backward_ms = line["both_ms"] - line["forward_ms"]
            yield {
                **line,
                "calls": len(calls),
                "queries": sum(call.num_queries for call in calls),
                "keys": sum(call.num_keys for call in calls),
                "backward_tflops": round(4 * pairs * 16 * 256 * 2.5 / backward_ms / 1e9, 1),
            }
    finally:
        branches.QUERY_COST, branches.GATHERED_QUERY_COST = chosen


@case
def products(packed: PackedTree) -> Iterator[dict[str, Any]]:
    """Whether a row's bits depend on the number of rows, and what an odd number of rows costs the weight gradient."""
    rows = packed.num_rows
    for inner, outer in [
        (HIDDEN, 8192),
        (HIDDEN, 4096),
        (HIDDEN, MIDDLE),
        (MIDDLE, HIDDEN),
        (4096, HIDDEN),
        (HIDDEN, 32),
        (HIDDEN, VOCABULARY),
    ]:
        most = rows if outer != VOCABULARY else 4096
        x, weight = draw(most, inner), draw(outer, inner, scale=0.02)
        whole = x @ weight.mT
        differ = []
        for count in (1, 2, 7, 16, 33, 64, 100, 128, 200, 256, 384, 512, 777, 1024, 2048, 3072, 4096, 7777, 16_384):
            if count <= most and not torch.equal(x[:count] @ weight.mT, whole[:count]):
                differ.append(count)
        yield {"op": "row-invariant product", "in": inner, "out": outer, "rows_that_differ": differ}
    for count in (rows, -(-rows // 64) * 64):
        x, grad = draw(count, HIDDEN), draw(count, MIDDLE)
        milliseconds = median_ms(lambda grad=grad, x=x: grad.mT @ x)
        tflops = round(2 * count * HIDDEN * MIDDLE / milliseconds / 1e9, 1)
        yield {"op": "weight gradient", "rows": count, "forward_ms": round(milliseconds, 3), "tflops": tflops}
    x, grad, total = draw(4096, HIDDEN), draw(4096, VOCABULARY), torch.zeros(VOCABULARY, HIDDEN, device="cuda")
    for name, run in (
        ("bf16 out", lambda: grad.mT @ x),
        ("fp32 out", lambda: torch.mm(grad.mT, x, out_dtype=torch.float32)),
        ("fp32 added", lambda: torch.addmm(total, grad.mT, x, out_dtype=torch.float32, out=total)),
    ):
        milliseconds = median_ms(run, 5)
        tflops = round(2 * 4096 * HIDDEN * VOCABULARY / milliseconds / 1e9, 1)
        yield {"op": f"head's weight gradient, {name}", "forward_ms": round(milliseconds, 3), "tflops": tflops}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True)
    parser.add_argument("--workload", default="star3", help="as harts bench --workloads: names and sizes")
    parser.add_argument("--only", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument("--commit", default=None, help="where the checkout has no git, the commit that it is of")
    arguments = parser.parse_args()
    for name, sizes in parse_workloads(arguments.workload):
        packed = pack(PrefixTree.build(workload(name, **sizes)), device="cuda")
        about = {**environment(arguments.commit), "workload": name, "sizes": dict(sizes), "rows": packed.num_rows}
        for case_name in arguments.only:
            run_case(case_name, packed, about, arguments.out)


def run_case(name: str, packed: PackedTree, about: dict[str, Any], out: str) -> None:
    torch.manual_seed(0)
    try:
        for line in CASES[name](packed):
            print(json.dumps(line), flush=True)
            with open(out, "a") as file:
                file.write(json.dumps({**line, **about}) + "\n")
    except (RuntimeError, ValueError, ImportError) as error:  # one case must not cost the others their run
        print(f"{name}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
    torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
