"""A training client in the manner of Tinker's, in this process and on the tree: one call for gradients, one to step.

Loops written for Tinker's `TrainingClient` run with `TrainingClient(model)` in its place; sampling is left to the user.
Its own `Datum` and `AdamParams` are taken as well as those below, which need no package.

A datum has N input tokens and N targets, target i being token i + 1 of the whole sequence.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from harts.models import attach, logprobs
from harts.models.sharded import compute_device
from harts.trajectory import Trajectory

__all__ = ["AdamParams", "Datum", "ForwardBackwardOutput", "OptimStepResponse", "TrainingClient"]

CustomLoss = Callable[[Sequence[Any], list[Tensor]], tuple[Tensor, Mapping[str, float]]]


@dataclass(frozen=True)
class Datum:
    """One sequence and what its loss needs.

    Attributes:
        model_input: N token ids, or an object with `to_ints()`.
        loss_fn_inputs: arrays [N], or objects with `to_numpy()`: `target_tokens`; `weights` for cross_entropy,
            `logprobs` and `advantages` for the others. Targets are scored where `weights`, or else `mask`, is not 0;
            without either, all are.
    """

    model_input: Any
    loss_fn_inputs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class AdamParams:
    """Of one step of AdamW; a `grad_clip_norm` of 0 clips nothing."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


class _Done:
    """What is already there, where Tinker gives a future."""

    def result(self, timeout: float | None = None) -> Any:
        """Itself."""
        return self


@dataclass(frozen=True)
class ForwardBackwardOutput(_Done):
    """`loss_fn_outputs`: of each datum, {"logprobs": [N]}, 0 where nothing was scored; `metrics`: with "loss:sum"."""

    loss_fn_outputs: list[dict[str, Tensor]]
    metrics: dict[str, float]


@dataclass(frozen=True)
class OptimStepResponse(_Done):
    """`metrics`: with "grad_norm", before clipping."""

    metrics: dict[str, float]


class _Row(NamedTuple):
    trajectory: Trajectory
    inputs: dict[str, Tensor]


class TrainingClient:
    """Holds a model and its AdamW state.

    Args:
        model: of a family that `harts.attach` supports; attached in place.
        token_budget: most rows whose activations are kept; see `harts.logprobs`.
    """

    def __init__(self, model: nn.Module, *, token_budget: int | None = None) -> None:
        self.model = attach(model)
        self.token_budget = token_budget
        self._optimizer: torch.optim.AdamW | None = None

    def forward(self, data: Sequence[Any]) -> ForwardBackwardOutput:
        """Log-probabilities alone."""
        with torch.no_grad():
            scored = self._score([_read(number, datum, ()) for number, datum in enumerate(data)])
        return ForwardBackwardOutput([{"logprobs": each} for each in scored], {})

    def forward_backward(
        self, data: Sequence[Any], loss_fn: str, loss_fn_config: Mapping[str, float] | None = None
    ) -> ForwardBackwardOutput:
        """Adds the gradients of the sum of all tokens' losses to those since the last `optim_step`.

        Args:
            data: of `Datum`. Starts that they share run once.
            loss_fn: one of `LOSSES`.
            loss_fn_config: `clip_low_threshold` and `clip_high_threshold` of ppo and cispo, 0.8 and 1.2 by default.

        Raises:
            ValueError: an unknown loss or option, or a datum without what its loss needs; the message names it.
        """
        if loss_fn not in LOSSES:
            raise ValueError(
                f"loss_fn: expected one of {', '.join(LOSSES)}, got {loss_fn!r}; or forward_backward_custom"
            )
        required, clips, formula = LOSSES[loss_fn]
        clip = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2} if clips else {}
        if unknown := set(loss_fn_config or {}) - set(clip):
            raise ValueError(f"loss_fn_config: {loss_fn} has no option {min(unknown)!r}")
        low, high = {**clip, **(loss_fn_config or {})}.values() if clips else (0.0, 0.0)
        rows = [_read(number, datum, required) for number, datum in enumerate(data)]
        scored = self._score(rows)
        losses = [formula(each, self._on_device(row.inputs), low, high) for each, row in zip(scored, rows, strict=True)]
        return self._backward(torch.cat(losses).sum(), scored, {})

    def forward_backward_custom(self, data: Sequence[Any], loss_fn: CustomLoss) -> ForwardBackwardOutput:
        """The same with a loss of one's own: `loss_fn(data, logprobs) -> (loss, metrics)`, one tensor [N] a datum."""
        scored = self._score([_read(number, datum, ()) for number, datum in enumerate(data)])
        loss, metrics = loss_fn(data, scored)
        return self._backward(loss, scored, dict(metrics))

    def optim_step(self, adam_params: Any) -> OptimStepResponse:
        """One step of AdamW with the gradients so far, which are then gone.

        Args:
            adam_params: `AdamParams`; each step may have others.

        Raises:
            ValueError: there are no gradients.
        """
        parameters = [each for each in self.model.parameters() if each.requires_grad]
        if all(each.grad is None for each in parameters):
            raise ValueError("optim_step: expected gradients of a forward_backward before it, got none")
        if self._optimizer is None:
            self._optimizer = torch.optim.AdamW(parameters)
        for group in self._optimizer.param_groups:
            group["lr"], group["eps"] = adam_params.learning_rate, adam_params.eps
            group["betas"], group["weight_decay"] = (adam_params.beta1, adam_params.beta2), adam_params.weight_decay
        most = adam_params.grad_clip_norm or float("inf")
        norm = float(nn.utils.clip_grad_norm_(parameters, most))
        self._optimizer.step()
        self._optimizer.zero_grad()
        return OptimStepResponse({"grad_norm": norm})

    def _score(self, rows: Sequence[_Row]) -> list[Tensor]:
        trajectories = [row.trajectory for row in rows]
        if not trajectories:
            raise ValueError("data: expected at least one datum, got none")
        values = logprobs(self.model, trajectories, token_budget=self.token_budget)
        lengths = [len(each) for each in trajectories]
        return [each[1:] for each in torch.split(values, lengths)]

    def _on_device(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        device = compute_device(self.model)
        return {name: value.to(device) for name, value in inputs.items()}

    def _backward(self, loss: Tensor, scored: list[Tensor], metrics: dict[str, float]) -> ForwardBackwardOutput:
        loss.backward()  # type: ignore[no-untyped-call]
        outputs = [{"logprobs": each.detach()} for each in scored]
        return ForwardBackwardOutput(outputs, {"loss:sum": float(loss.detach()), **metrics})


# -- losses, token by token ------------------------------------------------------------------------------------------


def _cross_entropy(logprobs_N: Tensor, inputs: dict[str, Tensor], low: float, high: float) -> Tensor:
    return -logprobs_N * inputs["weights"]


def _importance_sampling(logprobs_N: Tensor, inputs: dict[str, Tensor], low: float, high: float) -> Tensor:
    return -torch.exp(logprobs_N - inputs["logprobs"]) * inputs["advantages"] * inputs["scored"]


def _ppo(logprobs_N: Tensor, inputs: dict[str, Tensor], low: float, high: float) -> Tensor:
    ratio, advantages = torch.exp(logprobs_N - inputs["logprobs"]), inputs["advantages"]
    return -torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages) * inputs["scored"]


