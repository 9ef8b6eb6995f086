"""Times a training step of one batch several ways (`harts.testing.arms`), and checks that all give the same log-probs.

The arms take turns, in alternating order, so that a machine that slows down slows all of them; speed-ups are medians
over the pairs of one turn. The time of the tree includes building it, planning and layout; that of the other arms is
forward and backward only: the baselines get their packing for free. What the tree's step alone gives stands beside it.
Before all turns each arm runs its first microbatch, which is not timed. The limit of a speed-up is the ratio of model
FLOPs, without replayed and recomputed rows. Slow code makes an efficiency (speed-up over limit) look good, so FLOP/s
and rows/s stand beside it.
"""

import dataclasses
import hashlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

import torch
from torch import Tensor, nn

from harts.cost import Counts, count
from harts.flops import flop_limit, flops, forward_flops
from harts.models.attach import find_backbone
from harts.testing.arms import ARMS, Arm, Batch, Setting, prepare, run_step, set_up
from harts.testing.in_memory import Chosen, choose
from harts.trajectory import Trajectory
from harts.tree import PrefixTree

__all__ = ["ArmResult", "Clock", "Measurement", "measure"]

Clock = Literal["wall", "cpu"]

_BASELINES: tuple[Arm, ...] = ("rows", "merged", "tree")
"""Log-probs are compared with those of the first of these arms that ran."""


@dataclass(frozen=True, kw_only=True)
class ArmResult:
    """How one arm did.

    Attributes:
        step_seconds: of forward and backward in each of its turns, in order.
        prepare_seconds: of tree, plan and layout before them.
        pays_build: whether the time of the arm includes these.
        counts: rows and the like of the whole batch in one microbatch.
        flops: model FLOPs of that, forward and backward and recomputation, without replayed rows.
        microbatches, recomputed_rows, replayed_rows: of the plan that ran.
        peak_bytes: largest memory allocated on the device; None on a CPU.
        logprob_max_abs: largest difference (nats) of a trained token's log-prob from the arm `compared_with`.
        bitwise_equal: fraction of trained tokens whose log-prob has the same bits there.
        compared_with: that arm; the arm itself where no other is to compare with.
        same_again: whether all turns gave the same bits; None with one turn.
        chosen: how it ran within the memory of the setting; None where that gives none.
        digest: of all log-probs of trained tokens in fp32, to compare runs of different processes.
    """

    step_seconds: tuple[float, ...]
    prepare_seconds: tuple[float, ...]
    pays_build: bool
    counts: Counts
    flops: float
    microbatches: int
    recomputed_rows: int
    replayed_rows: int
    peak_bytes: int | None
    logprob_max_abs: float
    bitwise_equal: float
    compared_with: Arm
    same_again: bool | None
    digest: str
    chosen: Chosen | None = None

    @property
    def seconds(self) -> tuple[float, ...]:
        """Of each of its turns, as the arm is timed."""
        if not self.pays_build:
            return self.step_seconds
        return tuple(step + build for step, build in zip(self.step_seconds, self.prepare_seconds, strict=True))

    @property
    def prepare_s(self) -> float:
        """Median of `prepare_seconds`."""
        return median(self.prepare_seconds)

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
    """What ran of the arms on one batch.

    Attributes:
        arms: by name.
        left_out: arms without a result, and why: "time", they would not have fitted into it, or "memory".
        flop_limit: model FLOPs of separate rows over those of the tree.
        flop_limit_merged: model FLOPs of merged rows over those of the tree.
        head_share: share of the head in the tree's model FLOPs of a forward pass.
    """

    arms: Mapping[Arm, ArmResult]
    left_out: Mapping[Arm, Literal["time", "memory"]]
    flop_limit: float
    flop_limit_merged: float
    head_share: float

    def limit(self, over: Arm) -> float | None:
        """Model FLOPs of an arm over those of the tree; None for `plain`, which runs other code."""
        return {"rows": self.flop_limit, "shuffled": self.flop_limit, "merged": self.flop_limit_merged}.get(over)

    def speedup(self, over: Arm = "rows", *, step_alone: bool = False) -> float | None:
        """Another arm's time over the tree's: median over the turns, or ratio of medians if one of them ran less often.

        None where one of the two did not run. Where merging merges nothing, merged rows are separate rows.

        Args:
            over: the other arm.
            step_alone: leave out the tree's build, plan and layout, which training does during the step before.
        """
        if over == "merged" and over not in self.arms and self.flop_limit_merged == self.flop_limit:
            over = "rows"
        if over not in self.arms or "tree" not in self.arms:
            return None
        other, tree = self.arms[over], self.arms["tree"]
        ours, theirs = (each.step_seconds if step_alone else each.seconds for each in (tree, other))
        if len(theirs) != len(ours):
            return median(theirs) / median(ours)
        return median(other_s / tree_s for other_s, tree_s in zip(theirs, ours, strict=True))

    def efficiency(self, over: Arm = "rows", *, step_alone: bool = False) -> float | None:
        """Speed-up over an arm, as a share of its limit."""
        speedup, limit = self.speedup(over, step_alone=step_alone), self.limit(over)
        return None if speedup is None or limit is None else speedup / limit


