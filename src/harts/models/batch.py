"""What `harts.logprobs` takes as a batch, laid out where the model computes."""

from collections.abc import Sequence

from torch import nn

from harts.layout import PackedTree, pack
from harts.models.sharded import compute_device
from harts.trajectory import Trajectory
from harts.tree import PrefixTree

__all__ = ["Batch", "check_token_budget", "lay_out_batch"]

Batch = PackedTree | PrefixTree | Sequence[Trajectory]


def lay_out_batch(batch: Batch, model: nn.Module) -> PackedTree:
    """The batch packed, on the device where the model computes; a `PackedTree` stays as and where it is.

    Raises:
        ValueError: it is something else, or empty, or a piece of a tree.
    """
    if isinstance(batch, PackedTree):
        if not batch.is_whole:
            raise ValueError("batch: expected a whole tree, got a piece of one; pass what it was cut from")
        return batch
    if isinstance(batch, Sequence) and all(isinstance(each, Trajectory) for each in batch):
        batch = PrefixTree.build(batch)
    if not isinstance(batch, PrefixTree):
        raise ValueError(
            f"batch: expected trajectories, a PrefixTree or a PackedTree, got {type(batch).__name__}; read files with "
            "harts.read"
        )
    return pack(batch, device=compute_device(model))


def check_token_budget(token_budget: int | None) -> None:
    """Raises ValueError where it is no positive whole number."""
    if token_budget is None:
        return
    if isinstance(token_budget, bool) or not isinstance(token_budget, int) or token_budget < 1:
        raise ValueError(
            f"token_budget: expected a positive number of rows, got {token_budget!r}; leave it out to run trees whole"
        )
