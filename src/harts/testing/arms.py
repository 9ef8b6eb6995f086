"""The ways to run one training step of a batch that are timed against each other.

- rows: packed separate rows; nothing is shared.
- merged: a row is merged into one that continues all of it, what a framework can do without a tree.
- tree: every common prefix.
- shuffled: rows again, its microbatches in the opposite order; what differs from rows is the noise of a rerun.
- plain: what a user has without HARTS: transformers (with fla-core on a GPU, where it is installed), SDPA, one row a
  call, and a head that runs in chunks.

All but the last run the step that `harts train` runs (`harts.train.step.accumulate`) under one token budget, and differ
in what they share alone.
"""

import dataclasses
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from harts.cost import CostModel
from harts.layout import PackedTree, pack
from harts.losses import Loss, LossConfig, LossInputs, LossMetrics, StepDenominators, make_loss
from harts.models import attach, detach
from harts.models.attach import find_backbone
from harts.models.fuse import fuse, unfuse
from harts.models.memory import Memory
from harts.models.recompute import keep_activations, recompute_activations
from harts.ops import row_logprobs
from harts.ops.kernels import Kernels
from harts.ops.logprobs.indices import targets_of_tokens
from harts.ops.rows import gather_rows
from harts.plan import Plan, make_plan
from harts.slots import Microbatch, lay_out
from harts.testing.in_memory import run_in_memory
from harts.train.step import LIKELIHOOD, Accumulated, StepPlan, accumulate
from harts.trajectory import Trajectory
from harts.tree import PrefixTree, Share

__all__ = ["ARMS", "Arm", "Batch", "Setting", "prepare", "run_step", "set_up"]

Arm = Literal["rows", "merged", "tree", "shuffled", "plain"]

ARMS: Mapping[Arm, Share] = MappingProxyType(
    {"rows": "none", "merged": "prefix", "tree": "tree", "shuffled": "none", "plain": "none"}
)
"""What each arm merges; see `PrefixTree.build`."""


