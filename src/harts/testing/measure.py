"""Times a training step of one batch three ways: packed separate rows, merged rows, the tree.

All arms run the same ops of HARTS, under one token budget, and differ in what they share alone:

- rows: nothing is shared. Its time is forward and backward only: the baseline gets its packing for free.
- merged: a row is merged into one that continues all of it, what a framework can do without a tree.
- tree: every common prefix. Its time includes building the tree, planning and layout.

The arms take turns, in alternating order, so that a machine that slows down slows both; speed-ups are medians over the
pairs of one turn. The limit of a speed-up is the ratio of model FLOPs, without replayed and recomputed rows. Slow code
makes an efficiency (speed-up over limit) look good, so FLOP/s and rows/s stand beside it.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor, nn

from harts.cost import CostModel, Counts, count
from harts.flops import flop_limit, flops, forward_flops
from harts.layout import PackedTree, pack
from harts.models import logprobs
from harts.models.attach import find_backbone
from harts.ops.kernels import Kernels
from harts.plan import Plan, make_plan
from harts.trajectory import Trajectory
from harts.tree import PrefixTree, Share

__all__ = ["ARMS", "Arm", "ArmTimes", "Batch", "Clock", "Measurement", "measure", "prepare", "run_step"]

Arm = Literal["rows", "merged", "tree"]
Clock = Literal["wall", "cpu"]

ARMS: Mapping[Arm, Share] = MappingProxyType({"rows": "none", "merged": "prefix", "tree": "tree"})
"""What each arm merges; see `PrefixTree.build`."""


@dataclass(frozen=True, eq=False)
class Batch:
    """A batch ready to run.

    Attributes:
        tree: of the whole batch.
        plan: its microbatches.
        packed: one per microbatch.
        tree_s, plan_s, layout_s: seconds that building each took, moves to the device included.
    """

    tree: PrefixTree
    plan: Plan
    packed: tuple[PackedTree, ...]
    tree_s: float
    plan_s: float
    layout_s: float


@dataclass(frozen=True, kw_only=True)
class ArmTimes:
    """How one arm did.

    Attributes:
        seconds: of each turn, in order, as the arm is timed.
        prepare_s: median seconds of tree, plan and layout, whether in `seconds` or not.
        counts: rows and the like of the whole batch in one microbatch.
        flops: model FLOPs of that, forward and backward, without replayed rows.
        microbatches, recomputed_rows, replayed_rows: of the plan that ran.
    """

    seconds: tuple[float, ...]
    prepare_s: float
    counts: Counts
    flops: float
    microbatches: int
    recomputed_rows: int
    replayed_rows: int

    @property
    def median_s(self) -> float:
        """Median of `seconds`."""
        return median(self.seconds)

    @property
    def flops_per_s(self) -> float:
        """Model FLOPs over median time."""
        return self.flops / self.median_s

    @property
    def rows_per_s(self) -> float:
        """Rows of this arm over median time."""
        return self.counts.rows / self.median_s


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """Times of the arms on one batch.

    Attributes:
        arms: by name; "rows" and "tree" are always there.
        flop_limit: model FLOPs of separate rows over those of the tree.
        flop_limit_merged: model FLOPs of merged rows over those of the tree.
        head_share: share of the head in the tree's model FLOPs.
        logprob_max_abs: largest difference of a log-prob between any arm and separate rows, nats.
        peak_bytes: largest memory allocated on the device by arm; empty on a CPU.
    """

    arms: Mapping[Arm, ArmTimes]
    flop_limit: float
    flop_limit_merged: float
    head_share: float
    logprob_max_abs: float
    peak_bytes: Mapping[Arm, int] = field(default_factory=dict)

    def speedup(self, over: Arm = "rows") -> float:
        """Median over the turns of another arm's time over the tree's."""
        pairs = zip(self.arms[over].seconds, self.arms["tree"].seconds, strict=True)
        return median(other / tree for other, tree in pairs)

    @property
    def efficiency(self) -> float:
        """Speed-up over separate rows, as a share of the FLOP limit."""
        return self.speedup() / self.flop_limit

    @property
    def efficiency_merged(self) -> float:
        """The same over merged rows."""
        return self.speedup("merged") / self.flop_limit_merged


def measure(
    model: nn.Module,
    trajectories: Sequence[Trajectory],
    *,
    token_budget: int,
    turns: int = 3,
    arms: Sequence[Arm] = ("rows", "tree"),
    kernels: Kernels | None = None,
    recompute: bool = False,
    cost_model: CostModel | None = None,
    clock: Clock = "wall",
    progress: Callable[[str], None] = lambda _: None,
) -> Measurement:
    """Times forward and backward of a batch.

    Args:
        model: attached; the arms run on its device, in its mode and dtype. Gradients are cleared.
        trajectories: the batch, with a trained token.
        token_budget: most rows of a microbatch, in every arm; at least the longest trajectory.
        turns: how often each arm runs, after a first microbatch that is not timed.
        arms: which to run, "rows" and "tree" among them.
        kernels: implementations of the ops.
        recompute: whether gradient checkpointing is switched on in the model, for the FLOP count.
        cost_model: what the arms' plans balance; None: rows.
        clock: "wall", or "cpu" for the processor time of this process, all its threads together: on a CPU that other
            programs use too, with one thread, what the wall clock would show if they did not.
        progress: called with a line before each run.

    Raises:
        ValueError: an arm is missing or unknown, `turns` < 1, nothing is trained, the budget is too small, or the
            model or a token id does not fit.
    """
    if not {"rows", "tree"} <= set(arms) <= set(ARMS) or turns < 1:
        raise ValueError(
            f"measure: expected turns >= 1 and arms 'rows', 'tree' and perhaps 'merged', came {turns}, {arms}"
        )
    if not any(each.loss_mask.any() for each in trajectories):
        raise ValueError("trajectories: expected a trained token, came none; there is nothing to time")
    now = _clock(clock, next(model.parameters()).device)
    runs: dict[Arm, _Runs] = {arm: _Runs() for arm in arms}
    for turn in range(-1, turns):
        for arm in arms if turn % 2 == 0 else tuple(reversed(arms)):
            progress(f"{arm}, {'warm-up' if turn < 0 else f'turn {turn + 1} of {turns}'}")
            settings = {"token_budget": token_budget, "cost_model": cost_model}
            _run(model, trajectories, arm, runs[arm], now, kernels, settings, warm_up=turn < 0)
    config = find_backbone(model).config
    counts = {arm: count(PrefixTree.build(trajectories, share=share)) for arm, share in ARMS.items()}
    differences = [(each.scores - runs["rows"].scores).abs().max() for each in runs.values()]
    return Measurement(
        arms={
            arm: each.times(counts[arm], flops(config, counts[arm], recompute=recompute)) for arm, each in runs.items()
        },
        flop_limit=flop_limit(config, counts["rows"], counts["tree"]),
        flop_limit_merged=flop_limit(config, counts["merged"], counts["tree"]),
        head_share=forward_flops(config).trained_rows
        * counts["tree"].trained_rows
        / flops(config, counts["tree"], backward=False),
        logprob_max_abs=float(torch.stack(differences).max()),  # unlike Python's max, it lets NaN through
        peak_bytes={arm: each.peak_bytes for arm, each in runs.items() if each.peak_bytes},
    )


class _Runs:
    """What the runs of one arm gave: times of all, the rest of the last one."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.prepared: list[float] = []
        self.scores = torch.zeros(0)
        self.peak_bytes = 0
        self.microbatches = self.recomputed_rows = self.replayed_rows = 0

    def times(self, counts: Counts, model_flops: float) -> ArmTimes:
        return ArmTimes(
            seconds=tuple(self.seconds),
            prepare_s=median(self.prepared),
            counts=counts,
            flops=model_flops,
            microbatches=self.microbatches,
            recomputed_rows=self.recomputed_rows,
            replayed_rows=self.replayed_rows,
        )


