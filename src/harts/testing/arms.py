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
from harts.ops.logprobs.indices import targets_of_tokens
from harts.ops.rows import gather_rows
from harts.plan import Plan, make_plan
from harts.trajectory import Trajectory
from harts.transfer import send
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
        keep_attention: outputs of full attention are then kept; not in the arm plain.
        cost_model: what the plans balance; None: rows.
    """

    token_budget: int
    kernels: Kernels | None = None
    fused: bool = False
    recompute: bool = False
    keep_attention: bool = False
    cost_model: CostModel | None = None


@dataclass(frozen=True, eq=False)
class Batch:
    """A batch ready to run.

    Attributes:
        arm: how it is run.
        tree: of the whole batch.
        plan: its microbatches.
        packed: one per microbatch; of the arm plain one per trajectory, in the order of the plan.
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
    plan = make_plan(tree, token_budget=setting.token_budget, cost_model=setting.cost_model)
    planned = time.perf_counter()
    packed: list[PackedTree] = []
    for (microbatch,) in plan.microbatches:
        members = [trajectories[index] for index in microbatch.trajectories]
        if arm == "plain":
            trees = [PrefixTree.build([each]) for each in members]
        else:
            trees = [tree if len(members) == len(trajectories) else PrefixTree.build(members, share=ARMS[arm])]
        packed.extend(pack(each, device=device) for each in trees)
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

    Raises:
        ValueError: no token is trained.
    """
    trajectories, offset_B1 = batch.tree.trajectories, batch.tree.offset_B1
    trained = sum(each.num_trained for each in trajectories)
    if not trained:
        raise ValueError(
            f"loss_mask: expected a trained token in at least one of {len(trajectories)} trajectories, got none; mark "
            "the sampled tokens in loss_mask"
        )
    share = -1.0 / trained
    scores_N = torch.zeros(batch.tree.num_tokens, dtype=torch.float64)
    parts: list[tuple[Sequence[int], PackedTree, float | Tensor]] = []
    for members, packed in _parts(batch)[:most]:
        if weights_B is None:
            parts.append((members, packed, share))
        else:
            weights = [torch.full((len(trajectories[i]),), weights_B[i] * share) for i in members]
            parts.append((members, packed, send(torch.cat(weights), packed.device)))
    scored: list[tuple[Sequence[int], Tensor]] = []
    for members, packed, weight in reversed(parts) if batch.arm == "shuffled" else parts:
        plain = batch.arm == "plain"
        values_N = _plain_logprobs(model, packed) if plain else logprobs(model, packed, kernels=kernels)
        (values_N * weight).sum().backward()  # type: ignore[no-untyped-call]
        scored.append((members, values_N.detach()))
    for members, values_N in scored:  # at the end, so that no copy waits for the device between microbatches
        lengths = [len(trajectories[index]) for index in members]
        for index, values in zip(members, torch.split(values_N.cpu(), lengths), strict=True):
            scores_N[offset_B1[index] : offset_B1[index + 1]] = values
    return scores_N


def _parts(batch: Batch) -> list[tuple[Sequence[int], PackedTree]]:
    """Trajectories that run in one call, and their layout."""
    members: list[Sequence[int]] = [microbatch.trajectories for (microbatch,) in batch.plan.microbatches]
    if batch.arm == "plain":
        members = [(index,) for each in members for index in each]
    return list(zip(members, batch.packed, strict=True))


def _plain_logprobs(model: nn.Module, packed: PackedTree) -> Tensor:
    """Log-probs of one trajectory through transformers' own code, in the form of `harts.logprobs`."""
    backbone = find_backbone(model)
    head: Any = backbone.head
    hidden_TD = backbone.text(input_ids=packed.token_ids_T[None], use_cache=False).last_hidden_state[0]
    values_M, _ = row_logprobs(hidden_TD, head.weight, packed, bias_V=head.bias, chunk_rows=4096, impl="chunked")
    return gather_rows(values_M, packed.layout(targets_of_tokens), missing=True)