def _cispo(logprobs_N: Tensor, inputs: dict[str, Tensor], low: float, high: float) -> Tensor:
    ratio = torch.exp(logprobs_N.detach() - inputs["logprobs"]).clamp(low, high)
    return -ratio * logprobs_N * inputs["advantages"] * inputs["scored"]


_Formula = Callable[[Tensor, dict[str, Tensor], float, float], Tensor]

LOSSES: Mapping[str, tuple[tuple[str, ...], bool, _Formula]] = {
    "cross_entropy": (("weights",), False, _cross_entropy),
    "importance_sampling": (("logprobs", "advantages"), False, _importance_sampling),
    "ppo": (("logprobs", "advantages"), True, _ppo),
    "cispo": (("logprobs", "advantages"), True, _cispo),
}
"""Name -> (inputs beside targets, whether it clips, loss of each token)."""


# -- data ------------------------------------------------------------------------------------------------------------


def _read(number: int, datum: Any, required: Sequence[str]) -> _Row:
    """A datum checked, as the trajectory of its whole sequence.

    Raises:
        ValueError: something is missing, of another length, not finite, or a scored target is not the next token.
    """
    given = datum.model_input
    tokens = np.asarray(given.to_ints() if hasattr(given, "to_ints") else given)
    arrays = {name: np.asarray(_array(value)) for name, value in datum.loss_fn_inputs.items()}
    if missing := [name for name in ("target_tokens", *required) if name not in arrays]:
        raise ValueError(f"datum {number}, loss_fn_inputs: expected {missing[0]!r}, got {sorted(arrays)}")
    for name in {"target_tokens", *required, *(arrays.keys() & {"weights", "mask"})}:
        if arrays[name].shape != tokens.shape or tokens.ndim != 1:
            raise ValueError(
                f"datum {number}, {name}: expected one value a token of model_input, {list(tokens.shape)}, got "
                f"{list(arrays[name].shape)}"
            )
        if not np.isfinite(arrays[name]).all():
            raise ValueError(f"datum {number}, {name}: expected finite numbers, got {arrays[name].tolist()}")
    targets = arrays["target_tokens"]
    scored = arrays.get("weights", arrays.get("mask", np.ones(len(tokens)))) != 0
    if (bad := np.flatnonzero(scored[:-1] & (targets[:-1] != tokens[1:]))).size:
        raise ValueError(
            f"datum {number}, target_tokens: expected the next token of model_input, {tokens[bad[0] + 1]}, at place "
            f"{bad[0]}, got {targets[bad[0]]}; targets are inputs shifted by one"
        )
    trajectory = Trajectory(
        token_ids=np.append(tokens, targets[-1:] if scored[-1] else tokens[-1:]),
        loss_mask=np.append(False, scored),
        id=f"datum {number}",
    )
    inputs = {name: torch.from_numpy(arrays[name].astype(np.float64)).float() for name in required}
    return _Row(trajectory, {**inputs, "scored": torch.from_numpy(scored)})


def _array(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().cpu().numpy()
    return value.to_numpy() if hasattr(value, "to_numpy") else value
