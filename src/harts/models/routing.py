"""One forward pass as its routers see it: sums them up, and forces recorded experts.

Routers call it through the hooks of `harts.models.router_hooks`. What a router summed is kept once, however often it
runs.

Shape suffixes: T rows of the tree, F rows with the dummy ones of `harts.models.row_floor`, D channels, E experts,
K experts per token, Y mixture-of-experts layers, U units.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from harts.layout import PackedTree
from harts.models.router_losses import RouterStatistics
from harts.models.router_output import RouterConfig, RouterOutput
from harts.models.routers import Router
from harts.models.row_floor import cut_rows, fill_rows
from harts.ops.moe import RouterSums, TokenCount, count_tokens, router_logits, router_scores, router_sums
from harts.transfer import send

__all__ = ["Routing", "start_routing"]


@dataclass(eq=False)
class Routing:
    """One forward pass as its routers see it. Written by the forward, each layer once.

    Attributes:
        config: what to take; None: nothing.
        rows: T. Routers that get more run dummy rows behind them, which are routed, but not counted.
        place: decoder layer -> place among the mixture-of-experts layers.
        router: what they are.
        count: how often rows count; None without a config.
        forced_TYK: int64 [T, Y, K]: recorded experts in row order, -1 where the router chooses; None without any.
        with_grad: whether the auxiliary losses will be differentiated.
        ran: places whose router ran.
        sums, routes: by place.
    """

    config: RouterConfig | None
    rows: int
    place: Mapping[int, int]
    router: Router
    count: TokenCount | None
    forced_TYK: Tensor | None
    with_grad: bool
    ran: set[int] = field(default_factory=set)
    sums: dict[int, RouterSums] = field(default_factory=dict)
    routes: dict[int, Tensor] = field(default_factory=dict)

    def route(
        self, layer: int, router: Any, args: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """What the router of a decoder layer gives: (logits [F, E], weights [F, K], experts [F, K]).

        Args:
            layer: which.
            router: its module.
            args: of its forward; hidden states are the first.
            output: what that gave.
        """
        logits_FE, weight_FK, chosen_FK = output
        place = self.place[layer]
        self.ran.add(place)
        exact = self.config is not None and self.config.exact
        if exact:
            logits_FE = router_logits(args[0].reshape(-1, args[0].shape[-1]), self.router.weight_of(router))
            logits_FE = self.router.finish(router, logits_FE)
        if exact or self.forced_TYK is not None:
            gating = self.router.gating(router)
            scores_FE = router_scores(logits_FE, gating.scores)
            if exact:
                chosen_FK = gating.choose(scores_FE, chosen_FK.shape[1], self.router.bias_of(router, args))
            if self.forced_TYK is not None:
                forced_FK = fill_rows(self.forced_TYK[:, place], len(chosen_FK), value=-1)
                chosen_FK = torch.where(forced_FK >= 0, forced_FK, chosen_FK)
            weight_FK = gating.weigh(scores_FE, chosen_FK).to(weight_FK.dtype)
        if self.config is not None and self.count is not None:
            chosen_TK = cut_rows(chosen_FK, self.rows)
            logits_TE = cut_rows(logits_FE, self.rows)
            sums = router_sums(logits_TE, chosen_TK, self.count, scores=self.router.scores)
            self._keep(place, self.config, sums, chosen_TK)
        return logits_FE, weight_FK, chosen_FK

    def _keep(self, place: int, config: RouterConfig, sums: RouterSums, chosen_TK: Tensor) -> None:
        """Recomputation sums again, as its graph must be the same, and what it sums is dropped here."""
        if place in self.sums:
            return
        if self.with_grad and not torch.is_grad_enabled():
            raise ValueError(
                "model: activations are recomputed with use_reentrant=True, which hides the routers from the auxiliary "
                "losses; enable it with use_reentrant=False, or set both coefficients to 0"
            )
        self.sums[place] = sums
        if config.routes:
            self.routes[place] = chosen_TK.sort(-1).values.to(torch.int16)

    def check_complete(self) -> None:
        """Raises ValueError where a router was passed by, its layer replaced by a kernel perhaps."""
        if len(self.ran) < len(self.place):
            raise ValueError(
                f"model: expected its {len(self.place)} routers to run, {len(self.ran)} did; attach it without kernels "
                "that replace whole mixture-of-experts layers"
            )

    def output(self, experts_per_token: int) -> RouterOutput:
        """What was taken from all layers."""
        assert self.config is not None, "nothing was asked for"
        assert self.count is not None, "nothing was counted"
        sums = [self.sums[place] for place in range(len(self.place))]
        statistics = RouterStatistics(
            scope=self.config.scope,
            experts_per_token=experts_per_token,
            tokens_U=self.count.tokens_U,
            load_UYE=torch.stack([each.load_UE for each in sums], 1),
            physical_YE=torch.stack([each.physical_E for each in sums]),
            prob_UYE=torch.stack([each.prob_UE for each in sums], 1),
            z_UY=torch.stack([each.z_U for each in sums], 1),
        )
        routes = [self.routes[place] for place in sorted(self.routes)]
        return RouterOutput(self.config, statistics, torch.stack(routes) if routes else None)


def start_routing(
    packed: PackedTree,
    config: RouterConfig | None,
    place: Mapping[int, int],
    *,
    router: Router | None,
    num_experts: int,
    per_token: int,
) -> Routing | None:
    """What one forward pass keeps for its routers; None where there is nothing to do.

    Args:
        packed: the tree. If its trajectories have recorded routes, they are forced.
        config: what to take.
        place: decoder layer -> place among the mixture-of-experts layers; empty for a dense model.
        router: what those layers have; None for a dense model.
        num_experts, per_token: E and K.

    Raises:
        ValueError: statistics or recorded routes of a dense model, or routes that do not fit the model.
    """
    routes_TYK = packed.tree.routes_T
    if config is None and routes_TYK is None:
        return None
    if not place or router is None:
        routed = next((each.name for each in packed.tree.trajectories if each.routes is not None), "")
        what = f"trajectory {routed}, field routes: expected none" if config is None else "router: expected None"
        raise ValueError(f"{what} for a model without mixture-of-experts layers; leave it out")
    forced_TYK = None
    if routes_TYK is not None:
        _check_routes(packed, len(place), num_experts, per_token)
        rows = slice(packed.start, packed.start + packed.num_rows)
        forced_TYK = send(torch.from_numpy(routes_TYK[rows]), packed.device).to(torch.int64)
    count, with_grad = None, False
    if config is not None:
        mask_N = packed.loss_mask_N if config.tokens == "trained" else None
        count = count_tokens(packed, scope=config.scope, mask_N=mask_N)
        with_grad = torch.is_grad_enabled() and bool(config.balance_coefficient or config.z_coefficient)
    return Routing(config, packed.num_rows, place, router, count, forced_TYK, with_grad)


def _check_routes(packed: PackedTree, layers: int, num_experts: int, per_token: int) -> None:
    for trajectory in packed.tree.trajectories:
        routes = trajectory.routes
        if routes is not None and (routes.shape[1:] != (layers, per_token) or routes.max() >= num_experts):
            raise ValueError(
                f"trajectory {trajectory.name}, field routes: expected [{len(routes)}, {layers}, {per_token}] experts "
                f"below {num_experts}, as the model has, got {list(routes.shape)} up to {routes.max()}; record only "
                "the mixture-of-experts layers"
            )
