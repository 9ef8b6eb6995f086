"""Trainer: a config and an output folder in, a trained model, metrics and checkpoints out; resumable exactly."""

import contextlib
import copy
import dataclasses
import json
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from harts.cost import count
from harts.files import write_text
from harts.losses import make_loss
from harts.models import PRESETS, default_kernels
from harts.models.device import to_device
from harts.models.recompute import check_kept
from harts.models.router_losses import RouterStep, max_violation
from harts.train.batches import Batches, data_hash
from harts.train.build import make_cost_model, make_model, make_optimizer
from harts.train.checkpoint import (
    CheckpointInfo,
    checked_info,
    latest_checkpoint,
    load_checkpoint,
    read_info,
    remove_partial,
    save_checkpoint,
    writing,
)
from harts.train.clock import Mark
from harts.train.config import TrainConfig
from harts.train.data import load_plan, read_trajectories
from harts.train.lock import RunLock, check_unlocked
from harts.train.metrics import MetricsFile, StepMetrics
from harts.train.notices import notices
from harts.train.parallel import Replicas
from harts.train.planning import StepPlanner
from harts.train.resume import check_settings, find_checkpoint
from harts.train.sharding import cast_all_but_kept, join_alone, parameter_dtype, put, shard, whole
from harts.train.signals import signals_as_flag
from harts.train.step import Accumulated, StepPlan, accumulate, count_routes, score, update
from harts.vocabulary import remap_vocabulary

__all__ = ["Interrupted", "Trainer"]


class Interrupted(Exception):
    """SIGINT or SIGTERM came; the step was finished and a checkpoint written."""


