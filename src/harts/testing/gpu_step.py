"""Times whole training steps of a Qwen3.5-shaped model, arm by arm, and checks the log-probs of every arm.

Beside the arms of `harts.testing.measure` (rows, merged, tree) there is `plain`: what a user has without HARTS, which
is transformers with fla-core where it is installed, SDPA, one row a call, and a chunked head. Each arm is one record,
so that a run can be taken up again where it stopped; `summarise` puts the records of a workload side by side. An arm
whose log-probs are off gets no time.
"""

import contextlib
import dataclasses
import hashlib
import importlib.metadata
import math
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal

import torch
from torch import Tensor, nn

from harts.cost import count
from harts.flops import flop_limit, flops, forward_flops
from harts.layout import pack
from harts.models import attach, detach, logprobs
from harts.models.attach import find_backbone
from harts.models.fuse import fuse, unfuse
from harts.ops import row_logprobs
from harts.ops.kernels import Kernels
from harts.testing.measure import ARMS, Batch, prepare, run_step
from harts.testing.shapes import build_model
from harts.trajectory import Trajectory
from harts.tree import PrefixTree

__all__ = [
    "Setting",
    "StepArm",
    "environment",
    "gradient_errors",
    "profiled",
    "summarise",
    "time_arm",
]

StepArm = Literal["rows", "merged", "tree", "plain"]

SAME, ALIKE = 1e-3, 0.5
"""Largest difference (nats) of a log-prob from that of packed rows: of arms with our ops, of the plain arm in bf16."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What is the same in all arms of a comparison.

    Attributes:
        kernels: implementations of the ops; not of the plain arm.
        fused: norms, MLPs and gated attention are fused; not in the plain arm.
        recompute: gradient checkpointing of every layer.
        token_budget: most rows of a microbatch.
    """

    kernels: Kernels
    fused: bool
    recompute: bool
    token_budget: int


def environment(commit: str | None = None) -> dict[str, str]:
    """Names the GPU, versions, commit and command of a measurement.

    Args:
        commit: of the code, where its directory is no checkout.
    """
    found = {"gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none", "torch": torch.__version__}
    for package in ("triton", "transformers", "fla-core", "flash-attn-4"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    if commit is None:
        git = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=False)
        commit = git.stdout.strip() or "unknown"
    command = [Path(word).name if word.startswith("/") else word for word in sys.argv]  # no one's directories
    return {**found, "commit": commit, "command": " ".join(["python", *command])}


def time_arm(
    model: nn.Module,
    arm: StepArm,
    trajectories: Sequence[Trajectory],
    setting: Setting,
    *,
    repeats: int = 1,
    warm_up: int | None = 1,
    baseline_N: Tensor | None = None,
) -> tuple[dict[str, Any], Tensor]:
    """Runs forward and backward of a batch and describes how it went.

    Args:
        model: from `build_model`.
        arm: see the module.
        trajectories: the batch.
        setting: of the comparison.
        repeats: timed runs.
        warm_up: microbatches (rows, for `plain`) to run before; None runs all.
        baseline_N: log-probs of the arm `rows`, to check against.

    Returns:
        The record and the log-probs, [N], on the CPU. Without `seconds` where the check failed.
    """
    device = next(model.parameters()).device
    _set_up(model, arm, setting)
    share = "none" if arm == "plain" else ARMS[arm]
    batch = prepare(trajectories, share, token_budget=setting.token_budget, device="cpu" if arm == "plain" else device)

    def run(most: int | None) -> Tensor:
        if arm == "plain":
            return _plain_step(model, trajectories[:most], batch.tree.num_tokens)
        return run_step(model, batch, kernels=setting.kernels, most=most)

    if warm_up is None or warm_up > 0:
        run(warm_up)
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    seconds, scores_N = [], torch.zeros(0)
    for _ in range(repeats):
        start = _now(device)
        scores_N = run(None)
        seconds.append(_now(device) - start)
    record = _describe(arm, trajectories, setting, batch, device)
    record |= _check(scores_N, baseline_N, batch.tree, ALIKE if arm == "plain" else SAME)
    if record["check"] == "failed":
        return record, scores_N
    config = find_backbone(model).config
    work = flops(config, batch.tree, recompute=setting.recompute)
    middle = median(seconds)
    record |= {
        "seconds": [round(each, 4) for each in seconds],
        "median_s": round(middle, 4),
        "tflop": round(work / 1e12, 1),
        "tflop_per_s": round(work / middle / 1e12, 1),
    }
    return record, scores_N


