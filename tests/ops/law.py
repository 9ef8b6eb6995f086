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
    """Largest difference of the outputs and of each gradient, relative to their size or to the op's own magnitude.

    A gradient may be zero but for rounding, as that of a query that sees one key: divided by itself it says nothing.
    So a difference is divided by at least `magnitude` of the input.

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

    terms_N = (expected_N * weight_N).detach().abs().flatten(1).sum(1)
    largest = float(terms_N.new_zeros(packed.num_rows).index_add(0, packed.row_of_N, terms_N).max())
    errors = {"output": relative(out_N, expected_N)}
    for index, (ours, theirs, x) in enumerate(zip(tree_grads, expected_grads, inputs, strict=True)):
        errors[f"grad {index}"] = relative(ours, theirs, least=magnitude(largest, x))
    return errors


def magnitude(terms: float, x: Tensor) -> float:
    """A gradient of `x` that adds up to `terms`, the absolute terms of the loss at one row: terms over the size of x.

    For an op that is linear in x, gradient times x adds up to the terms of the loss themselves.
    """
    return terms / float(x.detach().abs().max().clamp_min(1e-30))


def relative(ours: Tensor, theirs: Tensor, least: float = 1e-30) -> float:
    """Largest difference over the largest magnitude or `least`, if that is more; infinite where ours is not finite."""
    if not torch.isfinite(ours).all():
        return float("inf")
    size = max(float(theirs.detach().abs().max()), least)
    return float((ours.detach() - theirs.detach()).abs().max()) / size
