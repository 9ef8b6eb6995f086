"""Trainer: a config and an output folder in, a trained model, metrics and checkpoints out; resumable exactly."""

import copy
import dataclasses
import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from harts.cost import Coefficients, CostModel, count, model_identity
from harts.files import write_text
from harts.formats import check_vocabulary, read
from harts.losses import fill_advantages, make_loss
from harts.models import PRESETS, attach, default_kernels, recompute_activations, tiny_model
from harts.models.attach import find_backbone
from harts.models.device import to_device
from harts.models.fuse import can_fuse, fuse
from harts.models.recompute import check_kept
from harts.models.saved import load_saved
from harts.ops.moe import RouterStep, max_violation
from harts.plan import Plan, check_plan
from harts.testing.workloads import remap_vocabulary
from harts.train.batches import Batches, data_hash
from harts.train.checkpoint import (
    CheckpointInfo,
    latest_checkpoint,
    load_checkpoint,
    read_info,
    save_checkpoint,
)
from harts.train.clock import Mark
from harts.train.config import TrainConfig
from harts.train.metrics import MetricsFile, StepMetrics
from harts.train.notices import notices
from harts.train.parallel import Replicas
from harts.train.planning import StepPlanner
from harts.train.signals import signals_as_flag
from harts.train.step import Accumulated, StepPlan, accumulate, count_routes, score, update
from harts.trajectory import Trajectory
from harts.tree import PrefixTree

__all__ = ["Interrupted", "Trainer"]

