"""What a loss reports: sums and maxima that can be reduced over microbatches and replicas."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["LossMetrics"]


@dataclass(frozen=True, kw_only=True, eq=False)
class LossMetrics:
    """Detached 0-d float64 tensors on the loss's device, not yet divided by anything.

    Attributes:
        totals: parts of the step's loss, and "tokens", the number of trained tokens; they add up as they are.
        token_sums: sums over trained tokens; they add up, and are reported divided by "tokens".
        maxima: largest values over trained tokens, -inf where there is none.
    """

    totals: Mapping[str, Tensor]
    token_sums: Mapping[str, Tensor]
    maxima: Mapping[str, Tensor]

    def __add__(self, other: "LossMetrics") -> "LossMetrics":
        """The metrics of both microbatches together.

        Raises:
            ValueError: the two hold different metrics.
        """
        for ours, theirs in zip(self._parts(), other._parts(), strict=True):
            if ours.keys() != theirs.keys():
                odd = ", ".join(sorted(ours.keys() ^ theirs.keys()))
                raise ValueError(f"metrics: expected the same names, got {odd} in one only; use one loss for a step")
        return LossMetrics(
            totals={name: value + other.totals[name] for name, value in self.totals.items()},
            token_sums={name: value + other.token_sums[name] for name, value in self.token_sums.items()},
            maxima={name: torch.maximum(value, other.maxima[name]) for name, value in self.maxima.items()},
        )

    def all_reduce(self, group: "dist.ProcessGroup | None" = None) -> "LossMetrics":
        """The metrics of all replicas together; every replica of `group` must call it with the same names."""
        sums = {**self.totals, **self.token_sums}
        sums_M = torch.stack(list(sums.values()))
        dist.all_reduce(sums_M, op=dist.ReduceOp.SUM, group=group)
        reduced = dict(zip(sums, sums_M.unbind(), strict=True))
        maxima = dict(self.maxima)
        if maxima:
            maxima_M = torch.stack(list(maxima.values()))
            dist.all_reduce(maxima_M, op=dist.ReduceOp.MAX, group=group)
            maxima = dict(zip(maxima, maxima_M.unbind(), strict=True))
        return LossMetrics(
            totals={name: reduced[name] for name in self.totals},
            token_sums={name: reduced[name] for name in self.token_sums},
            maxima=maxima,
        )

    def values(self) -> dict[str, float]:
        """Plain numbers: totals as they are, means over trained tokens, maxima. One device synchronisation.

        Without a trained token there are no means and no maxima, and they are left out.
        """
        names = [name for part in self._parts() for name in part]
        tensors = [value for part in self._parts() for value in part.values()]
        numbers = dict(zip(names, torch.stack(tensors).tolist(), strict=True))
        tokens = numbers["tokens"]
        result = {name: numbers[name] for name in self.totals}
        if tokens > 0:
            result |= {name: numbers[name] / tokens for name in self.token_sums}
            result |= {name: numbers[name] for name in self.maxima}
        return result

    def _parts(self) -> tuple[Mapping[str, Tensor], ...]:
        return self.totals, self.token_sums, self.maxima
