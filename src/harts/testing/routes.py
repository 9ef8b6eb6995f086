"""Do tokens run on the same experts on a tree as on packed separate rows, and twice the same?

Where two experts have nearly the same probability, a last bit decides which one runs, and a token's output jumps. So
the measure of a mixture-of-experts model's stability is how often the experts of a (token, layer) differ, as sets.

Shape suffixes: N tokens of all trajectories, K experts per token, Y mixture-of-experts layers.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from harts.layout import pack
from harts.models import RouterConfig, score_tree
from harts.models.attach import find_backbone
from harts.ops.kernels import Kernels
from harts.trajectory import Trajectory
from harts.tree import PrefixTree, Share

__all__ = ["RouteStability", "has_routers", "route_difference", "route_stability"]


@dataclass(frozen=True, kw_only=True)
class RouteStability:
    """How often a model's routes differ.

    Attributes:
        dtype: of the model.
        exact: whether routers ran in fp32 with ties broken by index.
        tokens, layers: N and Y; fractions are of tokens x layers.
        tree_fraction: between the tree and packed separate rows.
        repeat_fraction: between two runs of packed separate rows.
    """

    dtype: str
    exact: bool
    tokens: int
    layers: int
    tree_fraction: float
    repeat_fraction: float


def has_routers(model: nn.Module) -> bool:
    """Whether a model has mixture-of-experts layers."""
    router = find_backbone(model).family.router_class()
    return router is not None and any(type(module) is router for module in model.modules())


def route_difference(one_YNK: Tensor, other_YNK: Tensor) -> float:
    """Fraction of (layer, token) whose experts differ as sets.

    Args:
        one_YNK, other_YNK: integers [Y, N, K] in any order of K.

    Raises:
        ValueError: shapes differ, or are empty.
    """
    if one_YNK.shape != other_YNK.shape or one_YNK.ndim != 3 or one_YNK.numel() == 0:
        raise ValueError(
            f"routes: expected two of one shape [layers, tokens, experts per token], got {list(one_YNK.shape)} and "
            f"{list(other_YNK.shape)}"
        )
    return float((one_YNK.sort(-1).values != other_YNK.sort(-1).values).any(-1).double().mean())


@torch.no_grad()
def route_stability(
    model: nn.Module, trajectories: Sequence[Trajectory], *, kernels: Kernels | None = None, exact: bool = False
) -> RouteStability:
    """Runs a batch on the tree once and as packed separate rows twice, through the same ops, as one microbatch each.

    Args:
        model: a mixture-of-experts model that `harts.attach` was called on.
        trajectories: the batch; routes recorded in it are forced, and then nothing can differ.
        kernels: implementations of the ops.
        exact: see `RouterConfig`.

    Raises:
        ValueError: the model is dense or not attached, or what `harts.logprobs` refuses.
    """
    parameter = next(model.parameters())
    config = RouterConfig(scope="microbatch", routes=True, exact=exact)

    def run(share: Share) -> Tensor:
        packed = pack(PrefixTree.build(trajectories, share=share), device=parameter.device)
        router = score_tree(model, packed, kernels=kernels, router=config).router
        assert router is not None, "it was asked for"
        assert router.routes_YTK is not None, "the routes were asked for"
        return router.routes_YTK[:, packed.row_of_N]

    tree, rows, again = run("tree"), run("none"), run("none")
    return RouteStability(
        dtype=str(parameter.dtype).removeprefix("torch."),
        exact=exact,
        tokens=rows.shape[1],
        layers=rows.shape[0],
        tree_fraction=route_difference(tree, rows),
        repeat_fraction=route_difference(rows, again),
    )
