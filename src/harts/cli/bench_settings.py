"""How the arms of `harts bench` run: what was asked for, and what that is for one model and its data."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from harts.cost import CostModel, count, model_identity
from harts.models import attach, default_kernels
from harts.models.attach import find_backbone
from harts.models.fuse import can_fuse
from harts.models.recompute import check_kept
from harts.testing.arms import Setting
from harts.trajectory import Trajectory
from harts.tree import PrefixTree

__all__ = ["CPU_BUDGET", "Wishes"]

CPU_BUDGET, _GPU_BUDGET = 8_192, 65_536


@dataclass(frozen=True, kw_only=True)
class Wishes:
    """Options of the command, where None leaves the choice to `setting`.

    Attributes:
        token_budget, memory, recompute, keep_attention, fuse, deterministic: see `harts.cli.bench_options`.
        cost_model: a file.
    """

    token_budget: int | None
    memory: str | None
    recompute: bool | None
    keep_attention: bool
    fuse: bool | None
    deterministic: bool
    cost_model: Path | None

    def setting(self, model: nn.Module, trajectories: Sequence[Trajectory], *, on_cpu: bool) -> Setting:
        """The setting of all arms; attaches the model.

        Raises:
            ValueError: a wish does not fit the model, or the cost model is of another.
        """
        if self.memory is not None and (self.token_budget or self.recompute is not None or self.keep_attention):
            raise ValueError(
                "memory: expected no token_budget, recompute or keep_attention beside it, as it chooses pieces and "
                "recomputation for each arm; leave them out"
            )
        longest = max(map(len, trajectories))
        whole = max(count(PrefixTree.build(trajectories)).linear_rows, longest, _GPU_BUDGET)
        price = None
        if self.cost_model is not None:
            price = CostModel.load(self.cost_model, model=model_identity(find_backbone(model).config))
        kernels = default_kernels(model, deterministic=self.deterministic)
        recompute = not on_cpu if self.recompute is None else self.recompute
        if self.memory is not None:
            recompute = False  # where an arm does, its FLOPs are still those of the model
        check_kept(kernels, recompute=recompute, keep_attention=self.keep_attention)
        return Setting(
            token_budget=self.token_budget or (CPU_BUDGET if on_cpu else whole),
            kernels=kernels,
            fused=can_fuse(attach(model)) if self.fuse is None else self.fuse,
            recompute=recompute,
            keep_attention=self.keep_attention,
            cost_model=price,
            memory=self.memory,
        )
