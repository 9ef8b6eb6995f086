"""microbatches: trajectories, a budget and replicas in; what this replica runs, slot after slot, out.

Every replica gets as many microbatches as the others, so that collective calls of a step meet. Gradients of all of them
add up to those of the whole batch if a loss divides by counts of the whole batch, not of a microbatch.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from harts.cost import CostModel
from harts.layout import PackedTree, pack
from harts.plan import Plan, make_plan
from harts.trajectory import Trajectory
from harts.tree import PrefixTree, Share

__all__ = ["PADDING", "Microbatch", "lay_out", "microbatches"]


PADDING = Trajectory(
    token_ids=np.zeros(1, np.int32),
    loss_mask=np.zeros(1, np.bool_),
    id="padding row",
    group="padding row",
    logprobs=np.zeros(1),
    ref_logprobs=np.zeros(1),
    advantages=np.zeros(1),
)
"""One token that is not trained: what a replica runs that has nothing left to do."""


@dataclass(frozen=True, eq=False)
class Microbatch:
    """What one replica runs in one slot.

    Attributes:
        indices: its trajectories within the step; empty where this replica has nothing left to do.
        trajectories: those, or padding of one token without a trained one, so that every replica runs something in
            every slot. Its log-probability is 0 and carries no gradient; a sum over it is 0, a mean is not a number.
        packed: their rows, for `harts.logprobs`.
    """

    indices: tuple[int, ...]
    trajectories: Sequence[Trajectory]
    packed: PackedTree

    def pick(self, values: dict[int, Tensor] | None) -> Tensor | None:
        """[N]: values by index within the step, of this microbatch's trajectories; zeros for padding."""
        if values is None:
            return None
        if not self.indices:
            return torch.zeros(self.packed.num_tokens, device=self.packed.device)
        return torch.cat([values[index] for index in self.indices])


def microbatches(
    trajectories: Sequence[Trajectory],
    *,
    token_budget: int,
    replicas: int = 1,
    rank: int | None = None,
    share: Share = "tree",
    cost_model: CostModel | None = None,
    device: torch.device | str = "cpu",
) -> list[Microbatch]:
    """Cuts the trajectories of one step into microbatches and lays out those of this replica.

    Args:
        trajectories: of the whole step, the same ones in the same order on every replica; at least one.
        token_budget: most rows of a microbatch, recomputed and replayed ones included; at least the longest trajectory.
        replicas: data-parallel replicas of the model.
        rank: which of them this is; needed where there are several.
        share: what is merged, see `PrefixTree.build`.
        cost_model: what the plan balances, from `harts calibrate`; None: rows.
        device: where the layouts go: that of the model.

    Returns:
        One microbatch a slot. Over all replicas, each trajectory is in exactly one.

    Raises:
        ValueError: an argument does not fit, or a trajectory alone exceeds the budget; see also `harts.make_plan`.
    """
    if rank is None and replicas == 1:
        rank = 0
    if isinstance(rank, bool) or not isinstance(rank, int | np.integer) or not 0 <= rank < replicas:
        raise ValueError(
            f"rank: expected which of the {replicas} replicas this is, an integer in [0, {replicas}), got {rank!r}; "
            "pass torch.distributed.get_rank()"
        )
    tree = PrefixTree.build(trajectories, share=share)
    plan = make_plan(tree, token_budget=token_budget, num_replicas=replicas, cost_model=cost_model)
    return lay_out(tree, plan, int(rank), device=device)


def lay_out(tree: PrefixTree, plan: Plan, rank: int, *, device: torch.device | str = "cpu") -> list[Microbatch]:
    """Layouts of one replica's microbatches, slot after slot.

    Args:
        tree: what was planned.
        plan: of that tree.
        rank: the replica.
        device: where the layouts go.
    """
    made = []
    for slot in plan.microbatches:
        indices = slot[rank].trajectories
        subtree = tree.subset(indices) if indices else PrefixTree.build([PADDING])
        made.append(Microbatch(indices, subtree.trajectories, pack(subtree, device=device)))
    return made
