"""What the sums of a loss are divided by: counts of the whole optimiser step.

S trajectories ("sequences") of the step
R sequences with trained tokens in the microbatch
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from harts.losses.config import Normalization, SharedTokens
from harts.losses.sharing import own_once
from harts.trajectory import Trajectory

__all__ = ["StepDenominators"]


@dataclass(frozen=True, kw_only=True, eq=False)
class StepDenominators:
    """Counts over all trajectories of an optimiser step, of all its microbatches and replicas.

    A loss is a sum over trained tokens, each with the weight of its sequence. The weights come from the whole step, so
    the losses of its microbatches add up to the loss of the step, however the trajectories are dealt out. (Add up:
    where a framework averages gradients over replicas, multiply the loss by the number of replicas.)

    With t_s trained tokens in sequence s, the weight of each of them is, by normalization:

    - "token": 1 / sum_s t_s. Every token counts alike. DAPO (arXiv:2503.14476) as it is usually implemented.
    - "sequence": 1 / (n t_s), where n is the number of sequences with a trained token: the mean over a sequence's
      tokens, then over sequences. GRPO (arXiv:2402.03300), GSPO (arXiv:2507.18071).
    - "group": 1 / (m T_g), where T_g is the number of trained tokens of the sequence's group and m the number of
      groups that have one: the mean over a group's tokens, then over groups. DAPO's formula (arXiv:2503.14476) taken
      group by group, called prompt average in arXiv:2510.13786.
    - "constant": 1 / (S max_length), where S counts all sequences, those without a trained token too: nothing depends
      on lengths. Dr. GRPO (arXiv:2503.20783).

    Where tokens that k trajectories train count once (`share_of_S`), such a token has 1/k of its sequence's weight, and
    counts as 1/k in t_s and T_g: weights still add up to 1.

    Attributes:
        tokens_of_S: int64 [S] on the CPU: trained tokens of each sequence.
        group_of_S: int64 [S] on the CPU, the sequence's group, or None where sequences have none.
        names: what messages call the sequences [S]; empty if they have no names.
        share_of_S: S tensors float64 [t_s] on the CPU, in (0, 1]: what each trained token of the sequence counts as; or
            None, where each counts as 1.

    Raises:
        ValueError: shapes differ, a count is negative, a share is not in (0, 1], or no token of the step is trained.
    """

    tokens_of_S: Tensor
    group_of_S: Tensor | None = None
    names: tuple[str, ...] = ()
    share_of_S: tuple[Tensor, ...] | None = None

    def __post_init__(self) -> None:
        counts = self.tokens_of_S
        if counts.ndim != 1 or counts.dtype != torch.int64 or counts.device.type != "cpu":
            got = f"{counts.dtype} {list(counts.shape)} on {counts.device}"
            raise ValueError(f"tokens_of_S: expected int64 [S] on the CPU, got {got}; convert it")
        if (counts < 0).any():
            raise ValueError(f"tokens_of_S: expected counts >= 0, got {int(counts.min())}; count the trained tokens")
        if counts.sum() == 0:
            raise ValueError(
                f"loss_mask: expected a trained token somewhere in the step, got none in {len(counts)} trajectories; "
                "check the masks"
            )
        groups = self.group_of_S
        if groups is not None and (groups.dtype != torch.int64 or groups.shape != counts.shape or (groups < 0).any()):
            raise ValueError(
                f"group_of_S: expected int64 [{len(counts)}], >= 0, got {groups.dtype} {list(groups.shape)}; "
                "number the groups from 0"
            )
        if self.names and len(self.names) != len(counts):
            raise ValueError(f"names: expected {len(counts)}, got {len(self.names)}; give every sequence one or none")
        if self.share_of_S is not None:
            self._check_shares(self.share_of_S)

    def _check_shares(self, share_of_S: tuple[Tensor, ...]) -> None:
        counts = self.tokens_of_S.tolist()
        if [len(share_T) for share_T in share_of_S] != counts:
            raise ValueError(
                f"share_of_S: expected a share for each trained token of {len(counts)} sequences, got other numbers; "
                "give those of own_once at the trained tokens"
            )
        if any(((share_T <= 0) | (share_T > 1)).any() for share_T in share_of_S):
            raise ValueError("share_of_S: expected shares above 0 and at most 1, got others; give those of own_once")

    @classmethod
    def from_trajectories(
        cls,
        trajectories: Sequence[Trajectory],
        *,
        shared_tokens: SharedTokens = "each",
        rollouts: Sequence[Hashable] | None = None,
    ) -> "StepDenominators":
        """The counts of a step made of these trajectories; their order numbers the sequences.

        Groups are there only if every trajectory names its group.

        Args:
            trajectories: those of the step.
            shared_tokens: as in the loss's config, see `LossConfig`.
            rollouts: with "once", what was sampled together; see `harts.losses.own_once`.

        Raises:
            ValueError: as the class and `own_once`, or rollouts without "once".
        """
        shares = None
        if shared_tokens == "once":
            weights = own_once(trajectories, rollouts)
            shares = tuple(
                torch.from_numpy(weight[trajectory.loss_mask])
                for weight, trajectory in zip(weights, trajectories, strict=True)
            )
        elif rollouts is not None:
            raise ValueError(f"rollouts: expected none with shared_tokens={shared_tokens!r}, got some; leave them out")
        numbers: dict[str, int] = {}
        groups = [numbers.setdefault(t.group, len(numbers)) for t in trajectories]
        return cls(
            tokens_of_S=torch.tensor([t.num_trained for t in trajectories], dtype=torch.int64),
            group_of_S=torch.tensor(groups, dtype=torch.int64) if "" not in numbers else None,
            names=tuple(t.name for t in trajectories),
            share_of_S=shares,
        )

    @classmethod
    def from_counts(
        cls, tokens_of_sequence: Sequence[int], group_of_sequence: Sequence[int] | None = None
    ) -> "StepDenominators":
        """The same from plain counts, such as those gathered from replicas that see only their own trajectories."""
        return cls(
            tokens_of_S=torch.tensor(list(tokens_of_sequence), dtype=torch.int64),
            group_of_S=None if group_of_sequence is None else torch.tensor(list(group_of_sequence), dtype=torch.int64),
        )

    def sequence_weights(self, normalization: Normalization, max_length: int | None = None) -> Tensor:
        """The weight of each trained token of each sequence: float64 [S] on the CPU, 0 where none is trained.

        A token that counts as a share has that share of it, see `shares_of`.

        Args:
            normalization: "token", "sequence", "group" or "constant".
            max_length: the constant of "constant"; not read otherwise.

        Raises:
            ValueError: an unknown normalization, "group" without groups, or "constant" without max_length.
        """
        tokens_S = self.tokens_of_S.double()
        if self.share_of_S is not None:
            tokens_S = torch.stack([share_T.sum() for share_T in self.share_of_S])
        if normalization == "token":
            divisor_S = tokens_S.sum().expand_as(tokens_S)
        elif normalization == "sequence":
            divisor_S = (tokens_S > 0).sum() * tokens_S
        elif normalization == "group":
            if self.group_of_S is None:
                raise ValueError(
                    "normalization 'group': expected a group for every trajectory, got some without; name their "
                    "groups or choose one of token, sequence, constant"
                )
            tokens_of_G = torch.bincount(self.group_of_S, weights=tokens_S)
            divisor_S = (tokens_of_G > 0).sum() * tokens_of_G[self.group_of_S]
        elif normalization == "constant":
            if max_length is None or max_length < 1:
                raise ValueError(f"max_length: expected an integer >= 1, got {max_length}; give the response limit")
            divisor_S = torch.full_like(tokens_S, len(tokens_S) * max_length)
        else:
            raise ValueError(
                f"normalization: expected one of token, sequence, group, constant, got {normalization!r}; "
                "choose one of them"
            )
        return torch.where(tokens_S > 0, 1 / divisor_S.where(tokens_S > 0, 1.0), 0.0)

    def shares_of(self, sequence_of_R: Tensor) -> Tensor | None:
        """What the trained tokens of these sequences count as, one sequence after another: float64 [T] on the CPU.

        None where each counts as 1.
        """
        if self.share_of_S is None:
            return None
        none = torch.zeros(0, dtype=torch.float64)
        return torch.cat([none, *(self.share_of_S[sequence] for sequence in sequence_of_R.tolist())])

    def check_whole(self, sequence_of_R: Tensor, tokens_of_R: Tensor) -> None:
        """Refuses a microbatch that holds a part of a sequence, its tokens scattered, or a sequence twice.

        Args:
            sequence_of_R: int64 [R] on any device: the sequence of each run of tokens of one sequence.
            tokens_of_R: int64 [R]: trained tokens in the run.

        Raises:
            ValueError: naming the trajectory.
        """
        sequence_of_R, tokens_of_R = sequence_of_R.cpu(), tokens_of_R.cpu()
        size = len(self.tokens_of_S)
        outside_R = (sequence_of_R < 0) | (sequence_of_R >= size)
        if outside_R.any():
            got = int(sequence_of_R[outside_R][0])
            raise ValueError(f"sequence_of_N: expected indices in [0, {size}), got {got}; number within the step")
        wrong_R = tokens_of_R != self.tokens_of_S[sequence_of_R]
        if wrong_R.any():
            run = int(wrong_R.int().argmax())
            sequence = int(sequence_of_R[run])
            raise ValueError(
                f"{self.label(sequence)}, field loss_mask: expected {int(self.tokens_of_S[sequence])} trained tokens "
                f"in a row, as in the step's denominators, got {int(tokens_of_R[run])}; a trajectory must be whole in "
                "one microbatch, and be numbered as in the step"
            )
        ordered_R = sequence_of_R.sort().values
        repeated = ordered_R[1:][ordered_R[1:] == ordered_R[:-1]]
        if len(repeated):
            raise ValueError(f"{self.label(int(repeated[0]))}: expected once in a microbatch, got twice; leave one out")

    def label(self, sequence: int) -> str:
        """What messages call a sequence of the step."""
        name = f"trajectory {self.names[sequence]}" if self.names else "trajectory"
        return f"{name} (number {sequence} of the step)"
