"""A first look at a run: what its data share, what that saves here, and that the numbers agree.

Takes some rows of the first step, small enough to run without sharing too.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from harts.layout import PackedTree
from harts.models import detach, logprobs
from harts.models.attach import find_backbone
from harts.train.step import LIKELIHOOD, StepPlan, accumulate, plan_step
from harts.train.trainer import Trainer
from harts.trajectory import Trajectory
from harts.tree import PrefixTree, Share

__all__ = ["FirstLook", "first_look"]

_PAIRS = 3


@dataclass(frozen=True, kw_only=True)
class FirstLook:
    """Measured on `rows_looked_at` of the first step's trajectories.

    Attributes:
        sharing: tokens per distinct token in the whole first step.
        rows_looked_at, tokens, unique_rows: of what was measured.
        speedup: time of packed separate rows over time of the tree, forward and backward, same ops, same settings;
            the median of 3 alternating pairs.
        logprob_max_abs: largest difference (nats) between log-probs on the tree and of rows run one by one through
            the model without HARTS.
    """

    sharing: float
    rows_looked_at: int
    tokens: int
    unique_rows: int
    speedup: float
    logprob_max_abs: float


def first_look(
    trainer: Trainer, *, max_tokens: int = 40_000, progress: Callable[[str], None] = lambda _: None
) -> FirstLook:
    """Measures, without touching parameters, gradients or optimiser.

    Args:
        trainer: at its start.
        max_tokens: tokens of the trajectories that are looked at, at most the token budget (one microbatch of separate
            rows has to hold them); at least one trajectory is.
        progress: called with a line before each part.
    """
    step = sorted(trainer.batches.of_step(trainer.step), key=lambda each: not each.num_trained)  # trained ones first
    chosen: list[Trajectory] = []
    for trajectory in step:
        if chosen and sum(map(len, chosen)) + len(trajectory) > min(max_tokens, trainer.config.token_budget):
            break
        chosen.append(trajectory)
    device = trainer.config.device
    shares: tuple[Share, ...] = ("tree", "none")
    budget = sum(map(len, chosen))  # of which nothing is cut
    steps = {share: plan_step(chosen, token_budget=budget, share=share).to(device) for share in shares}
    tree = steps["tree"].tree
    times: dict[Share, list[float]] = {"tree": [], "none": []}
    progress(f"{len(chosen)} rows, {tree.num_tokens:,} tokens, on a tree and separately")
    _seconds(trainer.model, steps["tree"])  # warm-up
    for pair in range(_PAIRS):
        progress(f"pair {pair + 1} of {_PAIRS}")
        for share, seconds in times.items():
            seconds.append(_seconds(trainer.model, steps[share]))
    progress("the same rows one by one, without HARTS")
    ratios = [separate / tree for separate, tree in zip(times["none"], times["tree"], strict=True)]
    return FirstLook(
        sharing=PrefixTree.build(step).sharing,
        rows_looked_at=len(chosen),
        tokens=tree.num_tokens,
        unique_rows=tree.num_rows,
        speedup=statistics.median(ratios),
        logprob_max_abs=_largest_difference(
            trainer.model, trainer.plain_copy(), chosen, steps["tree"].microbatches[0].packed
        ),
    )


def _seconds(model: nn.Module, step: StepPlan) -> float:
    packed = step.microbatches[0].packed
    _synchronize(packed)
    start = time.perf_counter()
    accumulate(model, step, LIKELIHOOD)
    _synchronize(packed)
    seconds = time.perf_counter() - start
    model.zero_grad(set_to_none=True)
    return seconds


def _synchronize(packed: PackedTree) -> None:
    if packed.device.type == "cuda":
        torch.cuda.synchronize(packed.device)


@torch.no_grad()
def _largest_difference(
    model: nn.Module, plain: nn.Module, trajectories: list[Trajectory], packed: PackedTree
) -> float:
    ours = packed.split(logprobs(model, packed))
    plain = detach(plain).eval()
    head = find_backbone(plain).head
    decoder = find_backbone(plain).text
    largest = [0.0]
    for trajectory, values in zip(trajectories, ours, strict=True):
        ids = torch.tensor(trajectory.token_ids, dtype=torch.int64, device=packed.device)
        trained = torch.tensor(trajectory.loss_mask, device=packed.device)
        hidden = decoder(input_ids=ids.unsqueeze(0), use_cache=False).last_hidden_state[0]
        logits = head(hidden[:-1][trained[1:]])
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) / trajectory.temperature
        expected = logits.log_softmax(-1).gather(1, ids[trained].unsqueeze(1)).squeeze(1)
        if len(expected):
            largest.append(float((values[trained] - expected).abs().max()))
    return float(np.max(largest))  # unlike max, lets NaN through