def summarise(
    records: Sequence[Mapping[str, Any]], config: Any, trajectories: Sequence[Trajectory]
) -> dict[str, float | None]:
    """Speed-ups of the tree over the other arms of one setting, and how near they come to the ratio of FLOPs.

    Args:
        records: of `time_arm`, one per arm.
        config: of the model.
        trajectories: the batch.
    """
    times = {record["arm"]: record.get("median_s") for record in records}
    trees = {arm: PrefixTree.build(trajectories, share=share) for arm, share in ARMS.items()}
    limits = {arm: flop_limit(config, trees[arm], trees["tree"]) for arm in ("rows", "merged")}
    tree_counts = count(trees["tree"])
    head = forward_flops(config).trained_rows * tree_counts.trained_rows
    found: dict[str, float | None] = {
        "flop_limit": round(limits["rows"], 3),
        "flop_limit_merged": round(limits["merged"], 3),
        "head_share": round(head / flops(config, tree_counts, backward=False), 3),
    }
    for arm in ("rows", "merged", "plain"):
        theirs, ours = times.get(arm), times.get("tree")
        speedup = theirs / ours if theirs and ours else None
        found[f"speedup_over_{arm}"] = None if speedup is None else round(speedup, 3)
        if arm in limits:
            found[f"efficiency_over_{arm}"] = None if speedup is None else round(speedup / limits[arm], 3)
    return found


def gradient_errors(
    trajectories: Sequence[Trajectory], setting: Setting, changes: Mapping[str, Any], *, device: str = "cuda"
) -> dict[str, float]:
    """Errors of bf16 gradients against fp32 ones, parameter by parameter: the tree's over those of packed rows.

    Args:
        trajectories: the batch.
        setting: of the bf16 runs. The fp32 run is on packed rows, with plain PyTorch but for the gated delta rule.
        changes: config fields, `num_hidden_layers` say: the fp32 run is slow.
        device: where to run.

    Returns:
        Median and largest ratio over the parameters, the name of the latter aside, and the median errors themselves.
    """
    exact = Kernels(gated_delta_rule=setting.kernels.gated_delta_rule, chunk_rows=setting.kernels.chunk_rows)
    model = build_model(changes, device=device)
    ours = {arm: _gradients(model, arm, trajectories, setting) for arm in ("rows", "tree")}
    wide = dataclasses.replace(setting, kernels=exact, fused=False)
    truth = _gradients(model.float(), "rows", trajectories, wide)
    errors: dict[str, dict[str, float]] = {"rows": {}, "tree": {}}
    for arm, gradients in ours.items():
        for name, gradient in gradients.items():
            reference = truth[name]
            errors[arm][name] = float((gradient.float() - reference).norm() / reference.norm().clamp_min(1e-30))
    ratios = [errors["tree"][name] / max(errors["rows"][name], 1e-30) for name in truth]
    return {
        "parameters": len(ratios),
        "gradient_error_rows": median(errors["rows"].values()),
        "gradient_error_tree": median(errors["tree"].values()),
        "gradient_error_ratio_median": median(ratios),
        "gradient_error_ratio_worst": max(ratios),
    }


