"""What to ask of the routers of a mixture-of-experts model, and what they give.

Shape suffixes: T rows of the tree, K experts per token, Y mixture-of-experts layers.
"""

from dataclasses import dataclass

from torch import Tensor

from harts.models.router_losses import (
    CountedTokens,
    Layers,
    LoadPer,
    RouterStatistics,
    RouterStep,
    load_balancing_loss,
    router_z_loss,
)
from harts.ops.moe import Scope

__all__ = ["RouterConfig", "RouterOutput"]


@dataclass(frozen=True, kw_only=True)
class RouterConfig:
    """What to take from the routers of a mixture-of-experts model.

    Attributes:
        scope: tokens over which loads are taken, "trajectory", "microbatch" or "step"; see
            `harts.models.router_losses`. There is no default: the balancing loss is not linear in the batch.
        tokens: tokens that count, "all" or "trained".
        balance_coefficient, z_coefficient: of the two losses in `RouterOutput.aux_loss`.
        layers, load_per: form of the balancing loss; the defaults are transformers' form.
        routes: keep the experts that each row ran, in `RouterOutput.routes_YTK`.
        exact: compute router logits in fp32 whatever the model's dtype, TF32 or autocast, from products in fp64 of a
            fixed number of rows (`harts.ops.moe.router_logits`), and break ties by index, so that a row's experts
            depend on its hidden state alone. In lower precision this is another model than without.

    Raises:
        ValueError: an unknown name, or a coefficient that is negative or not finite.
    """

    scope: Scope
    tokens: CountedTokens = "all"
    balance_coefficient: float = 0.0
    z_coefficient: float = 0.0
    layers: Layers = "pooled"
    load_per: LoadPer = "token"
    routes: bool = False
    exact: bool = False

    def __post_init__(self) -> None:
        names = {
            "scope": ("trajectory", "microbatch", "step"),
            "tokens": ("all", "trained"),
            "layers": ("pooled", "mean", "sum"),
            "load_per": ("token", "assignment"),
        }
        for name, known in names.items():
            if getattr(self, name) not in known:
                expected = ", ".join(map(repr, known))
                raise ValueError(f"RouterConfig, field {name}: expected one of {expected}, got {getattr(self, name)!r}")
        for name in ("balance_coefficient", "z_coefficient"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"RouterConfig, field {name}: expected a number >= 0, got {getattr(self, name)!r}")


@dataclass(frozen=True, eq=False)
class RouterOutput:
    """The routers of one microbatch.

    Attributes:
        config: as given.
        statistics: loads, and differentiable sums of probabilities and of squared log-sum-exps.
        routes_YTK: int16 [Y, T, K], ascending: experts that each row ran, in row order; None unless asked for.
    """

    config: RouterConfig
    statistics: RouterStatistics
    routes_YTK: Tensor | None

    def aux_loss(self, step: RouterStep | None = None) -> Tensor:
        """Balancing loss and z-loss times their coefficients, to be added to the microbatch's loss.

        Args:
            step: counts of the whole optimiser step, so that its microbatches add up. Needed in scope "step" (with
                loads), possible in scope "trajectory".

        Raises:
            ValueError: see `harts.models.router_losses`.
        """
        loss = self.statistics.z_UY.new_zeros(())
        if self.config.balance_coefficient:
            loss = loss + self.config.balance_coefficient * self.balance_loss(step)
        if self.config.z_coefficient:
            loss = loss + self.config.z_coefficient * self.z_loss(step)
        return loss

    def balance_loss(self, step: RouterStep | None = None) -> Tensor:
        """The balancing loss, without a coefficient."""
        config = self.config
        return load_balancing_loss(self.statistics, layers=config.layers, load_per=config.load_per, step=step)

    def z_loss(self, step: RouterStep | None = None) -> Tensor:
        """The z-loss, without a coefficient."""
        return router_z_loss(self.statistics, layers=self.config.layers, step=step)