class Trainer:
    """Holds the model, the data and the files of one run.

    Args:
        config: settings.
        out: folder for metrics.jsonl, config.json and checkpoints; made if it does not exist.
        resume: go on from the newest checkpoint in `out`. Without it, `out` must hold no run.
        log: receives lines for people.

    Raises:
        ValueError: bad settings or data, a folder in use, or a checkpoint of another model, data or settings.
    """

    def __init__(
        self, config: TrainConfig, out: str | Path, *, resume: bool = False, log: Callable[[str], None] = print
    ) -> None:
        self.config, self.out = config, Path(out)
        to_device(config.device)
        self.replicas = Replicas.join(config.device)
        self.log = log if self.replicas.rank == 0 else lambda _: None
        if self.replicas.rank == 0:
            check_unlocked(self.out)
        checkpoint = find_checkpoint(self.out, resume=resume)
        info = None if checkpoint is None else self._read_checkpoint(checkpoint)
        if resume and checkpoint is None:
            self.log(f"{self.out} holds no checkpoint yet: starting from the first step")
        self.loss = make_loss(config.loss)
        self.log(f"reading {config.data}")
        self.trajectories = read_trajectories(config, self.loss)
        self.log(f"{len(self.trajectories):,} trajectories, {sum(map(len, self.trajectories)):,} tokens")
        self.notices = notices(config, self.trajectories, requires=self.loss.requires)
        for notice in self.notices:
            self.log(f"note: {notice}")
        self.data_hash = data_hash(self.trajectories)
        self.saved_plan = load_plan(config, self.trajectories, replicas=self.replicas.size)
        self._vocab_size = self._rename_tokens()
        self.model, self.fused = self._make_model()
        self.reference = self._make_reference()
        self._shard()
        self.kernels = default_kernels(self.model, deterministic=config.deterministic)
        check_kept(self.kernels, recompute=config.recompute, keep_attention=config.keep_attention)
        self.cost_model = make_cost_model(config, self.model)
        self.batches = Batches(self.trajectories, groups_per_step=config.groups_per_step, seed=config.seed)
        self.planner = StepPlanner(
            config,
            self.batches,
            replicas=self.replicas,
            cost_model=self.cost_model,
            saved=self.saved_plan,
            log=log,
        )
        self.optimizer = make_optimizer(self.model, config)
        self.step = 0 if checkpoint is None or info is None else self._resume(checkpoint, info)
        self.lock = self._take_folder(checkpoint, resume) if self.replicas.rank == 0 else None
        if self.replicas.rank == 0:
            write_text(self.out / "config.json", json.dumps(config.to_dict(), indent=2) + "\n")
        self.metrics = (
            MetricsFile(self.out / "metrics.jsonl", steps_done=self.step) if self.replicas.rank == 0 else None
        )

    def run(self) -> Iterator[StepMetrics]:
        """Trains to the last step, giving each step's metrics; writes checkpoints on the way and at the end.

        Raises:
            Interrupted: a signal came; everything up to the last finished step is on disk.
            OSError: a file cannot be written; it is named, and so is the checkpoint that is kept.
        """
        with self._folder(), signals_as_flag(self._tell_signal) as interrupted, self.planner.ahead():
            while self.step < self.config.steps:
                metrics = self._train_step()
                if self.metrics is not None:
                    with writing(self.out / "metrics.jsonl", self.out):
                        self.metrics.append(metrics)
                stop = self.replicas.any(interrupted.is_set)
                if stop or self.step % self.config.checkpoint_every == 0 or self.step == self.config.steps:
                    self.save()
                yield metrics
                if stop:
                    raise Interrupted(f"interrupted after step {self.step}; go on with --resume")

    @contextlib.contextmanager
    def _folder(self) -> Iterator[None]:
        """Keeps other trainers out while steps are made."""
        if self.lock is not None and not self.lock.release.alive:  # `run` is called again
            self.lock = RunLock(self.out)
        try:
            newest = latest_checkpoint(self.out)
            if self.lock is not None and newest is not None and read_info(newest).step > self.step:
                raise ValueError(
                    f"{newest}: another trainer has gone on from step {self.step}; start again with resume"
                )
            yield
        finally:
            if self.lock is not None:
                self.lock.release()

    def _tell_signal(self) -> None:
        self.log(f"finishing step {self.step + 1}, then a checkpoint; again to quit now")

    def save(self) -> None:
        """Writes a checkpoint of the steps done so far.

        Raises:
            OSError: it cannot be written; checkpoints that were there before are kept.
        """
        info = CheckpointInfo(self.step, self.config.to_dict(), self.data_hash)
        source = None if self.config.model in PRESETS else Path(self.config.model)
        writes = self.replicas.rank == 0
        path = save_checkpoint(self.out, info, self.model, self.optimizer, writes=writes, source=source)
        self.log(f"wrote {path}")
        self.replicas.wait()

    def plan(self, step: int) -> StepPlan:
        """The plan of optimiser step `step`, counted from 0."""
        return self.planner.plan(step)

    # -- one step -----------------------------------------------------------------------------------------------

    def _train_step(self) -> StepMetrics:
        start = time.perf_counter()
        step = self.plan(self.step)
        self.planner.start(self.step + 1)
        old, reference = self._missing_scores(step)
        if self.config.device.startswith("cuda"):
            torch.cuda.reset_peak_memory_stats(self.config.device)
        computes = Mark(self.config.device)
        done = self._accumulate(step, old, reference)
        computed = Mark(self.config.device)
        self.planner.prepare(self.step + 1)
        losses = done.metrics.all_reduce() if self.replicas.size > 1 else done.metrics
        learning_rate = self.config.learning_rate_at(self.step)
        norm = update(
            self.optimizer, self.replicas, learning_rate=learning_rate, max_grad_norm=self.config.max_grad_norm
        )
        self.step += 1
        seconds = time.perf_counter() - start
        plan, reward = step.plan, _reward(step)
        return StepMetrics(
            step=self.step,
            learning_rate=learning_rate,
            grad_norm=norm,
            trajectories=step.tree.num_trajectories,
            tokens=step.tree.num_tokens,
            reward_mean=reward[0],
            reward_std=reward[1],
            unique_rows=step.tree.num_rows,
            recomputed_rows=plan.recomputed_rows,
            replayed_rows=plan.replayed_rows,
            trained_rows=round(self.replicas.sum(sum(len(part.packed.head_row_U) for part in step.microbatches))),
            sharing=step.tree.sharing,
            microbatches=sum(not part.is_empty for slot in plan.microbatches for part in slot),
            slots=plan.slots,
            idle_fraction=plan.idle_fraction,
            predicted=plan.makespan,
            predicted_unit=plan.cost_model.unit,
            predicted_bytes=_predict_bytes(step),
            peak_bytes=_peak_bytes(self.config.device),
            seconds=seconds,
            compute_seconds=self.replicas.max(computed.seconds_since(computes)),
            plan_seconds=step.seconds,
            rows_per_s=(step.tree.num_rows + plan.recomputed_rows) / seconds,
            kernels=dataclasses.asdict(self.kernels),
            fused=self.fused,
            router_loss=None if self.config.router is None else self.replicas.sum(done.router_loss),
            router_max_violation=self._violation(done.router_counts),
            loss=losses.values(),
        )

    def _accumulate(
        self, step: StepPlan, old: dict[int, Tensor] | None, reference: dict[int, Tensor] | None
    ) -> Accumulated:
        router, kernels = self.config.router, self.kernels
        self.optimizer.zero_grad(set_to_none=True)  # what a step that failed in the middle left, if `run` goes on
        counts = None
        if router is not None:
            counts = count_routes(self.model, step, router, self.replicas, kernels=kernels)
        return accumulate(
            self.model,
            step,
            self.loss,
            old=old,
            reference=reference,
            router=router,
            router_step=counts,
            kernels=kernels,
        )

    def _violation(self, counts: RouterStep | None) -> float | None:
        if counts is None or counts.load_YE is None:
            return None
        whole = counts.all_reduce() if self.replicas.size > 1 else counts
        assert whole.load_YE is not None
        return float(max_violation(whole.load_YE).mean())

    def _missing_scores(self, step: StepPlan) -> tuple[dict[int, Tensor] | None, dict[int, Tensor] | None]:
        """Passes without gradients for log-probs that the loss needs and the trajectories do not bring."""
        requires, old, reference = self.loss.requires, None, None
        recorded = all(trajectory.logprobs is not None for trajectory in step.trajectories)
        if "behaviour_logprobs" in requires or ("old_logprobs" in requires and not recorded):
            old = score(self.model, step, kernels=self.kernels)
        if self.reference is not None:
            reference = score(self.reference, step, kernels=self.kernels)
        return old, reference

    # -- start --------------------------------------------------------------------------------------------------

    def _rename_tokens(self) -> int | None:
        """Gives the data the small vocabulary of a preset, and returns its size; None for another model."""
        if self.config.model not in PRESETS:
            return None
        self.trajectories, vocabulary = remap_vocabulary(self.trajectories)
        self.log(f"{self.config.model}: random weights, vocabulary of the {len(vocabulary):,} token ids in the data")
        return len(vocabulary)

    def _make_model(self) -> tuple[nn.Module, bool]:
        model, fused = make_model(self.config, self.trajectories, vocab_size=self._vocab_size)
        self.replicas.same_start(model)
        return model, fused

    def _make_reference(self) -> nn.Module | None:
        """The starting weights, kept to score with, where a KL term needs scores that are not recorded."""
        recorded = all(trajectory.ref_logprobs is not None for trajectory in self.trajectories)
        if "ref_logprobs" not in self.loss.requires or recorded:
            return None
        compute = getattr(torch, self.config.dtype)
        return cast_all_but_kept(copy.deepcopy(self.model), compute).eval().requires_grad_(False)

    def _shard(self) -> None:
        """Over processes, and on one where parameters are not of the dtype that is computed in."""
        config, size, compute = self.config, self.replicas.size, getattr(torch, self.config.dtype)
        self._joined = False
        if size == 1 and compute == parameter_dtype(compute):
            return
        if size == 1:
            self._joined = join_alone(config.device)
        shard(self.model, compute=compute, device=config.device, size=size)

    def plain_copy(self) -> nn.Module:
        """The model as it is now and computes, on this process alone; every process calls this."""
        if not isinstance(self.model, FSDPModule):
            return copy.deepcopy(self.model)
        model, _ = make_model(self.config, self.trajectories, vocab_size=self._vocab_size)
        for (_, mine), (_, theirs) in zip(model.named_parameters(), self.model.named_parameters(), strict=True):
            put(mine, whole(theirs))
        return cast_all_but_kept(model, getattr(torch, self.config.dtype))

    def close(self) -> None:
        """Leaves the folder and the other processes; the trainer is of no use any more."""
        if self.lock is not None:
            self.lock.release()
        self.replicas.leave()
        if self._joined:
            dist.destroy_process_group()
            self._joined = False

    def _read_checkpoint(self, checkpoint: Path) -> CheckpointInfo:
        """What it says of itself; one process reads all of it to compare checksums."""
        if self.replicas.rank != 0:
            return read_info(checkpoint)
        self.log(f"checking {checkpoint}")
        info = checked_info(checkpoint)
        MetricsFile.check(self.out / "metrics.jsonl", steps_done=info.step)
        return info

    def _resume(self, checkpoint: Path, info: CheckpointInfo) -> int:
        needs_start = self.reference is not None
        check_settings(checkpoint, info, self.config, data_hash=self.data_hash, needs_start=needs_start)
        load_checkpoint(checkpoint, self.model, self.optimizer)
        self.log(f"resumed from {checkpoint}")
        return info.step

    def _take_folder(self, checkpoint: Path | None, resume: bool) -> RunLock:
        self.out.mkdir(parents=True, exist_ok=True)
        lock = RunLock(self.out)
        try:
            if find_checkpoint(self.out, resume=resume) != checkpoint:
                raise ValueError(f"{self.out}: another trainer wrote to it since this one started; start again")
            remove_partial(self.out)
        except BaseException:
            lock.release()
            raise
        return lock


def _reward(step: StepPlan) -> tuple[float, float] | tuple[None, None]:
    """Mean and spread of the rewards that the step's trajectories have."""
    rewards = [each.reward for each in step.trajectories if each.reward is not None]
    return (statistics.fmean(rewards), statistics.pstdev(rewards)) if rewards else (None, None)


def _predict_bytes(step: StepPlan) -> float | None:
    """Peak of this replica's largest microbatch, where the cost model was calibrated on a GPU."""
    memory = step.plan.cost_model.memory
    if not any(memory.values):
        return None
    return max(memory.of(count(microbatch.packed.tree, memory.window)) for microbatch in step.microbatches)


def _peak_bytes(device: str) -> float | None:
    return float(torch.cuda.max_memory_allocated(device)) if device.startswith("cuda") else None