# Settings that may differ between a checkpoint and the run that goes on from it.
_MAY_CHANGE = {
    "data",
    "model",
    "tokenizer",
    "steps",
    "checkpoint_every",
    "device",
    "token_budget",
    "recompute",
    "keep_attention",
    "fused",
    "deterministic",
    "share",
}


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
        checkpoint = self._find_checkpoint(resume)
        self.loss = make_loss(config.loss)
        self.log(f"reading {config.data}")
        self.trajectories = self._read()
        self.log(f"{len(self.trajectories):,} trajectories, {sum(map(len, self.trajectories)):,} tokens")
        self.notices = notices(config, self.trajectories, requires=self.loss.requires)
        for notice in self.notices:
            self.log(f"note: {notice}")
        self.data_hash = data_hash(self.trajectories)
        self.saved_plan = self._load_plan()
        self.model = self._make_model()
        self.kernels = default_kernels(self.model, deterministic=config.deterministic)
        check_kept(self.kernels, recompute=config.recompute, keep_attention=config.keep_attention)
        self.cost_model = self._make_cost_model()
        self.batches = Batches(self.trajectories, groups_per_step=config.groups_per_step, seed=config.seed)
        self.planner = StepPlanner(
            config,
            self.batches,
            replicas=self.replicas,
            cost_model=self.cost_model,
            saved=self.saved_plan,
            log=log,
        )
        self.replicas.same_start(self.model)
        self.reference = self._make_reference()
        self.optimizer = _make_optimizer(self.model, config)
        self.step = 0 if checkpoint is None else self._resume(checkpoint)
        if self.replicas.rank == 0:
            self.out.mkdir(parents=True, exist_ok=True)
            write_text(self.out / "config.json", json.dumps(config.to_dict(), indent=2) + "\n")
        self.metrics = (
            MetricsFile(self.out / "metrics.jsonl", steps_done=self.step) if self.replicas.rank == 0 else None
        )

    def run(self) -> Iterator[StepMetrics]:
        """Trains to the last step, giving each step's metrics; writes checkpoints on the way and at the end.

        Raises:
            Interrupted: a signal came; everything up to the last finished step is on disk.
        """
        with signals_as_flag() as interrupted, self.planner.ahead():
            while self.step < self.config.steps:
                metrics = self._train_step()
                if self.metrics is not None:
                    self.metrics.append(metrics)
                stop = self.replicas.any(interrupted.is_set)
                if stop or self.step % self.config.checkpoint_every == 0 or self.step == self.config.steps:
                    self.save()
                yield metrics
                if stop:
                    raise Interrupted(f"interrupted after step {self.step}; go on with --resume")

    def save(self) -> None:
        """Writes a checkpoint of the steps done so far."""
        if self.replicas.rank == 0:
            info = CheckpointInfo(self.step, self.config.to_dict(), self.data_hash)
            self.log(f"wrote {save_checkpoint(self.out, info, self.model, self.optimizer)}")
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
        plan = step.plan
        return StepMetrics(
            step=self.step,
            learning_rate=learning_rate,
            grad_norm=norm,
            trajectories=step.tree.num_trajectories,
            tokens=step.tree.num_tokens,
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

    def _find_checkpoint(self, resume: bool) -> Path | None:
        checkpoint = latest_checkpoint(self.out) if self.out.exists() else None
        metrics = self.out / "metrics.jsonl"
        if resume and checkpoint is None:
            if not metrics.exists():
                raise ValueError(f"{self.out}: expected a run to resume, found none; leave --resume out")
            self.log(f"{self.out} holds no checkpoint yet: starting from the first step")
        if not resume and (checkpoint is not None or (metrics.exists() and metrics.stat().st_size)):
            raise ValueError(f"{self.out}: holds a run already; pass --resume to go on with it, or another folder")
        return checkpoint

    def _read(self) -> list[Trajectory]:
        config = self.config
        trajectories = read(
            config.data,
            rows=config.rows,
            fmt=config.format,
            tokenizer=config.tokenizer,
            reasoning=config.reasoning,
            limit=config.limit,
        )
        if config.advantages == "group" and "advantages" in self.loss.requires:
            trajectories = fill_advantages(
                [dataclasses.replace(trajectory, advantages=None) for trajectory in trajectories],
                scale=config.advantage_scale,
                leave_one_out=config.leave_one_out,
                singletons=config.singletons,
            )
        for name in ("logprobs", "ref_logprobs"):
            _check_all_or_none(trajectories, name)
        given = [] if "behaviour_logprobs" in self.loss.requires else ["old_logprobs"]
        self.loss.check(trajectories, given=[*given, "ref_logprobs", "entropy"])
        longest = max(trajectories, key=len)
        if len(longest) > config.token_budget:
            raise ValueError(
                f"trajectory {longest.name}, field token_ids: expected at most the token budget "
                f"({config.token_budget}), got {len(longest)} tokens; set token_budget to {len(longest)} or more"
            )
        return trajectories

    def _make_model(self) -> nn.Module:
        config = self.config
        dtype = getattr(torch, config.dtype)
        if config.model in PRESETS:
            self.trajectories, vocabulary = remap_vocabulary(self.trajectories)
            self.log(f"{config.model}: random weights, vocabulary of the {len(vocabulary):,} token ids in the data")
            model = tiny_model(config.model, dtype=dtype, seed=config.seed, vocab_size=len(vocabulary))
        else:
            model = load_saved(config.model, dtype=dtype)
            check_vocabulary(self.trajectories, model.get_input_embeddings().weight.shape[0])  # type: ignore[operator]
        attach(model.to(config.device)).train()
        self.fused = can_fuse(model) if config.fused is None else config.fused
        if self.fused:
            if not can_fuse(model):
                raise ValueError(
                    f"config, field fused: expected false, or nothing, for {config.model!r} in {config.dtype} on "
                    f"{config.device}; Qwen3.5, Qwen3-Next and Qwen3-MoE run fused, in bfloat16 on a CUDA GPU"
                )
            fuse(model)
        if config.recompute:
            recompute_activations(model, keep_attention=config.keep_attention)
        return model

    def _make_cost_model(self) -> CostModel:
        config = find_backbone(self.model).config
        if self.config.cost_model is not None:
            return CostModel.load(self.config.cost_model, model=model_identity(config))
        again = {"recompute": self.config.recompute, "keep_attention": self.config.keep_attention}
        return CostModel.from_config(config, **again)

    def _load_plan(self) -> Plan | None:
        """The saved plan, checked against the data as they were read."""
        config = self.config
        if config.plan is None:
            return None
        groups = Batches(self.trajectories, groups_per_step=config.groups_per_step, seed=config.seed).num_groups
        if config.groups_per_step < groups:
            raise ValueError(
                f"config, field groups_per_step: expected all {groups} groups of the data, as the saved plan covers "
                f"them in one step, got {config.groups_per_step}"
            )
        try:
            saved = json.loads(Path(config.plan).read_text(encoding="utf-8"))
        except (OSError, json.JSONDecodeError) as error:
            raise ValueError(f"{config.plan}: expected a plan written by harts plan -o ({error})") from error
        tree = PrefixTree.build(self.trajectories, share=config.share)
        plan = Plan.from_json(saved, tree=tree)
        if plan.num_replicas != self.replicas.size:
            raise ValueError(
                f"{config.plan}: is for {plan.num_replicas} replicas, this run has {self.replicas.size}; plan again"
            )
        check_plan(tree, plan, thorough=False)  # another version may plan otherwise
        return plan

    def _make_reference(self) -> nn.Module | None:
        """The starting weights, kept to score with, where a KL term needs scores that are not recorded."""
        recorded = all(trajectory.ref_logprobs is not None for trajectory in self.trajectories)
        if "ref_logprobs" not in self.loss.requires or recorded:
            return None
        return copy.deepcopy(self.model).eval().requires_grad_(False)

    def _resume(self, checkpoint: Path) -> int:
        info = read_info(checkpoint)
        if info.data_hash != self.data_hash:
            raise ValueError(f"{checkpoint}: was written while training on other data; pass the same file and options")
        ours = json.loads(json.dumps(self.config.to_dict()))
        for name, value in info.config.items():
            if name not in _MAY_CHANGE and ours.get(name) != value:
                raise ValueError(
                    f"{checkpoint}: field {name} was {value!r} there and is {ours.get(name)!r} here; a resumed run "
                    f"keeps its settings, except {', '.join(sorted(_MAY_CHANGE))}"
                )
        if self.reference is not None and info.config["model"] != self.config.model:
            raise ValueError(
                f"{checkpoint}: field model was {info.config['model']!r} there and is {self.config.model!r} here; the "
                "KL term refers to the weights that training started from, so the model must stay where it was"
            )
        load_checkpoint(checkpoint, self.model, self.optimizer)
        self.log(f"resumed from {checkpoint}")
        return info.step


def _check_all_or_none(trajectories: Sequence[Trajectory], name: str) -> None:
    """Refuses data in which some trajectories bring recorded values and others would get computed ones."""
    trained = [trajectory for trajectory in trajectories if trajectory.num_trained]
    missing = [trajectory for trajectory in trained if getattr(trajectory, name) is None]
    if missing and len(missing) < len(trained):
        raise ValueError(
            f"trajectory {missing[0].name}, field {name}: expected values, as {len(trained) - len(missing)} other "
            f"trajectories have them, got none; record them everywhere, or nowhere to have them computed"
        )


def _predict_bytes(step: StepPlan) -> float | None:
    """Peak of this replica's largest microbatch, where the cost model was calibrated on a GPU."""
    memory = step.plan.cost_model.memory
    if memory == Coefficients():
        return None
    return max(memory.of(count(microbatch.packed.tree)) for microbatch in step.microbatches)


def _peak_bytes(device: str) -> float | None:
    return float(torch.cuda.max_memory_allocated(device)) if device.startswith("cuda") else None


def _make_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.Optimizer:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups: Sequence[dict[str, Any]] = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=config.learning_rate)