_WEIGHTED = make_loss(LossConfig(algorithm="reinforce"))


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What is the same in all arms of a comparison.

    Attributes:
        token_budget: most rows of a microbatch, at least the longest trajectory.
        kernels: implementations of the ops; None: what `harts.logprobs` takes. Not of the arm plain.
        fused: norms, MLPs and gated attention run fused (`harts.models.fuse`); not in the arm plain.
        recompute: every layer's activations are computed again in the backward.
        keep_attention: outputs of full attention are then kept; not in the arm plain.
        cost_model: what the plans balance; None: rows.
        memory: most bytes on the device; then an arm runs its whole batch in one call, in pieces and with recomputation
            as they fit it best (`harts.testing.in_memory`). None: as the rest says.
    """

    token_budget: int
    kernels: Kernels | None = None
    fused: bool = False
    recompute: bool = False
    keep_attention: bool = False
    cost_model: CostModel | None = None
    memory: Memory | None = None


@dataclass(frozen=True, eq=False)
class Batch:
    """A batch ready to run.

    Attributes:
        arm: how it is run.
        step: the batch as a training step of one replica; of the arm plain a microbatch has one trajectory.
        tree_s, plan_s, layout_s: seconds that building each took, moves to the device included.
    """

    arm: Arm
    step: StepPlan
    tree_s: float
    plan_s: float
    layout_s: float

    @property
    def tree(self) -> PrefixTree:
        """Of the whole batch."""
        return self.step.tree

    @property
    def plan(self) -> Plan:
        """What its microbatches were planned as."""
        return self.step.plan

    @property
    def packed(self) -> tuple[PackedTree, ...]:
        """The layout of each call."""
        return tuple(microbatch.packed for microbatch in self.step.microbatches)


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
    if setting.recompute:
        recompute_activations(model, keep_attention=setting.keep_attention and arm != "plain")
    else:
        keep_activations(model)


def prepare(
    trajectories: Sequence[Trajectory], arm: Arm, setting: Setting, *, device: torch.device | str = "cpu"
) -> Batch:
    """Builds the tree, plans its microbatches and lays them out, with times."""
    start = time.perf_counter()
    tree = PrefixTree.build(trajectories, share=ARMS[arm])
    built = time.perf_counter()
    budget = setting.token_budget if setting.memory is None else 2 * tree.num_tokens  # more than rows and replayed ones
    plan = make_plan(tree, token_budget=budget, cost_model=setting.cost_model)
    planned = time.perf_counter()
    microbatches: list[Microbatch] = []
    if arm == "plain":
        for index in (index for (part,) in plan.microbatches for index in part.trajectories):
            alone = PrefixTree.build([trajectories[index]])
            microbatches.append(Microbatch((index,), alone.trajectories, pack(alone, device=device)))
    else:
        microbatches = lay_out(tree, plan, 0, device=device)
    laid_out = time.perf_counter()
    step = StepPlan(trajectories, tree, plan, microbatches, laid_out - start)
    return Batch(arm, step, built - start, planned - built, laid_out - planned)


def run_step(
    model: nn.Module,
    batch: Batch,
    *,
    kernels: Kernels | None = None,
    weights_B: Sequence[float] | None = None,
    most: int | None = None,
    memory: Memory | None = None,
) -> Tensor:
    """Forward and backward of every microbatch; gradients are left in the model.

    The loss is the mean log-prob of the trained tokens, negative, each trajectory's times its weight.

    Args:
        model: in the state of `set_up`.
        batch: from `prepare`.
        kernels: implementations of the ops.
        weights_B: a weight per trajectory; None: 1.
        most: run only this many microbatches.
        memory: of `Setting`.

    Returns:
        Log-probs of all tokens of the batch's trajectories, in their order, [N], fp64, on the CPU; 0 where none ran.

    Raises:
        ValueError: no token is trained.
    """
    trajectories, offset_B1 = batch.tree.trajectories, batch.tree.offset_B1
    if not any(each.num_trained for each in trajectories):
        raise ValueError(
            f"loss_mask: expected a trained token in at least one of {len(trajectories)} trajectories, got none; mark "
            "the sampled tokens in loss_mask"
        )
    microbatches = batch.step.microbatches[:most]
    loss = LIKELIHOOD
    if weights_B is not None:
        microbatches, loss = [_weighted(each, weights_B) for each in microbatches], _WEIGHTED
    if batch.arm == "shuffled":
        microbatches = microbatches[::-1]
    step = dataclasses.replace(batch.step, microbatches=microbatches)
    if memory is None:
        run = _accumulate_plain if batch.arm == "plain" else accumulate
        logprobs = run(model, step, loss, kernels=kernels).logprobs
    else:
        logprobs = run_in_memory(model, step, memory, kernels)
    scores_N = torch.zeros(batch.tree.num_tokens, dtype=torch.float64)
    values = torch.cat(list(logprobs.values())).cpu()  # at the end, in one copy that waits for the device
    lengths = [len(trajectories[index]) for index in logprobs]
    for index, part in zip(logprobs, torch.split(values, lengths), strict=True):
        scores_N[offset_B1[index] : offset_B1[index + 1]] = part
    return scores_N


def _weighted(microbatch: Microbatch, weights_B: Sequence[float]) -> Microbatch:
    """The same with each trajectory's weight as its advantage."""
    weighted = [
        dataclasses.replace(each, advantages=np.full(len(each), weights_B[index]))
        for index, each in zip(microbatch.indices, microbatch.trajectories, strict=True)
    ]
    return dataclasses.replace(microbatch, trajectories=weighted)


def _accumulate_plain(model: nn.Module, step: StepPlan, loss: Loss, *, kernels: Kernels | None = None) -> Accumulated:
    """`harts.train.step.accumulate` through transformers' own code, one trajectory a call."""
    denominators = StepDenominators.from_trajectories(step.trajectories)
    total: LossMetrics | None = None
    logprobs: dict[int, Tensor] = {}
    for microbatch in step.microbatches:
        values_N = _plain_logprobs(model, microbatch.packed)
        inputs = LossInputs.from_trajectories(
            microbatch.trajectories, values_N, sequences=microbatch.indices, requires=loss.requires
        )
        output = loss(inputs, denominators)
        output.loss.backward()  # type: ignore[no-untyped-call]
        total = output.metrics if total is None else total + output.metrics
        logprobs[microbatch.indices[0]] = values_N.detach()
    assert total is not None, "a plan has a slot"
    return Accumulated(total, 0.0, None, logprobs)


def _plain_logprobs(model: nn.Module, packed: PackedTree) -> Tensor:
    """Log-probs of one trajectory through transformers' own code, in the form of `harts.logprobs`."""
    backbone = find_backbone(model)
    head: Any = backbone.head
    hidden_TD = backbone.text(input_ids=packed.token_ids_T[None], use_cache=False).last_hidden_state[0]
    values_M, _ = row_logprobs(hidden_TD, head.weight, packed, bias_V=head.bias, chunk_rows=4096, impl="chunked")
    return gather_rows(values_M, packed.layout(targets_of_tokens), missing=True)
