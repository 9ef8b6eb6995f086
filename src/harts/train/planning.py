"""Plans the steps of a run: by a saved plan, in this process, or ahead of time in another one."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from harts.cost import CostModel
from harts.plan import Plan
from harts.plan.ahead import PlanAhead
from harts.train.batches import Batches
from harts.train.config import TrainConfig
from harts.train.parallel import Replicas
from harts.train.step import StepPlan, plan_step
from harts.tree import PrefixTree

__all__ = ["StepPlanner"]


class StepPlanner:
    """Plans one optimiser step after the other.

    Args:
        config: settings of the run.
        batches: trajectories by step.
        replicas: this process among those that train together.
        cost_model: what plans balance.
        saved: a plan for every step, checked against the data; None: plans are made.
        log: receives lines for people.
    """

    def __init__(
        self,
        config: TrainConfig,
        batches: Batches,
        *,
        replicas: Replicas,
        cost_model: CostModel,
        saved: Plan | None,
        log: Callable[[str], None],
    ) -> None:
        self.config, self.batches, self.replicas, self.cost_model = config, batches, replicas, cost_model
        self.saved, self.log = saved, log
        self._ahead: PlanAhead | None = None
        self._ahead_of = -1

    def plan(self, step: int) -> StepPlan:
        """The plan of optimiser step `step`, counted from 0."""
        plan = self.saved
        if plan is None and self._ahead is not None and self._ahead_of == step:
            plan = self._ahead.take()
        return plan_step(
            self.batches.of_step(step),
            token_budget=self.config.token_budget,
            share=self.config.share,
            replicas=self.replicas,
            cost_model=self.cost_model,
            plan=plan,
            check=self.saved is None,
            device=self.config.device,
        )

    @contextmanager
    def ahead(self) -> Iterator[None]:
        """In here `start` works, on a GPU: while it computes, the next step is planned by another process.

        On a CPU that process would take time from the training itself.
        """
        if not self.config.device.startswith("cuda") or self.saved is not None:
            yield
            return
        with PlanAhead() as self._ahead:
            try:
                yield
            finally:
                self._ahead = None

    def start(self, step: int) -> None:
        """Starts to plan the step that will be asked for next; nothing outside of `ahead` or behind the last step."""
        if self._ahead is None or step >= self.config.steps:
            return
        if not self._ahead.failure:
            self._ahead.submit(
                PrefixTree.build(self.batches.of_step(step), share=self.config.share),
                token_budget=self.config.token_budget,
                num_replicas=self.replicas.size,
                cost_model=self.cost_model,
            )
            self._ahead_of = step
        if self._ahead.failure:
            self.log(f"{self._ahead.failure}; from here on this process plans its steps itself")
            self._ahead = None
