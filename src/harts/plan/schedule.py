"""Plan and Microbatch: which trajectories run in which slot on which replica, and how close to the best that is."""

import dataclasses
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from harts.cost import CostModel
from harts.files import write_text
from harts.plan.fingerprint import fingerprint
from harts.tree import PrefixTree

__all__ = ["Microbatch", "Plan"]

_FORMAT = "harts plan 2"


@dataclass(frozen=True, kw_only=True)
class Microbatch:
    """What one replica runs in one slot: `tree.subset(trajectories)` of the planned tree.

    Attributes:
        trajectories: indices into the planned tree's trajectories, ascending; none in an empty microbatch, whose
            replica runs a padding row to keep step.
        unique_rows: rows that no earlier microbatch has (slot after slot, in a slot replica after replica).
        recomputed_rows: rows that an earlier microbatch has too.
        replayed_rows: rows fed to linear attention more than once, counted each further time.
        gathered_keys: sum of the path lengths of its chains.
        chains: leaves, each a sequence of the kernel calls.
        cost: predicted, in the plan's unit.
    """

    trajectories: tuple[int, ...] = ()
    unique_rows: int = 0
    recomputed_rows: int = 0
    replayed_rows: int = 0
    gathered_keys: int = 0
    chains: int = 0
    cost: float = 0.0

    @property
    def is_empty(self) -> bool:
        """Whether its replica has nothing left to do in this slot."""
        return not self.trajectories

    @property
    def rows(self) -> int:
        """Rows that pass through the model."""
        return self.unique_rows + self.recomputed_rows

    @property
    def budget_rows(self) -> int:
        """What counts against the token budget: unique, recomputed and replayed rows."""
        return self.rows + self.replayed_rows


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A schedule of slots x replicas. All replicas meet at the end of each slot.

    Attributes:
        microbatches: of each slot, one per replica.
        token_budget: most unique + recomputed + replayed rows of a microbatch.
        num_replicas: microbatches per slot.
        key_cap: most gathered keys of a microbatch; None for no cap.
        cost_model: what costs are predicted with.
        lower_bound: no plan of the same tree, budget, cap and replicas has a smaller makespan.
        separate_cost: predicted cost of all trajectories as rows of their own, without constants per microbatch.
        fingerprint: hash of the tree and of the arguments it was planned with.
        uncut_budget: the smallest budget under which every tree fits into one microbatch.
        plan_s: seconds that planning took; not compared.
    """

    microbatches: tuple[tuple[Microbatch, ...], ...]
    token_budget: int
    num_replicas: int
    key_cap: int | None
    cost_model: CostModel
    lower_bound: float
    separate_cost: float
    fingerprint: str
    uncut_budget: int
    plan_s: float = field(default=0.0, compare=False)

    # -- sizes ----------------------------------------------------------------------------------------------------

    @property
    def slots(self) -> int:
        """Number of slots."""
        return len(self.microbatches)

    @property
    def replicas(self) -> int:
        """Number of replicas."""
        return self.num_replicas

    @cached_property
    def unique_rows(self) -> int:
        """Rows of the tree."""
        return sum(one.unique_rows for one in self._all())

    @cached_property
    def recomputed_rows(self) -> int:
        """Prefix rows run again because their tree was cut."""
        return sum(one.recomputed_rows for one in self._all())

    @cached_property
    def replayed_rows(self) -> int:
        """Rows fed to linear attention more than once within a microbatch."""
        return sum(one.replayed_rows for one in self._all())

    @cached_property
    def makespan(self) -> float:
        """Sum over slots of the slowest replica's predicted cost."""
        return float(sum(max(one.cost for one in slot) for slot in self.microbatches))

    @property
    def gap(self) -> float:
        """Makespan over lower bound, less 1; 0 where nothing costs anything."""
        return self.makespan and max(self.makespan / self.lower_bound - 1, 0.0)

    @property
    def idle_fraction(self) -> float:
        """Share of all replicas' time spent waiting for the slowest one of a slot; 0 where nothing costs anything."""
        busy = sum(one.cost for one in self._all())
        return self.makespan and max(1 - busy / (self.makespan * self.num_replicas), 0.0)

    @property
    def speedup(self) -> float:
        """Predicted speed-up over separate rows spread perfectly over the replicas; 1 where nothing costs anything."""
        return self.separate_cost / self.num_replicas / self.makespan if self.makespan else 1.0

    @property
    def hints(self) -> tuple[str, ...]:
        """What would make the plan better, as sentences."""
        hints = []
        if self.recomputed_rows:
            share = self.recomputed_rows / self.unique_rows
            cause = f"{self.recomputed_rows:,} prefix rows ({share:.1%} of the unique rows) run again"
            if self.token_budget < self.uncut_budget:
                # Balance may still cut on several replicas, and a cap on gathered keys on any number.
                gain = "needs no cut" if self.num_replicas == 1 else "fits every tree into one microbatch"
                if self.key_cap is not None:
                    gain = "fits every tree into one microbatch where the cap on gathered keys lets it"
                hints.append(f"{cause} because trees were cut; a token budget of {self.uncut_budget:,} {gain}")
            else:
                hints.append(f"{cause} to keep {self.num_replicas} replicas busy or under the cap on gathered keys")
        empty = sum(one.is_empty for one in self._all())
        if empty:
            hints.append(
                f"{empty} of {self.slots * self.num_replicas} microbatches are empty; fewer replicas or more "
                "trajectories a step would fill them"
            )
        return tuple(hints)

    def _all(self) -> Iterable[Microbatch]:
        return (one for slot in self.microbatches for one in slot)

    # -- files ----------------------------------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """A JSON-able dictionary with the plan, its summary and its fingerprint."""
        summary = ["slots", "replicas", "unique_rows", "recomputed_rows", "replayed_rows", "idle_fraction"]
        summary += ["lower_bound", "makespan", "gap", "plan_s"]
        arguments = ["token_budget", "key_cap", "separate_cost", "fingerprint", "uncut_budget"]
        slots = [[dataclasses.asdict(one) for one in slot] for slot in self.microbatches]
        return {
            "format": _FORMAT,
            **{name: getattr(self, name) for name in summary + arguments},
            "hints": list(self.hints),
            "cost_model": self.cost_model.to_json(),
            "microbatches": slots,
        }

    @staticmethod
    def from_json(data: Mapping[str, Any], *, tree: PrefixTree | None = None) -> "Plan":
        """Reads what `to_json` made.

        Args:
            data: the dictionary.
            tree: what the plan is to be used for.

        Raises:
            ValueError: not a plan, or one of other data than `tree`.
        """
        if not isinstance(data, Mapping) or data.get("format") != _FORMAT:
            raise ValueError(f"plan: expected a JSON object of format {_FORMAT!r}; write one with harts plan -o")
        try:
            slots = tuple(
                tuple(Microbatch(**{**one, "trajectories": tuple(one["trajectories"])}) for one in slot)
                for slot in data["microbatches"]
            )
            kept = ("token_budget", "key_cap", "lower_bound", "separate_cost", "fingerprint", "uncut_budget", "plan_s")
            plan = Plan(
                microbatches=slots,
                num_replicas=data["replicas"],
                cost_model=CostModel.from_json(data["cost_model"]),
                **{name: data[name] for name in kept},
            )
        except (KeyError, TypeError) as error:
            raise ValueError(f"plan: a field is missing or unknown ({error}); plan again") from error
        if tree is not None:
            plan.check_tree(tree)
        return plan

    def check_tree(self, tree: PrefixTree) -> None:
        """Raises ValueError if this plan was made of other data than `tree`, or its arguments were changed."""
        now = fingerprint(tree, self.token_budget, self.num_replicas, self.key_cap, self.cost_model)
        if now != self.fingerprint:
            raise ValueError(
                f"plan: expected the data it was made of (hash {self.fingerprint}), got other trajectories, another "
                f"order or other arguments (hash {now}); plan this data again"
            )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes a JSON file, under a temporary name first; errors as of `harts.files.replacing`."""
        write_text(path, json.dumps(self.to_json()) + "\n")

    @staticmethod
    def load(path: str | os.PathLike[str], *, tree: PrefixTree | None = None) -> "Plan":
        """Reads a JSON file; see `from_json`."""
        if not Path(path).is_file():
            got = "a folder" if Path(path).is_dir() else "no such file"
            raise ValueError(f"plan {path}: expected a file, got {got}; write one with harts plan -o")
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"plan {path}: expected JSON ({error}); write one with harts plan -o") from error
        try:
            return Plan.from_json(data, tree=tree)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error

    def fill(self) -> np.ndarray[Any, np.dtype[np.float64]]:
        """float64 [slots, replicas]: share of the token budget that each microbatch uses."""
        return np.array([[one.budget_rows / self.token_budget for one in slot] for slot in self.microbatches])