def measure(
    model: nn.Module,
    trajectories: Sequence[Trajectory],
    setting: Setting,
    *,
    arms: Sequence[Arm] = ("rows", "tree"),
    turns: int = 3,
    once_above: float = math.inf,
    seconds: float = math.inf,
    clock: Clock = "wall",
    progress: Callable[[str], None] = lambda _: None,
    keep: Callable[[Measurement], None] = lambda _: None,
) -> Measurement:
    """Times forward and backward of a batch.

    Args:
        model: of a supported family; the arms run on its device, in its dtype. Gradients are cleared. It is left as the
            last arm needed it.
        trajectories: the batch, with a trained token.
        setting: of all arms.
        arms: which to run, each once a turn, after its first microbatch, which is not timed.
        turns: how often each arm runs.
        once_above: an arm whose first turn took more seconds than this has no second one.
        seconds: of everything; an arm that would not fit, by its FLOPs, is left out, as is one that the device's memory
            does not hold.
        clock: "wall", or "cpu" for the processor time of this process, all its threads together: on a CPU that other
            programs use too, with one thread, what the wall clock would show if they did not.
        progress: called with a line before each run.
        keep: called with what there is after each run.

    Raises:
        ValueError: an arm is unknown, or cannot run within a memory (shuffled, plain), `turns` < 1, nothing is trained,
            the budget or the memory is too small, the model or a token id does not fit, or the arm plain is to run
            recorded routes, which it cannot force.
    """
    _check(trajectories, setting, arms, turns)
    stop = time.monotonic() + seconds
    bench = _Bench(model, trajectories, setting, clock)
    for turn in range(-1, turns):
        for arm in arms if turn % 2 == 0 else tuple(reversed(arms)):
            runs = bench.runs.get(arm)
            if turn > 0 and (runs is None or runs.steps[0] > once_above):
                continue
            if time.monotonic() + bench.expected_s(arm) > stop:
                bench.left_out.setdefault(arm, "time")
                continue
            progress(f"{arm}, {'warm-up' if turn < 0 else f'turn {turn + 1} of {turns}'}")
            bench.attempt(bench.warm_up if turn < 0 else bench.run, arm)
            if turn >= 0:
                keep(bench.measurement())
    return bench.measurement()


