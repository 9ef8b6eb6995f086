"""The ways to run one training step of a batch that are timed against each other.

- rows: packed separate rows; nothing is shared.
- merged: a row is merged into one that continues all of it, what a framework can do without a tree.
- tree: every common prefix.
- shuffled: rows again, its microbatches in the opposite order; what differs from rows is the noise of a rerun.
- plain: what a user has without HARTS: transformers (with fla-core on a GPU, where it is installed), SDPA, one row a
  call, and a head that runs in chunks.

All but the last run the same ops of HARTS under one token budget, and differ in what they share alone.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor, nn

from harts.cost import CostModel
from harts.layout import PackedTree, pack
from harts.models import attach, detach, logprobs
from harts.models.attach import find_backbone
from harts.models.fuse import fuse, unfuse
from harts.models.recompute import keep_activations, recompute_activations
from harts.ops import row_logprobs
from harts.ops.kernels import Kernels
from harts.plan import Plan, make_plan
from harts.trajectory import Trajectory
from harts.tree import PrefixTree, Share

__all__ = ["ARMS", "Arm", "Batch", "Setting", "prepare", "run_step", "set_up"]

Arm = Literal["rows", "merged", "tree", "shuffled", "plain"]

ARMS: Mapping[Arm, Share] = MappingProxyType(
    {"rows": "none", "merged": "prefix", "tree": "tree", "shuffled": "none", "plain": "none"}
)
"""What each arm merges; see `PrefixTree.build`."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What is the same in all arms of a comparison.

    Attributes:
        token_budget: most rows of a microbatch, at least the longest trajectory.
        kernels: implementations of the ops; None: what `harts.logprobs` takes. Not of the arm plain.
        fused: norms, MLPs and gated attention run fused (`harts.models.fuse`); not in the arm plain.
        recompute: every layer's activations are computed again in the backward.
        cost_model: what the plans balance; None: rows.
    """

    token_budget: int
    kernels: Kernels | None = None
    fused: bool = False
    recompute: bool = False
    cost_model: CostModel | None = None


@dataclass(frozen=True, eq=False)
class Batch:
    """A batch ready to run.

    Attributes:
        arm: how it is run.
        tree: of the whole batch.
        plan: its microbatches.
        packed: one per microbatch.
        tree_s, plan_s, layout_s: seconds that building each took, moves to the device included.
    """

    arm: Arm
    tree: PrefixTree
    plan: Plan
    packed: tuple[PackedTree, ...]
    tree_s: float
    plan_s: float
    layout_s: float


def set_up(model: nn.Module, arm: Arm, setting: Setting) -> None:
    """Brings a supported model into the state that an arm runs in: attached or not, fused or not, recomputing or not.

    Raises:
        ValueError: the model is not supported, or cannot be fused.
    """
    if arm == "plain":
        detach(model)
    else:
        unfuse(attach(model))
        if setting.fused:
            fuse(model)
    (recompute_activations if setting.recompute else keep_activations)(model)


def prepare(
    trajectories: Sequence[Trajectory], arm: Arm, setting: Setting, *, device: torch.device | str = "cpu"
) -> Batch:
    """Builds the tree, plans its microbatches and lays them out, with times."""
    start = time.perf_counter()
    tree = PrefixTree.build(trajectories, share=ARMS[arm])
    built = time.perf_counter()
    plan = make_plan(tree, token_budget=setting.token_budget, cost_model=setting.cost_model)
    planned = time.perf_counter()
    packed = []
    for (microbatch,) in plan.microbatches:
        whole = len(microbatch.trajectories) == len(trajectories)
        members = [trajectories[index] for index in microbatch.trajectories]
        packed.append(pack(tree if whole else PrefixTree.build(members, share=ARMS[arm]), device=device))
    return Batch(arm, tree, plan, tuple(packed), built - start, planned - built, time.perf_counter() - planned)


def run_step(
    model: nn.Module,
    batch: Batch,
    *,
    kernels: Kernels | None = None,
    weights_B: Sequence[float] | None = None,
    most: int | None = None,
) -> Tensor:
    """Forward and backward of every microbatch; gradients are left in the model.

    The loss is the mean log-prob of the trained tokens, negative, each trajectory's times its weight.

    Args:
        model: in the state of `set_up`.
        batch: from `prepare`.
        kernels: implementations of the ops.
        weights_B: a weight per trajectory; None: 1.
        most: run only this many microbatches.

    Returns:
        Log-probs of all tokens of the batch's trajectories, in their order, [N], fp64, on the CPU; 0 where none ran.
    """
    trained = sum(each.num_trained for each in batch.tree.trajectories)
    offset_B1 = batch.tree.offset_B1
    scores_N = torch.zeros(batch.tree.num_tokens, dtype=torch.float64)
    scored: list[tuple[Sequence[int], Tensor]] = []
    microbatches = list(zip(batch.plan.microbatches, batch.packed, strict=True))[:most]
    for (microbatch,), packed in reversed(microbatches) if batch.arm == "shuffled" else microbatches:
        members: Sequence[int] = microbatch.trajectories
        lengths = [len(batch.tree.trajectories[index]) for index in members]
        weight_B = torch.tensor([1.0 if weights_B is None else weights_B[index] for index in members])
        if batch.arm == "plain":
            alone = [batch.tree.trajectories[index] for index in members]
            values_N = torch.cat(_run_plain(model, alone, weight_B / -trained))
        else:
            values_N = logprobs(model, packed, kernels=kernels)
            weight_N = (weight_B / -trained).repeat_interleave(torch.tensor(lengths)).to(values_N)
            (values_N * weight_N).sum().backward()  # type: ignore[no-untyped-call]
        scored.append((members, values_N.detach()))
    for members, values_N in scored:  # at the end, so that no copy waits for the device between microbatches
        lengths = [len(batch.tree.trajectories[index]) for index in members]
        for index, values in zip(members, torch.split(values_N.to(scores_N), lengths), strict=True):
            scores_N[offset_B1[index] : offset_B1[index + 1]] = values
    return scores_N


def _run_plain(model: nn.Module, trajectories: Sequence[Trajectory], weight_B: Tensor) -> list[Tensor]:
    """One row after the other through transformers' own code."""
    backbone = find_backbone(model)
    head: Any = backbone.head
    parts = []
    for trajectory, weight in zip(trajectories, weight_B.tolist(), strict=True):
        packed = pack(PrefixTree.build([trajectory]), device=head.weight.device)
        hidden = backbone.text(input_ids=packed.token_ids_T[None], use_cache=False).last_hidden_state[0]
        values_M, _ = row_logprobs(hidden, head.weight, packed, chunk_rows=4096, impl="chunked")
        (values_M.sum() * weight).backward()  # type: ignore[no-untyped-call]
        values_N = values_M.new_zeros(len(trajectory))
        values_N[packed.loss_mask_N] = values_M.detach()
        parts.append(values_N)
    return parts
