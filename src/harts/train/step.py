"""One optimiser step: tree, plan, microbatches forward and backward, update."""

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from harts.cost import CostModel
from harts.losses import Loss, LossConfig, LossInputs, LossMetrics, StepDenominators, make_loss
from harts.models import RouterConfig, logprobs, score_tree
from harts.models.router_losses import RouterStep
from harts.ops.kernels import Kernels
from harts.plan import Plan, check_plan, make_plan
from harts.slots import Microbatch, lay_out
from harts.train.parallel import Replicas
from harts.train.sharding import split_by_kind, whole
from harts.trajectory import Trajectory
from harts.tree import PrefixTree, Share

__all__ = [
    "LIKELIHOOD",
    "Accumulated",
    "Microbatch",
    "StepPlan",
    "accumulate",
    "count_routes",
    "plan_step",
    "score",
    "update",
]

LIKELIHOOD = make_loss(LossConfig(algorithm="supervised"))
"""The mean log-prob of a step's trained tokens, negative: what a step is timed with."""


@dataclass(frozen=True, eq=False)
class StepPlan:
    """A step's schedule.

    Attributes:
        trajectories: of the whole step, on all replicas.
        tree: all of them in one tree.
        plan: slots x replicas.
        microbatches: this replica's, slot after slot.
        seconds: what building all this took.
    """

    trajectories: Sequence[Trajectory]
    tree: PrefixTree
    plan: Plan
    microbatches: Sequence[Microbatch]
    seconds: float

    def to(self, device: torch.device | str) -> "StepPlan":
        """The same with layouts on another device; the time of the move adds to `seconds`."""
        start = time.perf_counter()
        moved = [dataclasses.replace(each, packed=each.packed.to(device)) for each in self.microbatches]
        return dataclasses.replace(self, microbatches=moved, seconds=self.seconds + time.perf_counter() - start)


def plan_step(
    trajectories: Sequence[Trajectory],
    *,
    token_budget: int,
    share: Share = "tree",
    replicas: Replicas | None = None,
    cost_model: CostModel | None = None,
    plan: Plan | None = None,
    check: bool = True,
) -> StepPlan:
    """Plans a step and packs this replica's microbatches, on the CPU.

    Args:
        trajectories: of the whole step, the same on every replica.
        token_budget: most rows of a microbatch.
        share: what is merged.
        replicas: this process among those that train together; None: alone.
        cost_model: what the plan balances; None: rows.
        plan: a plan of these trajectories to follow instead of making one.
        check: whether the quick laws of `check_plan` are checked; a saved plan was checked against the data as they
            were read, whose token ids may have been renamed since.

    Raises:
        ValueError: a trajectory does not fit the budget, or the plan breaks a law.
    """
    start = time.perf_counter()
    replicas = replicas or Replicas()
    tree = PrefixTree.build(trajectories, share=share)
    if plan is None:
        plan = make_plan(tree, token_budget=token_budget, num_replicas=replicas.size, cost_model=cost_model)
    if check:
        check_plan(tree, plan, thorough=False)
    microbatches = lay_out(tree, plan, replicas.rank)
    return StepPlan(trajectories, tree, plan, microbatches, time.perf_counter() - start)


def _counted(router: RouterConfig, microbatch: Microbatch) -> RouterConfig:
    """Settings under which padding counts nothing: it has no trained token."""
    return router if microbatch.indices else dataclasses.replace(router, tokens="trained")


@torch.no_grad()
def score(model: nn.Module, step: StepPlan, *, kernels: Kernels | None = None) -> dict[int, Tensor]:
    """Log-probs of each of this replica's trajectories, by index within the step, without gradients."""
    scores: dict[int, Tensor] = {}
    for microbatch in step.microbatches:
        values = microbatch.packed.split(logprobs(model, microbatch.packed, kernels=kernels))
        scores.update(zip(microbatch.indices, values, strict=False))
    return scores


def count_routes(
    model: nn.Module, step: StepPlan, router: RouterConfig, replicas: Replicas, *, kernels: Kernels | None = None
) -> RouterStep | None:
    """What the routers' losses of the step's microbatches are divided by; scope "step" takes a pass without gradients.

    Returns None in scope "microbatch", where each microbatch has a loss of its own.
    """
    if router.scope == "microbatch":
        return None
    if router.scope == "trajectory":
        return RouterStep.from_trajectories(step.trajectories, tokens=router.tokens)
    with torch.no_grad():
        passes = [
            score_tree(model, microbatch.packed, router=_counted(router, microbatch), kernels=kernels).router
            for microbatch in step.microbatches
        ]
    counts = RouterStep.from_statistics([each.statistics for each in passes if each is not None])
    return counts.all_reduce() if replicas.size > 1 else counts


