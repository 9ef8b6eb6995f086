"""What a model gave for a packed tree, token by token.

Shape suffixes: N tokens of all trajectories, D channels, K most likely tokens.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

import torch
from torch import Tensor

from harts.layout import PackedTree
from harts.models.router_output import RouterConfig, RouterOutput

__all__ = ["Extras", "Scores"]


class Extras(TypedDict, total=False):
    """What may be asked for beside log-probabilities; see `harts.logprobs`."""

    entropy: bool
    router: RouterConfig | None
    hidden: bool
    top_k: int | None


@dataclass(frozen=True, eq=False, kw_only=True)
class Scores:
    """Log-probabilities and what was asked for beside them; the rest is None.

    Tensors have one entry a token, trajectory after trajectory, as many as tokens (`packed.split` cuts them into
    trajectories), and stand for the distribution that the token itself was predicted from: nothing is shifted. Entries
    of tokens that are not trained are 0 (-1 in `top_ids_NK`) and carry no gradient. All but ids are differentiable.

    Attributes:
        logprobs_N: log-probability (nats) of each trained token, fp32 (fp64 for an fp64 model).
        entropy_N: entropy (nats), in the same dtype.
        router: statistics and losses of a mixture of experts.
        hidden_N: [N, D], what the head read to predict each trained token: the decoder's last hidden state of the row
            before, behind the last norm, in the model's dtype. For value and reward heads, and for distillation.
        top_logprobs_NK: [N, K], log-probabilities of the K most likely tokens, largest first, at the trajectory's
            temperature.
        top_ids_NK: int64 [N, K], the ids of those.
    """

    logprobs_N: Tensor
    entropy_N: Tensor | None = None
    router: RouterOutput | None = None
    hidden_N: Tensor | None = None
    top_logprobs_NK: Tensor | None = None
    top_ids_NK: Tensor | None = None

    def of(self, trajectories: Sequence[int], packed: PackedTree) -> "Scores":
        """The same of some of the trajectories, their tokens one after the other; `router` stays that of all.

        Args:
            trajectories: indices, in the order wanted.
            packed: whose tokens these are.
        """

        def pick(values: Tensor) -> Tensor:
            parts = packed.split(values)
            return torch.cat([parts[index] for index in trajectories])

        of_tokens = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        picked: dict[str, Any] = {name: pick(value) for name, value in of_tokens.items() if isinstance(value, Tensor)}
        return dataclasses.replace(self, **picked)
