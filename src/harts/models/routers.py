"""How the routers of transformers' families are declared: by what they do, and where their settings lie.

Shape suffixes: E experts.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

from torch import Tensor

from harts.ops.moe import Gating, Scores

__all__ = ["Router"]

ARGUMENT = "argument"
"""`Router.bias` of routers that get it as the second argument of their forward."""


@dataclass(frozen=True, kw_only=True)
class Router:
    """The router of a family's mixture-of-experts layers.

    Its forward takes hidden states first and gives (logits [T, experts], weights and indices [T, experts per token]).
    Settings are read from the module itself, by the names of its attributes, so that the model stays the one that says
    them; where no name is given, the router has no such thing.

    Attributes:
        module: "module:Class".
        scores: of all experts, from their logits.
        normalized: whether the weights of the chosen experts sum to 1, or the attribute that says so.
        epsilon: added to the sum that they are divided by.
        floor: attribute with the least that the sum may be.
        scale: attribute with the factor on all weights.
        groups: attributes with the number of groups of experts, and of those that experts are chosen from.
        group_best: a group is as good as so many of its best experts together.
        grouped: attribute, and its value where groups count at all.
        bias: attribute with what is added to scores where experts are chosen, and only there; `ARGUMENT`: it is the
            second argument of the forward.
        weight: attribute with the weight [experts, channels].
        added: attribute with what is added to the logits, [experts].
        cap: attribute with a number c: where it is above 0, logits become c * tanh(logits / c).
    """

    module: str
    scores: Scores = "softmax"
    normalized: bool | str = True
    epsilon: float = 0.0
    floor: str | None = None
    scale: str | None = None
    groups: tuple[str, str] | None = None
    group_best: int = 2
    grouped: tuple[str, str] | None = None
    bias: str | None = None
    weight: str = "weight"
    added: str | None = None
    cap: str | None = None

    def gating(self, router: Any) -> Gating:
        """What one router of a model does with its logits."""
        groups = chosen_groups = 1
        if self.groups is not None and (self.grouped is None or getattr(router, self.grouped[0]) == self.grouped[1]):
            groups, chosen_groups = (getattr(router, name) for name in self.groups)
        return Gating(
            scores=self.scores,
            normalized=self.normalized if isinstance(self.normalized, bool) else bool(getattr(router, self.normalized)),
            epsilon=self.epsilon,
            floor=0.0 if self.floor is None else float(getattr(router, self.floor)),
            scale=1.0 if self.scale is None else float(getattr(router, self.scale)),
            groups=groups,
            chosen_groups=chosen_groups,
            group_best=self.group_best,
        )

    def bias_of(self, router: Any, args: Sequence[Any]) -> Tensor | None:
        """[E], what is added to the scores of one router where experts are chosen; `args` are those of its forward."""
        if self.bias is None:
            return None
        found = args[1] if self.bias == ARGUMENT else _attribute(router, self.bias)
        return None if found is None else found.detach().flatten()

    def weight_of(self, router: Any) -> Tensor:
        """[E, channels]."""
        return _attribute(router, self.weight)  # type: ignore[no-any-return]

    def finish(self, router: Any, product_TE: Tensor) -> Tensor:
        """The logits of one router, from the product with its weight."""
        logits_TE = product_TE
        if self.added is not None:
            logits_TE = logits_TE + _attribute(router, self.added).to(logits_TE.dtype)
        cap = 0.0 if self.cap is None else float(getattr(router, self.cap))
        return cap * (logits_TE / cap).tanh() if cap > 0 else logits_TE


def _attribute(module: Any, path: str) -> Any:
    return reduce(getattr, path.split("."), module)
