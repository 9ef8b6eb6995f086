"""Losses on plain tensors: one value per token of whole trajectories, laid trajectory after trajectory.

Nothing here knows the tree but `sharing`, which counts the trajectories that train a token. Read in this order:
`inputs` (what goes in), `denominators` (what the sums are divided by), `policy` (the objectives, token by token),
`loss` (how the parts are put together).
"""

from harts.losses.advantages import Scale, Singletons, fill_advantages, group_advantages
from harts.losses.config import LossConfig
from harts.losses.denominators import StepDenominators
from harts.losses.inputs import LossInputs, check_trajectories
from harts.losses.kl import kl_estimate
from harts.losses.loss import Loss, LossOutput, make_loss
from harts.losses.metrics import LossMetrics
from harts.losses.sharing import own_once

__all__ = [
    "Loss",
    "LossConfig",
    "LossInputs",
    "LossMetrics",
    "LossOutput",
    "Scale",
    "Singletons",
    "StepDenominators",
    "check_trajectories",
    "fill_advantages",
    "group_advantages",
    "kl_estimate",
    "make_loss",
    "own_once",
]