def _run(
    model: nn.Module,
    trajectories: Sequence[Trajectory],
    arm: Arm,
    runs: _Runs,
    now: Callable[[], float],
    kernels: Kernels | None,
    settings: Mapping[str, Any],
    *,
    warm_up: bool,
) -> None:
    """Prepares and runs an arm once; a warm-up runs one microbatch and is not kept."""
    device = next(model.parameters()).device
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    start = now()
    batch = prepare(trajectories, ARMS[arm], device=device, **settings)
    ready = now()
    scores = run_step(model, batch, kernels=kernels, most=1 if warm_up else None)
    stop = now()
    if warm_up:
        return
    runs.seconds.append(stop - (start if arm == "tree" else ready))
    runs.prepared.append(ready - start)
    runs.scores, runs.microbatches = scores, len(batch.packed)
    runs.recomputed_rows, runs.replayed_rows = batch.plan.recomputed_rows, batch.plan.replayed_rows
    if device.type == "cuda":
        runs.peak_bytes = torch.cuda.max_memory_allocated(device)


def prepare(
    trajectories: Sequence[Trajectory],
    share: Share,
    *,
    token_budget: int,
    cost_model: CostModel | None = None,
    device: torch.device | str = "cpu",
) -> Batch:
    """Builds the tree, plans its microbatches and lays them out, with times."""
    start = time.perf_counter()
    tree = PrefixTree.build(trajectories, share=share)
    built = time.perf_counter()
    plan = make_plan(tree, token_budget=token_budget, cost_model=cost_model)
    planned = time.perf_counter()
    packed = []
    for (microbatch,) in plan.microbatches:
        whole = len(microbatch.trajectories) == len(trajectories)
        members = [trajectories[index] for index in microbatch.trajectories]
        packed.append(pack(tree if whole else PrefixTree.build(members, share=share), device=device))
    return Batch(tree, plan, tuple(packed), built - start, planned - built, time.perf_counter() - planned)


def run_step(model: nn.Module, batch: Batch, *, kernels: Kernels | None = None, most: int | None = None) -> Tensor:
    """Forward and backward of every microbatch; clears the gradients.

    Args:
        model: attached.
        batch: from `prepare`.
        kernels: implementations of the ops.
        most: run only this many microbatches.

    Returns:
        Log-probs of all tokens of the batch's trajectories, in their order, [N], on the CPU; 0 where nothing ran.
    """
    offset_B1 = batch.tree.offset_B1
    scores_N = torch.zeros(batch.tree.num_tokens, dtype=torch.float64)
    trained = sum(each.num_trained for each in batch.tree.trajectories)
    scored = []
    for (microbatch,), packed in zip(batch.plan.microbatches[:most], batch.packed[:most], strict=True):
        values_N = logprobs(model, packed, kernels=kernels)
        (values_N.sum() / -trained).backward()  # type: ignore[no-untyped-call]
        scored.append((microbatch, packed.split(values_N.detach())))
    for microbatch, parts in scored:
        for index, values in zip(microbatch.trajectories, parts, strict=True):
            scores_N[offset_B1[index] : offset_B1[index + 1]] = values.to(scores_N)
    model.zero_grad(set_to_none=True)
    return scores_N


def _clock(clock: Clock, device: torch.device) -> Callable[[], float]:
    if clock == "cpu":
        if device.type != "cpu":
            raise ValueError(f"clock: expected 'wall' for a model on {device}, came 'cpu'; it does not see the device")
        return time.process_time

    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    return now
