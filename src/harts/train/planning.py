"""Plans and lays out the steps of a run; on a GPU while it computes the step before.

Kernels are launched faster than they run: behind the last launch of a step the GPU has work left for a while, in which
this process lays out the next step. Its plan, which takes long with many replicas, was made meanwhile by another one.
"""

import contextlib
from collections.abc import Callable, Iterator

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
        self._ahead_of = -1  # the step whose plan the other process was last asked for
        self._prepares = False
        self._prepared: tuple[int, StepPlan] | None = None

    def plan(self, step: int) -> StepPlan:
        """The plan of optimiser step `step`, counted from 0, its layouts on the device."""
        prepared, self._prepared = self._prepared, None
        made = prepared[1] if prepared is not None and prepared[0] == step else self._make(step)
        return made.to(self.config.device)

    def _make(self, step: int) -> StepPlan:
        plan = self.saved
        if plan is None and self._ahead is not None and self._ahead_of == step:
            plan = self._ahead.take()
            self._check_process()
        return plan_step(
            self.batches.of_step(step),
            token_budget=self.config.token_budget,
            share=self.config.share,
            replicas=self.replicas,
            cost_model=self.cost_model,
            plan=plan,
            check=self.saved is None,
        )

    @contextlib.contextmanager
    def ahead(self) -> Iterator[None]:
        """In here `start` and `prepare` work, on a GPU; on a CPU they would take time from the training itself."""
        if not self.config.device.startswith("cuda"):
            yield
            return
        with PlanAhead() as self._ahead:
            self._prepares = True
            try:
                yield
            finally:
                self._ahead, self._ahead_of, self._prepares, self._prepared = None, -1, False, None

    def start(self, step: int) -> None:
        """Asks the other process for the plan of the step that is made next, unless it was asked for it before."""
        if self._ahead is None or self.saved is not None or not self._ahead_of < step < self.config.steps:
            return
        self._ahead_of = step
        self._ahead.submit(
            PrefixTree.build(self.batches.of_step(step), share=self.config.share),
            token_budget=self.config.token_budget,
            num_replicas=self.replicas.size,
            cost_model=self.cost_model,
        )
        self._check_process()

    def _check_process(self) -> None:
        if self._ahead is not None and self._ahead.failure:
            self.log(f"{self._ahead.failure}; from here on this process plans its steps itself")
            self._ahead = None

    def prepare(self, step: int) -> None:
        """Plans and lays out the step that `plan` will be asked for next, and starts the plan behind it.

        Call it when the kernels of the step in hand have been launched.
        """
        if not self._prepares or step >= self.config.steps:
            return
        with contextlib.suppress(Exception):  # which `plan` meets again, when the step in hand is done
            self._prepared = step, self._make(step)
            self.start(step + 1)
