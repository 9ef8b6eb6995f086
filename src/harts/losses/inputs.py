"""What goes into a loss: flat tensors over the tokens of a microbatch's trajectories.

N tokens of the microbatch, trajectory after trajectory
T trained tokens among them, in the same order
S trajectories ("sequences") of the optimiser step
R sequences with trained tokens in the microbatch, in their order
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor

from harts.trajectory import Trajectory
from harts.transfer import send

__all__ = ["LossInputs", "TrainedTokens", "check_trajectories"]

# Which field of a trajectory feeds which input, and what to do where it is missing.
_SOURCES = {
    "advantages": ("advantages", "give advantages, or give rewards and call harts.losses.fill_advantages on the step"),
    "old_logprobs": ("logprobs", "record them when sampling, or pass old_logprobs from a pass without gradients"),
    "behaviour_logprobs": ("logprobs", "record them when sampling"),
    "ref_logprobs": ("ref_logprobs", "record them, or pass ref_logprobs from a pass of the reference model"),
    "group": ("group", "name the task that this is a sample of"),
}


def check_trajectories(trajectories: Sequence[Trajectory], requires: Collection[str]) -> None:
    """Refuses trajectories that lack what a loss reads; to be called before any compute.

    A trajectory without a trained token needs nothing but its group. "entropy" comes from the model, and is not looked
    for.

    Args:
        trajectories: any number.
        requires: `LossConfig.requires`, less what the caller will pass to `LossInputs.from_trajectories` itself.

    Raises:
        ValueError: naming the trajectory and the field.
    """
    for name, (field_name, action) in _SOURCES.items():
        if name not in requires:
            continue
        for trajectory in trajectories:
            value = getattr(trajectory, field_name)
            missing = value == "" if field_name == "group" else value is None and trajectory.num_trained > 0
            if missing:
                raise ValueError(
                    f"trajectory {trajectory.name}, field {field_name}: expected a value, as the loss needs {name}, "
                    f"got none; {action}"
                )


@dataclass(frozen=True, kw_only=True, eq=False)
class LossInputs:
    """Per-token tensors of one microbatch, trajectory after trajectory, on one device.

    Only values at trained tokens are read; those elsewhere may be anything. Gradients flow into `logprobs_N` and
    `entropy_N` and nowhere else.

    Attributes:
        logprobs_N: float [N], differentiable: log-probability (nats) under the policy that is trained.
        loss_mask_N: bool [N]: trained tokens.
        sequence_of_N: int64 [N]: index of the token's trajectory within the optimiser step.
        old_logprobs_N: float [N] or None: under the policy that the ratio is taken to (before this step's updates).
        behaviour_logprobs_N: float [N] or None: under the policy that sampled, as the sampler computed it.
        ref_logprobs_N: float [N] or None: under the reference policy.
        advantages_N: float [N] or None.
        entropy_N: float [N] or None, differentiable: entropy (nats) of the distribution that predicted the token.

    Raises:
        ValueError: a tensor of another shape, device or kind of dtype.
    """

    logprobs_N: Tensor
    loss_mask_N: Tensor
    sequence_of_N: Tensor
    old_logprobs_N: Tensor | None = None
    behaviour_logprobs_N: Tensor | None = None
    ref_logprobs_N: Tensor | None = None
    advantages_N: Tensor | None = None
    entropy_N: Tensor | None = None

    def __post_init__(self) -> None:
        first = self.logprobs_N
        if first.ndim != 1:
            raise ValueError(f"logprobs_N: expected a flat tensor [N], got shape {list(first.shape)}; flatten it")
        for entry in fields(self):
            value: Tensor | None = getattr(self, entry.name)
            if value is None:
                continue
            kind = {"loss_mask_N": "bool", "sequence_of_N": "int64"}.get(entry.name, "floating point")
            right = value.is_floating_point() if kind == "floating point" else value.dtype == getattr(torch, kind)
            if not right or value.shape != first.shape or value.device != first.device:
                raise ValueError(
                    f"{entry.name}: expected {kind} {list(first.shape)} on {first.device} as logprobs_N, got "
                    f"{value.dtype} {list(value.shape)} on {value.device}; convert it"
                )

    @classmethod
    def from_trajectories(
        cls,
        trajectories: Sequence[Trajectory],
        logprobs: Tensor,
        *,
        sequences: Sequence[int],
        entropy: Tensor | None = None,
        old_logprobs: Tensor | None = None,
        ref_logprobs: Tensor | None = None,
        requires: Collection[str] = (),
    ) -> "LossInputs":
        """The inputs of a microbatch made of these trajectories, on the device of `logprobs`.

        The trajectories' recorded log-probabilities become `behaviour_logprobs_N`, and `old_logprobs_N` too unless
        those are given. A field that some trajectory lacks is None, unless `requires` names it.

        Args:
            trajectories: those of the microbatch, in the order of `logprobs`.
            logprobs: float [N], N the sum of their lengths, as from `harts.logprobs(model, packed)`.
            sequences: the index of each of them within the optimiser step, as in the step's denominators; the whole
                step in one microbatch has `range(len(trajectories))`.
            entropy: float [N], differentiable, or None.
            old_logprobs: float [N] computed by the trainer before the update, or None for the recorded ones.
            ref_logprobs: float [N] or None for the recorded ones.
            requires: `loss.requires`.

        Raises:
            ValueError: lengths differ, or a required field is missing, naming trajectory and field.
        """
        _check_sizes(trajectories, logprobs, sequences)
        given = {"old_logprobs": old_logprobs, "ref_logprobs": ref_logprobs, "entropy": entropy}
        check_trajectories(trajectories, set(requires) - {k for k, v in given.items() if v is not None})
        if "behaviour_logprobs" in requires and old_logprobs is None:
            raise ValueError(
                "old_logprobs: expected the trainer's own, as tis_cap compares them with the sampler's, got none; run "
                "the model without gradients before the update and pass what it gives"
            )
        if "entropy" in requires and entropy is None:
            raise ValueError("entropy: expected a tensor, as the loss needs it, got none; ask the model for entropies")

        def recorded(name: str) -> Tensor | None:
            return _concatenate(trajectories, name, logprobs)

        if old_logprobs is None:
            old_logprobs = recorded("logprobs")
        mask = np.concatenate([t.loss_mask for t in trajectories]) if trajectories else np.zeros(0, np.bool_)
        sequence_of_N = np.repeat(np.asarray(sequences, dtype=np.int64), [len(t) for t in trajectories])
        return cls(
            logprobs_N=logprobs,
            loss_mask_N=send(torch.from_numpy(mask), logprobs.device),
            sequence_of_N=send(torch.from_numpy(sequence_of_N), logprobs.device),
            old_logprobs_N=old_logprobs,
            behaviour_logprobs_N=recorded("logprobs"),
            ref_logprobs_N=recorded("ref_logprobs") if ref_logprobs is None else ref_logprobs,
            advantages_N=recorded("advantages"),
            entropy_N=entropy,
        )

    def trained(self) -> "TrainedTokens":
        """The trained tokens, in float32 or, where the log-probabilities have more, in their dtype."""
        dtype = torch.promote_types(self.logprobs_N.dtype, torch.float32)
        index_T = self.loss_mask_N.nonzero().squeeze(1)

        def select(value_N: Tensor | None) -> Tensor | None:
            return None if value_N is None else value_N[index_T].to(dtype)

        def constant(value_N: Tensor | None) -> Tensor | None:
            return None if value_N is None else value_N.detach()[index_T].to(dtype)

        sequence_of_R, run_of_T, tokens_of_R = torch.unique_consecutive(
            self.sequence_of_N[index_T], return_inverse=True, return_counts=True
        )
        return TrainedTokens(
            logprobs_T=self.logprobs_N[index_T].to(dtype),
            old_logprobs_T=constant(self.old_logprobs_N),
            behaviour_logprobs_T=constant(self.behaviour_logprobs_N),
            ref_logprobs_T=constant(self.ref_logprobs_N),
            advantages_T=constant(self.advantages_N),
            entropy_T=select(self.entropy_N),
            index_T=index_T,
            run_of_T=run_of_T,
            sequence_of_R=sequence_of_R,
            tokens_of_R=tokens_of_R,
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainedTokens:
    """The trained tokens of a microbatch, in the dtype that the loss computes in.

    Attributes as in `LossInputs`, and:
        index_T: int64 [T]: the token's place in the flat tensors of the microbatch.
        run_of_T: int64 [T]: the token's sequence, as an index into the sequences of the microbatch.
        sequence_of_R: int64 [R]: the sequence's index within the step.
        tokens_of_R: int64 [R]: its trained tokens, >= 1.
    """

    logprobs_T: Tensor
    old_logprobs_T: Tensor | None
    behaviour_logprobs_T: Tensor | None
    ref_logprobs_T: Tensor | None
    advantages_T: Tensor | None
    entropy_T: Tensor | None
    index_T: Tensor
    run_of_T: Tensor
    sequence_of_R: Tensor
    tokens_of_R: Tensor

    def need(self, name: str) -> Tensor:
        """A field that the loss cannot do without.

        Raises:
            ValueError: it is None.
        """
        value: Tensor | None = getattr(self, f"{name}_T")
        if value is None:
            action = _SOURCES[name][1] if name in _SOURCES else "ask the model for it"
            raise ValueError(f"{name}_N: expected a tensor, as the loss needs it, got none; {action}")
        return value

    def sequence_mean(self, value_T: Tensor) -> Tensor:
        """The mean over the trained tokens of each token's own sequence: float [T], differentiable."""
        if len(value_T) == 0:
            return value_T
        # Tokens of a sequence are contiguous: segment sums have a fixed order, index_add_ on CUDA has none.
        sum_R = torch.segment_reduce(value_T, "sum", lengths=self.tokens_of_R)
        return (sum_R / self.tokens_of_R)[self.run_of_T]

    def check_finite(self, values: dict[str, Tensor | None], label: Callable[[int], str], action: str) -> None:
        """Refuses NaN and infinity. One device synchronisation where all is well.

        Args:
            values: name -> float [T] or None.
            label: what to call a sequence of the step.
            action: the end of the message.

        Raises:
            ValueError: naming the trajectory, the value and the token's place in the microbatch.
        """
        present = {name: value.detach() for name, value in values.items() if value is not None}
        if not present or len(self.index_T) == 0:
            return
        good = torch.stack([torch.isfinite(value).all() for value in present.values()]).tolist()
        for (name, value_T), fine in zip(present.items(), good, strict=True):
            if not fine:
                at = int(torch.isfinite(value_T).int().argmin())
                sequence = int(self.sequence_of_R[self.run_of_T[at]])
                raise ValueError(
                    f"{label(sequence)}, {name}: expected a finite number, got {value_T[at].item()} at token "
                    f"{int(self.index_T[at])} of the microbatch; {action}"
                )


def _check_sizes(trajectories: Sequence[Trajectory], logprobs: Tensor, sequences: Sequence[int]) -> None:
    total = sum(len(t) for t in trajectories)
    if logprobs.shape != (total,):
        raise ValueError(
            f"logprobs: expected one value per token of {len(trajectories)} trajectories ([{total}]), got shape "
            f"{list(logprobs.shape)}; pass the log-probabilities of these trajectories"
        )
    if len(sequences) != len(trajectories):
        raise ValueError(
            f"sequences: expected one index per trajectory ({len(trajectories)}), got {len(sequences)}; "
            "give each its index within the optimiser step"
        )


def _concatenate(trajectories: Sequence[Trajectory], name: str, like: Tensor) -> Tensor | None:
    """One field of all trajectories, flat, or None where a trajectory with trained tokens lacks it."""
    parts = []
    for trajectory in trajectories:
        value = getattr(trajectory, name)
        if value is None:
            if trajectory.num_trained:
                return None
            value = np.zeros(len(trajectory))
        parts.append(value)
    flat = np.concatenate(parts) if parts else np.zeros(0)
    return send(torch.from_numpy(flat).to(torch.promote_types(like.dtype, torch.float32)), like.device)
