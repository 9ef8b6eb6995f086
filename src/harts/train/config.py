"""Settings of a training run: few, flat, frozen, checked."""

import dataclasses
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from harts.formats.chat import Reasoning, Rows
from harts.formats.reading import Format
from harts.losses import LossConfig, Scale, Singletons
from harts.models import RouterConfig
from harts.train.fields import check_names, nested
from harts.tree import Share

__all__ = ["TABLES", "TrainConfig"]

Dtype = Literal["float32", "bfloat16", "float64"]
Schedule = Literal["constant", "linear", "cosine", "wsd"]
Advantages = Literal["given", "group"]


TABLES: Mapping[str, type] = {"loss": LossConfig, "router": RouterConfig}
"""Settings that have settings of their own."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Everything that determines a run.

    Attributes:
        data: path of the trajectories; see docs/data.md.
        rows, format, fields, tokenizer, reasoning, limit: how they are read; see `harts.read`.
        model: a directory with a transformers model, or a preset such as "tiny-qwen3.5" (random weights, its
            vocabulary made of the token ids that occur in the data).
        dtype: of the computation. Parameters, gradients and the optimiser's moments are float32 with "bfloat16".
        loss: see `LossConfig`.
        router: what to ask of the routers of a mixture-of-experts model, see `harts.models.RouterConfig`; or None.
        advantages: "given" takes those of the trajectories, "group" computes them from the rewards of each group
            (GRPO), whatever the trajectories bring. Ignored by the supervised loss.
        advantage_scale, leave_one_out, singletons: how a group's advantages are computed; see
            `harts.losses.group_advantages`.
        groups_per_step: groups whose trajectories make one optimiser step.
        steps: optimiser steps.
        token_budget: most rows of a microbatch, those that are run again included. The one dial for memory.
        cost_model: JSON file of `harts calibrate` for this model: what plans balance, in seconds. None: FLOPs.
        plan: JSON file of `harts plan` for this data, to follow in every step. It covers all trajectories, so
            `groups_per_step` must too.
        share: "tree"; "prefix" and "none" are the baselines.
        recompute: whether activations are recomputed in the backward.
        keep_attention: whether outputs of full attention are then kept, for less time and more memory; see
            `harts.models.recompute_activations`.
        fused: whether norms, MLPs, gates and experts run as few kernels (`harts.models.fuse`); left out: where the
            model can be fused, in bf16 on a CUDA GPU.
        deterministic: whether gradients have the same bits in every run on a GPU; see `harts.ops.kernels.Kernels`.
        learning_rate, schedule, warmup_steps, decay_steps, min_learning_rate: linear warm-up, then "constant", or down
            to `min_learning_rate`, "linear" or as a "cosine", or ("wsd") linear in the last `decay_steps` alone.
        beta1, beta2, epsilon: of AdamW.
        weight_decay: of matrices; vectors (norms, biases) have none.
        max_grad_norm: the gradient is scaled down to this norm; None: not.
        seed: of the order of groups and of a preset's weights.
        checkpoint_every: steps between checkpoints; one is always written at the end and when interrupted.
        device: "cpu", "cuda", ...
    """

    data: str
    rows: Rows = "trajectory"
    format: Format = "auto"
    fields: str | None = None
    tokenizer: str | None = None
    reasoning: Reasoning = "keep"
    limit: int | None = None
    model: str = "tiny-qwen3.5"
    dtype: Dtype = "float32"
    loss: LossConfig = field(default_factory=LossConfig)
    router: RouterConfig | None = None
    advantages: Advantages = "group"
    advantage_scale: Scale = "std"
    leave_one_out: bool = False
    singletons: Singletons = "error"
    groups_per_step: int = 2
    steps: int = 100
    token_budget: int = 32_768
    cost_model: str | None = None
    plan: str | None = None
    share: Share = "tree"
    recompute: bool = True
    keep_attention: bool = False
    fused: bool | None = None
    deterministic: bool = False
    learning_rate: float = 1e-3
    schedule: Schedule = "constant"
    warmup_steps: int = 0
    decay_steps: int = 0
    min_learning_rate: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float | None = 1.0
    seed: int = 0
    checkpoint_every: int = 50
    device: str = "cpu"

    def __post_init__(self) -> None:
        for entry in dataclasses.fields(self):
            self._check_type(entry.name, entry.type)
        for name in ("groups_per_step", "steps", "token_budget", "checkpoint_every"):
            self._check(name, getattr(self, name) >= 1, "a number >= 1")
        self._check("seed", self.seed >= 0, "a number >= 0")
        self._check("limit", self.limit is None or self.limit >= 1, "a number >= 1, or left out")
        self._check("learning_rate", 0 < self.learning_rate < math.inf, "a finite number > 0")
        self._check("weight_decay", 0 <= self.weight_decay < math.inf, "a finite number >= 0")
        self._check("warmup_steps", 0 <= self.warmup_steps < self.steps, f"0 to {self.steps - 1}, below steps")
        room = self.steps - self.warmup_steps
        wsd = self.schedule == "wsd"
        self._check("decay_steps", wsd or self.decay_steps == 0, "0, as only the schedule 'wsd' uses it")
        self._check("decay_steps", not wsd or 1 <= self.decay_steps <= room, f"1 to {room} with the schedule 'wsd'")
        self._check("min_learning_rate", 0 <= self.min_learning_rate <= self.learning_rate, "0 to learning_rate")
        self._check("beta1", 0 <= self.beta1 < 1, "a number in [0, 1)")
        self._check("beta2", 0 <= self.beta2 < 1, "a number in [0, 1)")
        self._check("epsilon", 0 < self.epsilon < math.inf, "a finite number > 0")
        self._check("keep_attention", self.recompute or not self.keep_attention, "false, as nothing is recomputed")
        norm = self.max_grad_norm
        self._check("max_grad_norm", norm is None or 0 < norm < math.inf, "a finite number > 0, or left out")

    @classmethod
    def load(cls, path: str | Path, changes: Mapping[str, Any] | None = None) -> "TrainConfig":
        """Reads a TOML file; relative paths in it are taken relative to the file.

        Args:
            path: the file. Its `[loss]` table holds the fields of `LossConfig`, `[router]` those of `RouterConfig`.
            changes: fields that override the file's, those of tables as "loss.algorithm".

        Raises:
            ValueError: unknown field (with the closest known one), wrong type or value.
        """
        path = Path(path)
        try:
            values = tomllib.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            raise ValueError(f"{path}: no such file; pass a TOML file with the settings of a run") from error
        except tomllib.TOMLDecodeError as error:
            raise ValueError(f"{path}: not valid TOML: {error}") from error
        for name in ("data", "model", "tokenizer", "cost_model", "plan"):
            beside = path.parent / str(values.get(name, ""))
            if isinstance(values.get(name), str) and (name in ("data", "cost_model", "plan") or beside.is_dir()):
                values[name] = str(beside)
        return cls.from_dict(nested(values, changes or {}), where=str(path))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], *, where: str = "config") -> "TrainConfig":
        """From plain values, the loss as a nested mapping; the inverse of `to_dict`."""
        values = dict(values)
        check_names(values, cls, TABLES, where)
        if "data" not in values:
            raise ValueError(f"{where}: field data is missing; name the file with the trajectories")
        for name, kind in TABLES.items():
            table = values.get(name)
            if isinstance(table, Mapping):
                check_names(table, kind, TABLES, where, name)
                if name == "router" and "scope" not in table:
                    raise ValueError(f"{where}, [router]: field scope is missing; choose one, see docs/moe.md")
                values[name] = kind(**table)
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, fit for JSON."""
        return dataclasses.asdict(self)

    def learning_rate_at(self, step: int) -> float:
        """Learning rate of optimiser step `step`, counted from 0."""
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / self.warmup_steps
        left = 1 - (step - self.warmup_steps) / (self.steps - self.warmup_steps)
        if self.schedule == "wsd":
            left = min(1, (self.steps - step) / self.decay_steps)
        if self.schedule == "cosine":
            left = (1 - math.cos(math.pi * left)) / 2
        if self.schedule == "constant":
            left = 1
        return self.min_learning_rate + (self.learning_rate - self.min_learning_rate) * left

    def _check(self, name: str, holds: bool, expected: str) -> None:
        if not holds:
            raise ValueError(f"config, field {name}: expected {expected}, got {getattr(self, name)!r}")

    def _check_type(self, name: str, kind: Any) -> None:
        value = getattr(self, name)
        if get_origin(kind) is Literal:
            names = ", ".join(map(repr, get_args(kind)))
            self._check(name, value in get_args(kind), f"one of {names}")
            return
        kinds = get_args(kind) or (kind,)
        if float in kinds and type(value) is int:
            object.__setattr__(self, name, float(value))
        elif type(value) not in kinds:
            expected = " or ".join(getattr(k, "__name__", str(k)).replace("NoneType", "nothing") for k in kinds)
            self._check(name, False, expected)
