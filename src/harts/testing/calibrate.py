"""Fits a cost model to this machine: times a model on trees of different length, sharing and width."""

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from harts.cost import CostModel, TimedRun, count, forward_flops, model_identity
from harts.models.attach import find_backbone
from harts.ops.kernels import Kernels
from harts.train.step import LIKELIHOOD, accumulate, plan_step
from harts.trajectory import Trajectory
from harts.tree import PrefixTree

__all__ = ["Calibration", "calibrate"]

_REPEATS = 3


@dataclass(frozen=True)
class Calibration:
    """A fitted cost model and what it was fitted to.

    Attributes:
        cost_model: predicts seconds, and bytes on a GPU.
        runs: what was measured.
        left_out_errors: for each run, |predicted - measured| / measured of a model fitted to the other runs.
    """

    cost_model: CostModel
    runs: tuple[TimedRun, ...]
    left_out_errors: tuple[float, ...]


def calibrate(
    model: nn.Module,
    *,
    max_rows: int = 4096,
    kernels: Kernels | None = None,
    seed: int = 0,
    log: Callable[[str], None] = lambda line: None,
) -> Calibration:
    """Times forward and backward of 18 microbatches and fits the coefficients of a `CostModel` in seconds.

    Args:
        model: attached, as it will be trained (dtype, device, recomputation).
        max_rows: rows of the largest microbatch; it should be near the token budget that will be used.
        kernels: implementations of the ops.
        seed: of the token ids.
        log: receives a line a run.

    Raises:
        ValueError: `max_rows` is below 512.
    """
    if max_rows < 512:
        raise ValueError(f"max_rows: expected at least 512, got {max_rows}; shorter runs measure the overhead alone")
    backbone = find_backbone(model)
    vocabulary = backbone.text.get_input_embeddings().weight.shape[0]  # type: ignore[operator]
    rng = np.random.default_rng(seed)
    runs = []
    for rows, branches, shared in itertools.product((max_rows // 8, max_rows // 3, max_rows), (1, 4, 16), (0.1, 0.7)):
        tree = PrefixTree.build(_star(rng, rows, branches, shared, vocabulary))
        run = _time(model, tree, kernels)
        log(f"{run.counts.rows:,} rows, {run.counts.chains} chains, {run.counts.pairs:,} pairs: {run.seconds:.4f} s")
        runs.append(run)
    name = model_identity(backbone.config)
    errors = []
    for left_out in range(len(runs)):
        others = CostModel.fit(runs[:left_out] + runs[left_out + 1 :], model=name)
        run = runs[left_out]
        errors.append(abs(others.time.of(run.counts) - run.seconds) / run.seconds)
    return Calibration(CostModel.fit(runs, model=name), tuple(runs), tuple(errors))


def _star(rng: np.random.Generator, rows: int, branches: int, shared: float, vocabulary: int) -> Sequence[Trajectory]:
    """A stem of a share of the rows, and branches that split the rest; half of each branch is trained."""
    stem = rng.integers(0, vocabulary, max(int(rows * shared), 2))
    length = max((rows - len(stem)) // branches, 2)
    trajectories = []
    for _ in range(branches):
        tokens = np.concatenate([stem, rng.integers(0, vocabulary, length)]).astype(np.int32)
        mask = np.arange(len(tokens)) >= len(stem) + length // 2
        trajectories.append(Trajectory(token_ids=tokens, loss_mask=mask))
    return trajectories


def _time(model: nn.Module, tree: PrefixTree, kernels: Kernels | None) -> TimedRun:
    device = next(model.parameters()).device
    step = plan_step(tree.trajectories, token_budget=tree.num_tokens).to(device)
    on_gpu = device.type == "cuda"
    times = []
    for _ in range(_REPEATS + 1):
        if on_gpu:
            torch.cuda.reset_peak_memory_stats(device)
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        accumulate(model, step, LIKELIHOOD, kernels=kernels)
        if on_gpu:
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
        model.zero_grad(set_to_none=True)
    peak = float(torch.cuda.max_memory_allocated(device)) if on_gpu else None
    counts = count(tree, forward_flops(find_backbone(model).config).window)
    return TimedRun(counts=counts, seconds=statistics.median(times[1:]), bytes=peak)