@dataclass(frozen=True, eq=False)
class Accumulated:
    """What the forward and backward of this replica's share of a step gave, beside gradients.

    Attributes:
        metrics: of the loss, summed over its microbatches.
        router_loss: balancing loss and z-loss times their coefficients, summed; 0 without `router`.
        router_counts: logical loads and tokens, summed; None without `router`.
        logprobs: of each of its trajectories, by index within the step, [tokens], detached.
    """

    metrics: LossMetrics
    router_loss: float
    router_counts: RouterStep | None
    logprobs: dict[int, Tensor]


def accumulate(
    model: nn.Module,
    step: StepPlan,
    loss: Loss,
    *,
    old: dict[int, Tensor] | None = None,
    reference: dict[int, Tensor] | None = None,
    router: RouterConfig | None = None,
    router_step: RouterStep | None = None,
    kernels: Kernels | None = None,
) -> Accumulated:
    """Adds the gradients of this replica's share of the step to `.grad`.

    Args:
        model: attached.
        step: from `plan_step`.
        loss: its denominators are those of the whole step, so microbatches and replicas simply add up.
        old, reference: log-probs of this replica's trajectories from `score`; None takes the recorded ones.
        router: what to ask of the routers of a mixture-of-experts model. In scope "microbatch" the step's loss has the
            mean over its microbatches.
        router_step: from `count_routes`.
        kernels: implementations of the ops.
    """
    denominators = StepDenominators.from_trajectories(step.trajectories, shared_tokens=loss.config.shared_tokens)
    filled = sum(not part.is_empty for slot in step.plan.microbatches for part in slot)
    total: LossMetrics | None = None
    router_loss, statistics = 0.0, []
    values: dict[int, Tensor] = {}
    for microbatch in step.microbatches:
        scores = score_tree(
            model,
            microbatch.packed,
            kernels=kernels,
            entropy="entropy" in loss.requires,
            router=None if router is None else _counted(router, microbatch),
        )
        inputs = LossInputs.from_trajectories(
            microbatch.trajectories,
            scores.logprobs_N,
            sequences=microbatch.indices or (0,),
            entropy=scores.entropy_N,
            old_logprobs=microbatch.pick(old),
            ref_logprobs=microbatch.pick(reference),
            requires=loss.requires,
        )
        output = loss(inputs, denominators)
        value = output.loss
        if scores.router is not None:
            aux = scores.router.aux_loss(router_step) / (filled if router_step is None else 1)
            value = value + aux
            router_loss += float(aux.detach())
            statistics.append(scores.router.statistics)
        value.backward()  # type: ignore[no-untyped-call]
        parts = microbatch.packed.split(scores.logprobs_N.detach())
        values.update(zip(microbatch.indices, parts, strict=False))
        total = output.metrics if total is None else total + output.metrics
    assert total is not None, "a plan has a slot"
    counts = RouterStep.from_statistics(statistics) if statistics else None
    return Accumulated(total, router_loss, counts, values)


def _total_norm(grads: Sequence[Tensor]) -> Tensor:
    """Of all gradients together, those that are sharded with their parts on all replicas."""
    norms = [whole(torch.nn.utils.get_total_norm(alike)) for alike in split_by_kind(grads)]
    return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))


def update(
    optimizer: torch.optim.Optimizer, replicas: Replicas, *, learning_rate: float, max_grad_norm: float | None
) -> float:
    """Sums gradients over replicas where FSDP has not, bounds their norm, steps, clears them.

    Returns the norm before it was bounded.

    Raises:
        ValueError: the gradient is not finite; parameters and optimiser are as before.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    replicas.sum_gradients(parameters)
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm = _total_norm(grads)
    if not torch.isfinite(norm):
        raise ValueError(f"gradient norm: expected a finite number, got {norm.item()}; nothing was updated")
    if max_grad_norm is not None:
        for alike in split_by_kind(parameters):
            torch.nn.utils.clip_grads_with_norm_(alike, max_grad_norm, norm)
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return float(norm)
