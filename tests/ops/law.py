"""The equality law: an op on the tree, unpacked, equals the op on each trajectory, outputs and all gradients."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from harts.layout import PackedTree


def law_errors(
    on_tree: Callable[..., Tensor],
    on_trajectory: Callable[..., Tensor],
    packed: PackedTree,
    rows: Sequence[Tensor],
    shared: Sequence[Tensor] = (),
) -> dict[str, float]:
    """Largest relative difference of the outputs and of each gradient.

    Args:
        on_tree: takes `rows` (tensors over the T rows) and `shared` (weights), gives a tensor over the T rows.
        on_trajectory: the same for the tokens of one trajectory.
    """
    inputs = [x.clone().requires_grad_() for x in (*rows, *shared)]
    out_N = on_tree(*inputs)[packed.row_of_N]
    weight_N = torch.randn(out_N.shape, dtype=out_N.dtype, generator=torch.Generator().manual_seed(1))
    tree_grads = torch.autograd.grad((out_N * weight_N).sum(), inputs)

    inputs = [x.clone().requires_grad_() for x in (*rows, *shared)]
    parts = []
    for row_L in packed.split(packed.row_of_N):
        parts.append(on_trajectory(*[x[row_L] for x in inputs[: len(rows)]], *inputs[len(rows) :]))
    expected_N = torch.cat(parts)
    expected_grads = torch.autograd.grad((expected_N * weight_N).sum(), inputs)

    errors = {"output": relative(out_N, expected_N)}
    for index, (ours, theirs) in enumerate(zip(tree_grads, expected_grads, strict=True)):
        errors[f"grad {index}"] = relative(ours, theirs)
    return errors


def relative(ours: Tensor, theirs: Tensor) -> float:
    """Largest difference over the largest magnitude; infinite where ours is not finite."""
    if not torch.isfinite(ours).all():
        return float("inf")
    return float((ours.detach() - theirs.detach()).abs().max() / theirs.detach().abs().max().clamp_min(1e-30))