def _check(trajectories: Sequence[Trajectory], setting: Setting, arms: Sequence[Arm], turns: int) -> None:
    if not arms or not set(arms) <= set(ARMS) or len(set(arms)) < len(arms) or turns < 1:
        raise ValueError(f"measure: expected turns >= 1 and arms of {', '.join(ARMS)}, got {turns} and {list(arms)}")
    if not any(each.loss_mask.any() for each in trajectories):
        raise ValueError("trajectories: expected a trained token, got none; there is nothing to time")
    if setting.memory is not None:
        if not set(arms) <= set(_BASELINES):
            raise ValueError(
                f"arms: expected some of {', '.join(_BASELINES)} within a memory, got {', '.join(arms)}; the others do "
                "not run in pieces"
            )
        return
    longest = max(map(len, trajectories))
    if longest > setting.token_budget:
        raise ValueError(
            f"token_budget: expected at least {longest}, the longest trajectory, got {setting.token_budget}"
        )
    routed = next((each for each in trajectories if each.routes is not None), None)
    if routed is not None and "plain" in arms:
        raise ValueError(
            f"arms: plain, transformers' own code, cannot force the recorded experts that trajectory {routed.name} has "
            "in field routes; leave the arm or the field out"
        )


class _Runs:
    """What the runs of one arm gave: times of all, the rest of the first one."""

    def __init__(self, scores_N: Tensor, microbatches: int, recomputed_rows: int, replayed_rows: int) -> None:
        self.scores_N = scores_N
        self.counts = {
            "microbatches": microbatches,
            "recomputed_rows": recomputed_rows,
            "replayed_rows": replayed_rows,
        }
        self.steps: list[float] = []
        self.prepared: list[float] = []
        self.peak_bytes: int | None = None
        self.same = True


