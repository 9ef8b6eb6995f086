"""How exact are bf16 gradients on a tree, beside those of packed rows: both against fp32, parameter by parameter.

The loss weighs each trajectory's log-probs with an advantage of its own, as a policy gradient does. Arms are those of
`harts.testing.arms`.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
import torch
from torch import Tensor, nn

from harts.ops.kernels import Kernels
from harts.testing.arms import Arm, Setting, prepare, run_step, set_up
from harts.trajectory import Trajectory

__all__ = ["GradientErrors", "gradient_errors"]

Gradients = Mapping[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class GradientErrors:
    """Relative errors |g - g_fp32| / |g_fp32| (2-norms) of each parameter's gradient.

    Attributes:
        parameters: how many there are.
        rows_median, tree_median: median errors of the two arms.
        ratio_median: median over the parameters of the tree's error over that of rows.
        ratio_worst: the largest, of the parameter `worst`, which has `worst_size` numbers.
        ratio_worst_matrix: the largest of parameters with two dimensions or more.
        ratio_whole: the same of all parameters' gradients as one vector.
        tree_from_rows, rerun_from_rows: median relative difference from the gradients of rows, of the tree and of
            rows in the opposite order of microbatches.
    """

    parameters: int
    rows_median: float
    tree_median: float
    ratio_median: float
    ratio_worst: float
    worst: str
    worst_size: int
    ratio_worst_matrix: float
    ratio_whole: float
    tree_from_rows: float
    rerun_from_rows: float


def gradient_errors(
    model: nn.Module, trajectories: Sequence[Trajectory], setting: Setting, *, seed: int = 0
) -> GradientErrors:
    """Runs rows, tree and shuffled rows in the model's dtype, then rows in fp32 with the plain ops.

    Args:
        model: of a supported family, in bf16 or fp16; its gradients are cleared. Its parameters are widened for the
            fp32 run and come back as they were.
        trajectories: the batch. The fp32 run is slow.
        setting: of the runs in the model's dtype.
        seed: of the advantages.

    Raises:
        ValueError: the model is in fp32 or wider, nothing is trained, or what `harts.logprobs` refuses.
    """
    dtype = next(model.parameters()).dtype
    if dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(
            f"model: expected bfloat16 or float16 to compare with fp32, got {dtype}; convert it (harts bench: --dtype "
            "bfloat16)"
        )
    if not any(each.loss_mask.any() for each in trajectories):
        raise ValueError("trajectories: expected a trained token, got none; there are no gradients")
    weights_B = np.random.default_rng(seed).normal(size=len(trajectories)).tolist()
    arms: tuple[Arm, ...] = ("rows", "tree", "shuffled")
    ours = {arm: _gradients(model, arm, trajectories, setting, weights_B) for arm in arms}
    plain = Kernels(chunk_rows=1024)
    wide = dataclasses.replace(setting, kernels=plain, fused=False)
    narrow = [(parameter, parameter.data) for parameter in model.parameters()]
    try:
        for parameter, values in narrow:  # not model.float(), whose way back would round the fp32 buffers of positions
            parameter.data = values.float()
        truth = _gradients(model, "rows", trajectories, wide, weights_B)
    finally:
        model.zero_grad(set_to_none=True)
        for parameter, values in narrow:
            parameter.data = values
    errors = {arm: _relative(ours[arm], truth) for arm in ("rows", "tree")}
    ratios = {name: errors["tree"][name] / max(errors["rows"][name], 1e-30) for name in truth}
    worst = max(ratios, key=lambda name: ratios[name])
    return GradientErrors(
        parameters=len(ratios),
        rows_median=median(errors["rows"].values()),
        tree_median=median(errors["tree"].values()),
        ratio_median=median(ratios.values()),
        ratio_worst=ratios[worst],
        worst=worst,
        worst_size=truth[worst].numel(),
        ratio_worst_matrix=max(ratio for name, ratio in ratios.items() if truth[name].ndim > 1),
        ratio_whole=_distance(ours["tree"], truth) / max(_distance(ours["rows"], truth), 1e-30),
        tree_from_rows=median(_relative(ours["tree"], ours["rows"]).values()),
        rerun_from_rows=median(_relative(ours["shuffled"], ours["rows"]).values()),
    )


def _gradients(
    model: nn.Module, arm: Arm, trajectories: Sequence[Trajectory], setting: Setting, weights_B: Sequence[float]
) -> dict[str, Tensor]:
    """Gradients by parameter name; clears those of the model."""
    set_up(model, arm, setting)
    batch = prepare(trajectories, arm, setting, device=next(model.parameters()).device)
    run_step(model, batch, kernels=setting.kernels, weights_B=weights_B)
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def _relative(ours: Gradients, truth: Gradients) -> dict[str, float]:
    return {
        name: float((ours[name].float() - wide.float()).norm() / wide.float().norm().clamp_min(1e-30))
        for name, wide in truth.items()
    }


def _distance(ours: Gradients, truth: Gradients) -> float:
    return float(torch.stack([(ours[name].float() - wide).norm() for name, wide in truth.items()]).norm())
