"""What a piece of a tree gave, put together into what the whole tree gives.

Shape suffixes: M targets, U head rows, T rows, Y mixture-of-experts layers, K experts per token.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from harts.layout import PackedTree
from harts.models.heads import Parts
from harts.models.router_output import RouterOutput

__all__ = ["Outcome", "Whole"]

_OF_TARGETS = ("logprobs_M", "entropy_M")
_OF_HEADS = ("hidden_UD", "top_logprobs_UK")
_OF_ROUTERS = ("prob_UYE", "z_UY")
"""Sums over tokens, so pieces add up."""


class Outcome(NamedTuple):
    """What the head and the routers gave for a piece, or for all."""

    parts: Parts
    router: RouterOutput | None

    def tensors(self) -> dict[str, Tensor]:
        """Those that gradients flow through, by name."""
        given = {name: getattr(self.parts, name) for name in (*_OF_TARGETS, *_OF_HEADS)}
        if self.router is not None:
            given |= {name: getattr(self.router.statistics, name) for name in _OF_ROUTERS}
        return {name: value for name, value in given.items() if value is not None}


class Whole:
    """The outcome of a whole tree, filled piece by piece.

    Args:
        packed: the tree.
        pieces: of it.

    Attributes:
        values: detached tensors over the whole tree, by name; zeros where nothing was put yet.
    """

    def __init__(self, packed: PackedTree, pieces: Sequence[PackedTree]) -> None:
        self.values: dict[str, Tensor] = {}
        self._packed, self._pieces = packed, pieces
        self._top_ids_UK: Tensor | None = None
        self._routers: list[RouterOutput] = []
        starts = torch.tensor([*(piece.start for piece in pieces), packed.num_rows], device=packed.device)
        self._heads: list[int] = torch.searchsorted(packed.head_row_U, starts).tolist()
        piece_of_M = torch.searchsorted(starts, packed.head_row_U[packed.head_of_M], right=True) - 1
        order_M = piece_of_M.sort(stable=True).indices
        self._targets: tuple[Tensor, ...] = torch.split(order_M, [len(piece.token_M) for piece in pieces])

    @property
    def names(self) -> list[str]:
        """Of `values`; known once a piece was put."""
        return list(self.values)

    def put(self, piece: int, outcome: Outcome) -> None:
        """Puts what a piece gave."""
        for name, value in outcome.tensors().items():
            given = value.detach()
            if name in _OF_ROUTERS:
                self.values[name] = self.values[name] + given if name in self.values else given.clone()
                continue
            if name not in self.values:
                count = len(self._packed.token_M if name in _OF_TARGETS else self._packed.head_row_U)
                self.values[name] = given.new_zeros(count, *given.shape[1:])
            self.values[name][self._place(name, piece)] = given
        if outcome.parts.top_ids_UK is not None:
            ids_UK = outcome.parts.top_ids_UK
            if self._top_ids_UK is None:
                self._top_ids_UK = ids_UK.new_zeros(len(self._packed.head_row_U), ids_UK.shape[1])
            self._top_ids_UK[self._place("top_logprobs_UK", piece)] = ids_UK
        if outcome.router is not None:
            statistics = outcome.router.statistics
            statistics = dataclasses.replace(
                statistics, prob_UYE=statistics.prob_UYE.detach(), z_UY=statistics.z_UY.detach()
            )
            self._routers.append(dataclasses.replace(outcome.router, statistics=statistics))

    def roots(self, piece: int, outcome: Outcome, grads: Mapping[str, Tensor | None]) -> list[tuple[Tensor, Tensor]]:
        """A piece's tensors with their gradients, out of those of the whole.

        Log-probabilities are always among them: FSDP gathers a layer for its backward where its output gets a gradient.
        """
        found = []
        for name, value in outcome.tensors().items():
            grad = grads.get(name)
            if not value.requires_grad:
                continue
            if grad is not None:
                found.append((value, grad if name in _OF_ROUTERS else grad[self._place(name, piece)]))
            elif name == "logprobs_M":
                found.append((value, torch.zeros_like(value)))
        return found

    def changes(self, piece: int, outcome: Outcome) -> Tensor | None:
        """bool []: whether a piece gave other bits than what was put; None where there is nothing to compare."""
        flags = [
            (self.values[name][self._place(name, piece)] != value.detach()).any()
            for name, value in outcome.tensors().items()
            if name not in _OF_ROUTERS and value.numel()
        ]
        return torch.stack(flags).any() if flags else None

    def outcome(self, values: Mapping[str, Tensor]) -> Outcome:
        """The whole tree's, out of tensors named as `values`."""
        parts = Parts(
            logprobs_M=values["logprobs_M"],
            entropy_M=values.get("entropy_M"),
            hidden_UD=values.get("hidden_UD"),
            top_logprobs_UK=values.get("top_logprobs_UK"),
            top_ids_UK=self._top_ids_UK,
        )
        return Outcome(parts, self._router(values))

    def _router(self, values: Mapping[str, Tensor]) -> RouterOutput | None:
        if not self._routers:
            return None
        every = [each.statistics for each in self._routers]
        statistics = dataclasses.replace(
            every[0],
            tokens_U=torch.stack([each.tokens_U for each in every]).sum(0),
            load_UYE=torch.stack([each.load_UYE for each in every]).sum(0),
            physical_YE=torch.stack([each.physical_YE for each in every]).sum(0),
            prob_UYE=values["prob_UYE"],
            z_UY=values["z_UY"],
        )
        routes = [each.routes_YTK for each in self._routers if each.routes_YTK is not None]
        return dataclasses.replace(
            self._routers[0], statistics=statistics, routes_YTK=torch.cat(routes, 1) if routes else None
        )

    def _place(self, name: str, piece: int) -> slice | Tensor:
        if name in _OF_HEADS:
            return slice(self._heads[piece], self._heads[piece + 1])
        return self._targets[piece]