class _Bench:
    """Runs arms of one batch and keeps what they gave."""

    def __init__(self, model: nn.Module, trajectories: Sequence[Trajectory], setting: Setting, clock: Clock) -> None:
        self.model, self.trajectories, self.setting = model, trajectories, setting
        self.device = next(model.parameters()).device
        self.now = _clock(clock, self.device)
        self.config = find_backbone(model).config
        window = forward_flops(self.config).window
        self.counts = {arm: count(PrefixTree.build(trajectories, share=ARMS[arm]), window) for arm in _BASELINES}
        self.runs: dict[Arm, _Runs] = {}
        self.left_out: dict[Arm, Literal["time", "memory"]] = {}
        self.chosen: dict[Arm, Chosen] = {}

    def work(self, arm: Arm) -> float:
        """Model FLOPs of an arm."""
        keeps = self.setting.keep_attention and arm != "plain"
        counts = self.counts[_layout_of(arm)]
        return flops(self.config, counts, recompute=self.setting.recompute, keep_attention=keeps)

    def expected_s(self, arm: Arm) -> float:
        """Seconds that an arm will take: as before, or by its FLOPs, at the pace of the slowest so far."""
        if arm in self.runs:
            return self.runs[arm].steps[-1] + self.runs[arm].prepared[-1]
        paces = [runs.steps[0] / self.work(other) for other, runs in self.runs.items()]
        return 1.2 * self.work(arm) * max(paces, default=0.0)

    def attempt(self, run: Callable[[Arm], None], arm: Arm) -> None:
        """Runs an arm if the memory holds it."""
        try:
            run(arm)
            return
        except torch.OutOfMemoryError:
            self.left_out.setdefault(arm, "memory")
        self.model.zero_grad(set_to_none=True)  # behind the handler, whose traceback still holds activations
        torch.cuda.empty_cache()

    def warm_up(self, arm: Arm) -> None:
        """Compiles what has to be compiled, in the sizes that are timed: runs the arm's first microbatch."""
        batch = self._set_up_and_prepare(arm)
        most = len(batch.plan.microbatches[0][0].trajectories) if arm == "plain" else 1
        run_step(self.model, batch, kernels=self.setting.kernels, most=most, memory=self.setting.memory)
        self.model.zero_grad(set_to_none=True)

    def run(self, arm: Arm) -> None:
        """Prepares and runs an arm once."""
        set_up(self.model, arm, self._setting_of(arm))
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        start = self.now()
        batch = self._prepare(arm)
        ready = self.now()
        scores_N = run_step(self.model, batch, kernels=self.setting.kernels, memory=self.setting.memory)
        stop = self.now()
        self.model.zero_grad(set_to_none=True)
        plan = batch.plan
        microbatches = self.chosen[arm].pieces if arm in self.chosen else len(batch.packed)
        new = _Runs(scores_N, microbatches, plan.recomputed_rows, plan.replayed_rows)
        runs = self.runs.setdefault(arm, new)
        runs.same &= torch.equal(scores_N, runs.scores_N)
        runs.steps.append(stop - ready)
        runs.prepared.append(ready - start)
        if self.device.type == "cuda":
            runs.peak_bytes = max(runs.peak_bytes or 0, torch.cuda.max_memory_allocated(self.device))

    def _set_up_and_prepare(self, arm: Arm) -> Batch:
        """The arm's batch; within a memory, how it runs is chosen the first time."""
        set_up(self.model, arm, self._setting_of(arm))
        batch = self._prepare(arm)
        if self.setting.memory is not None and arm not in self.chosen:
            (packed,) = batch.packed
            self.chosen[arm] = choose(self.model, packed, self.setting.memory, self.setting.kernels)
        return batch

    def _setting_of(self, arm: Arm) -> Setting:
        chosen = self.chosen.get(arm)
        return self.setting if chosen is None else dataclasses.replace(self.setting, recompute=chosen.recompute)

    def _prepare(self, arm: Arm) -> Batch:
        return prepare(self.trajectories, arm, self.setting, device=self.device)

    def measurement(self) -> Measurement:
        """Everything so far."""
        counts = self.counts
        again = {"recompute": self.setting.recompute, "keep_attention": self.setting.keep_attention}
        head = forward_flops(self.config).trained_rows * counts["tree"].trained_rows
        return Measurement(
            arms={arm: self._result(arm) for arm in self.runs},
            left_out={arm: why for arm, why in self.left_out.items() if arm not in self.runs},
            flop_limit=flop_limit(self.config, counts["rows"], counts["tree"], **again),
            flop_limit_merged=flop_limit(self.config, counts["merged"], counts["tree"], **again),
            head_share=head / flops(self.config, counts["tree"], backward=False),
        )

    def _result(self, arm: Arm) -> ArmResult:
        runs = self.runs[arm]
        others = [other for other in _BASELINES if other in self.runs and other != arm]
        other = arm if arm == "rows" or not others else others[0]
        mask_N = torch.cat([torch.from_numpy(each.loss_mask.copy()) for each in self.trajectories])
        ours_M = runs.scores_N[mask_N]
        difference_M = (ours_M - self.runs[other].scores_N[mask_N]).abs()
        return ArmResult(
            step_seconds=tuple(runs.steps),
            prepare_seconds=tuple(runs.prepared),
            pays_build=arm == "tree",
            counts=self.counts[_layout_of(arm)],
            flops=self.work(arm),
            peak_bytes=runs.peak_bytes,
            logprob_max_abs=float(difference_M.max()),  # unlike Python's max, it lets NaN through
            bitwise_equal=float((difference_M == 0).double().mean()),
            compared_with=other,
            same_again=runs.same if len(runs.steps) > 1 else None,
            chosen=self.chosen.get(arm),
            digest=hashlib.sha256(ours_M.float().numpy().tobytes()).hexdigest()[:16],
            **runs.counts,
        )


def _layout_of(arm: Arm) -> Arm:
    return next(known for known in _BASELINES if ARMS[known] == ARMS[arm])


def _clock(clock: Clock, device: torch.device) -> Callable[[], float]:
    if clock == "cpu":
        if device.type != "cpu":
            raise ValueError(f"clock: expected 'wall' for a model on {device}, got 'cpu'; it does not see the device")
        return time.process_time

    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    return now