def _gradients(
    model: nn.Module, arm: Literal["rows", "tree"], trajectories: Sequence[Trajectory], setting: Setting
) -> dict[str, Tensor]:
    """Gradients of the mean log-prob by parameter name; clears those of the model."""
    _set_up(model, arm, setting)
    device = next(model.parameters()).device
    batch = prepare(trajectories, ARMS[arm], token_budget=setting.token_budget, device=device)
    trained = sum(trajectory.num_trained for trajectory in trajectories)
    for packed in batch.packed:
        (logprobs(model, packed, kernels=setting.kernels).sum() / -trained).backward()  # type: ignore[no-untyped-call]
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def _describe(
    arm: StepArm, trajectories: Sequence[Trajectory], setting: Setting, batch: Batch, device: torch.device
) -> dict[str, Any]:
    """What ran, and how much memory it took."""
    return {
        "arm": arm,
        "recompute": setting.recompute,
        "fused": setting.fused and arm != "plain",
        "kernels": "transformers" if arm == "plain" else dataclasses.asdict(setting.kernels),
        "token_budget": setting.token_budget,
        "trajectories": len(trajectories),
        "tokens": batch.tree.num_tokens,
        "rows": batch.tree.num_rows,
        "head_rows": count(batch.tree).trained_rows,
        "microbatches": len(trajectories) if arm == "plain" else len(batch.packed),
        "replayed_rows": 0 if arm == "plain" else batch.plan.replayed_rows,
        "recomputed_rows": 0 if arm == "plain" else batch.plan.recomputed_rows,
        "tree_plan_layout_s": round(batch.tree_s + batch.plan_s + batch.layout_s, 4),
        "peak_gib": round(torch.cuda.max_memory_allocated(device) / 2**30, 2) if device.type == "cuda" else None,
    }


def _set_up(model: nn.Module, arm: StepArm, setting: Setting) -> None:
    """Brings the model into the state that the arm runs in."""
    unfuse(model)
    if arm == "plain":
        detach(model)
    else:
        attach(model)
        if setting.fused:
            fuse(model)
    inner: Any = model
    if setting.recompute:
        inner.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    else:
        inner.gradient_checkpointing_disable()


def _plain_step(model: nn.Module, trajectories: Sequence[Trajectory], num_tokens: int) -> Tensor:
    """Forward and backward of one row after the other through transformers' own code; clears the gradients."""
    backbone = find_backbone(model)
    device = next(model.parameters()).device
    trained = sum(trajectory.num_trained for trajectory in trajectories)
    head: Any = backbone.head
    parts = []
    for trajectory in trajectories:
        packed = pack(PrefixTree.build([trajectory]), device=device)
        hidden = backbone.text(input_ids=packed.token_ids_T[None], use_cache=False).last_hidden_state[0]
        values_M, _ = row_logprobs(hidden, head.weight, packed, chunk_rows=4096, impl="chunked")
        (values_M.sum() / -trained).backward()  # type: ignore[no-untyped-call]
        values_N = torch.zeros(len(trajectory), dtype=torch.float64)
        values_N[packed.loss_mask_N.cpu()] = values_M.detach().to(values_N)
        parts.append(values_N)
    model.zero_grad(set_to_none=True)
    scores_N = torch.cat(parts)
    return torch.nn.functional.pad(scores_N, (0, num_tokens - len(scores_N)))


def _check(scores_N: Tensor, baseline_N: Tensor | None, tree: PrefixTree, tolerance: float) -> dict[str, Any]:
    """Compares log-probs of trained tokens with those of packed rows."""
    mask_N = torch.cat([torch.from_numpy(each.loss_mask.copy()) for each in tree.trajectories])
    if not torch.isfinite(scores_N).all():
        return {"check": "failed", "logprob_max_abs": math.inf}
    found: dict[str, Any] = {
        "check": "none",
        "logprob_mean": round(float(scores_N[mask_N].mean()), 6),
        # equal where every log-prob has the same bits, so that runs of different processes can be compared
        "logprob_digest": hashlib.sha256(scores_N[mask_N].float().numpy().tobytes()).hexdigest()[:16],
    }
    if baseline_N is None:
        return found
    difference_N = (scores_N - baseline_N)[mask_N].abs()
    worst = float(difference_N.max())
    return found | {
        "check": "passed" if worst <= tolerance else "failed",
        "logprob_max_abs": worst,
        "logprob_mean_abs": float(difference_N.mean()),
        "bitwise_equal": round(float((difference_N == 0).double().mean()), 7),
    }


@contextlib.contextmanager
def profiled(path: str) -> Iterator[None]:
    """Writes which kernels a region spends its time in, as a table."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, acc_events=True) as profile:
        yield
    events = [event for event in profile.key_averages() if event.device_type.name == "CUDA"]
    total = sum(event.self_device_time_total for event in events)
    with open(path, "w") as file:
        for event in sorted(events, key=lambda event: -event.self_device_time_total)[:80]:
            spent = event.self_device_time_total
            file.write(f"{100 * spent / total:6.2f} %  {spent / 1e3:10.2f} ms  {event.count:6d} x  {event.key[:140]}\n")


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
