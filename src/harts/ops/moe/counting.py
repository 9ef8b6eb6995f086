"""How often the rows of a tree count, and a router summed over the tokens that count.

Shape suffixes: T rows, N tokens of all trajectories, E experts, K experts per token, U units (what statistics are kept
apart for: each trajectory, or one unit for all), R runs (rows that the same units count), P pairs of a unit and a run
that it counts, X what is summed.
"""

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from harts.layout import PackedTree
from harts.ops.moe.gating import Scores, routing_probabilities
from harts.ops.rows import RowGroups, RowIndex, gather_rows, segment_sum
from harts.transfer import send, to_int64

__all__ = ["RouterSums", "Scope", "TokenCount", "count_tokens", "router_sums"]

Scope = Literal["trajectory", "microbatch", "step"]
"""Tokens over which a load is taken; see `harts.models.router_losses`."""

_RUN = 64  # most rows of a run: one program of a kernel adds a run row by row


@dataclass(frozen=True, eq=False)
class _Runs:
    """Runs of rows, and which units count them."""

    run_of_T: Tensor
    rows_of_R: RowGroups
    unit_of_P: RowIndex
    run_of_P: RowIndex


@dataclass(frozen=True, eq=False)
class TokenCount:
    """How often each row counts, and for whom; made by `count_tokens`.

    Attributes:
        weight_T: int64 [T], in row order: counted tokens that run as this row.
        tokens_U: int64 [U] on the CPU: counted tokens of each unit.
        runs: None where all tokens are one unit.
    """

    weight_T: Tensor
    tokens_U: Tensor
    runs: _Runs | None

    @property
    def num_units(self) -> int:
        """U."""
        return len(self.tokens_U)

    def sum_tokens(self, values_TX: Tensor) -> Tensor:
        """Sum over each unit's tokens of the values of their rows, [U, X], differentiable, in a fixed order."""
        if self.runs is None:
            # no matrix product, which autocast or TF32 would round
            return (values_TX * self.weight_T.to(values_TX.dtype).unsqueeze(-1)).sum(0, keepdim=True)
        runs = self.runs
        values_RX: Tensor = _SumGroups.apply(values_TX, runs.rows_of_R, runs.run_of_T)  # type: ignore[no-untyped-call]
        values_PX = gather_rows(values_RX, runs.run_of_P)
        return _SumGroups.apply(values_PX, runs.unit_of_P.groups, runs.unit_of_P.index_K)  # type: ignore[no-any-return, no-untyped-call]

    def count_experts(self, chosen_TK: Tensor, num_experts: int) -> Tensor:
        """Assignments of each unit's tokens to each expert, int64 [U, E]. Integers: any order gives the same."""
        chosen = chosen_TK.reshape(-1)
        per_token = chosen_TK.shape[1]
        if self.runs is None:
            load_E = self.weight_T.new_zeros(num_experts)
            return load_E.index_add_(0, chosen, self.weight_T.repeat_interleave(per_token)).unsqueeze(0)
        runs = self.runs
        place = runs.run_of_T.repeat_interleave(per_token) * num_experts + chosen
        load_RE = self.weight_T.new_zeros(runs.rows_of_R.num_rows * num_experts)
        load_RE = load_RE.index_add_(0, place, torch.ones_like(place)).view(-1, num_experts)
        load_UE = load_RE.new_zeros(self.num_units, num_experts)
        return load_UE.index_add_(0, runs.unit_of_P.index_K, load_RE.index_select(0, runs.run_of_P.index_K))


def count_tokens(packed: PackedTree, *, scope: Scope, mask_N: Tensor | None = None) -> TokenCount:
    """How often the rows of a tree count.

    Args:
        packed: the tree.
        scope: "trajectory" keeps every trajectory apart; "microbatch" and "step" take all tokens together.
        mask_N: bool [N]: tokens that count, where the unmerged batch would mask some; None: all.

    Raises:
        ValueError: unknown scope, or a mask of another shape or dtype.
    """
    if scope not in ("trajectory", "microbatch", "step"):
        raise ValueError(f"scope: expected 'trajectory', 'microbatch' or 'step', got {scope!r}")
    if mask_N is not None and (mask_N.dtype != torch.bool or mask_N.shape != (packed.num_tokens,)):
        raise ValueError(
            f"mask_N: expected bool [{packed.num_tokens}], one a token of all trajectories, got {mask_N.dtype} "
            f"{list(mask_N.shape)}"
        )
    rows_N = packed.tree.row_of_N - packed.start
    counted_N = (rows_N >= 0) & (rows_N < packed.num_rows)
    if mask_N is not None:
        counted_N &= mask_N.cpu().numpy()
    weight_T = send(torch.from_numpy(np.bincount(rows_N[counted_N], minlength=packed.num_rows)), packed.device)
    if scope != "trajectory":
        return TokenCount(weight_T, torch.tensor([int(counted_N.sum())]), None)
    offset_B1 = packed.tree.offset_B1
    tokens_U = torch.from_numpy(np.add.reduceat(counted_N, offset_B1[:-1], dtype=np.int64))
    return TokenCount(weight_T, tokens_U, _find_runs(packed, rows_N, counted_N))


def _find_runs(packed: PackedTree, rows_N: Any, counted_N: Any) -> _Runs:
    """Cuts the rows where the set of trajectories that count them can change, and at least every `_RUN` rows."""
    num_rows = packed.num_rows
    first_N = np.zeros(packed.num_tokens, np.bool_)
    first_N[packed.tree.offset_B1[:-1]] = True
    changes_N = first_N | np.append(True, counted_N[1:] != counted_N[:-1])
    starts_T = np.zeros(num_rows + 1, np.bool_)
    start_S = packed.tree.start_S - packed.start
    starts_T[start_S[(start_S >= 0) & (start_S < num_rows)]] = True
    rows_N = np.clip(rows_N, 0, num_rows - 1)  # tokens of other pieces count nowhere here
    starts_T[rows_N[changes_N]] = True
    starts_T[:num_rows:_RUN] = True
    start_R = np.flatnonzero(starts_T[:num_rows])
    run_of_T = np.cumsum(starts_T[:num_rows]) - 1
    # within a trajectory the rows of a run are consecutive, and all of them count or none
    run_N = run_of_T[rows_N]
    enters_N = counted_N & (changes_N | np.append(True, run_N[1:] != run_N[:-1]))
    unit_N = np.repeat(np.arange(packed.tree.num_trajectories), np.diff(packed.tree.offset_B1))

    device = packed.device
    offset_R1 = to_int64(np.append(start_R, num_rows), device)
    unit_of_P = RowIndex(to_int64(unit_N[enters_N], device), packed.tree.num_trajectories)
    return _Runs(
        run_of_T=to_int64(run_of_T, device),
        rows_of_R=RowGroups(torch.arange(num_rows, device=device), offset_R1),
        unit_of_P=unit_of_P,
        run_of_P=RowIndex(to_int64(run_N[enters_N], device), len(start_R)),
    )


class _SumGroups(torch.autograd.Function):
    """`segment_sum` with a backward: each entry gets the gradient of its group's sum."""

    @staticmethod
    def forward(ctx: Any, values_KX: Tensor, groups: RowGroups, group_of_K: Tensor) -> Tensor:
        ctx.save_for_backward(group_of_K)
        return segment_sum(values_KX, groups)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad_TX: Tensor) -> tuple[Tensor, None, None]:
        (group_of_K,) = ctx.saved_tensors
        return grad_TX.index_select(0, group_of_K), None, None


@dataclass(frozen=True, eq=False)
class RouterSums:
    """One layer's router, summed over tokens.

    Attributes:
        load_UE: int64 [U, E]: assignments of each unit's tokens to each expert.
        physical_E: int64 [E]: rows that each expert ran.
        prob_UE: [U, E], fp32 or fp64, differentiable: sum of the routing probabilities.
        z_U: [U], differentiable: sum of squared log-sum-exps of the logits.
    """

    load_UE: Tensor
    physical_E: Tensor
    prob_UE: Tensor
    z_U: Tensor


def router_sums(logits_TE: Tensor, chosen_TK: Tensor, count: TokenCount, *, scores: Scores = "softmax") -> RouterSums:
    """Sums one layer's router over the tokens of each unit; gradients flow to the logits.

    Args:
        logits_TE: [T, E]. Computed with in at least fp32.
        chosen_TK: int64 [T, K]: the experts that ran.
        count: from `count_tokens`.
        scores: what the router makes of its logits; sigmoids are divided by their sum over the experts.

    Raises:
        ValueError: shapes do not fit.
    """
    rows, num_experts = logits_TE.shape
    if rows != len(count.weight_T) or chosen_TK.shape[0] != rows or chosen_TK.ndim != 2:
        raise ValueError(
            f"router_sums: expected {len(count.weight_T)} rows of logits and of chosen experts, got "
            f"{list(logits_TE.shape)} and {list(chosen_TK.shape)}"
        )
    logits_TE = logits_TE.to(torch.promote_types(logits_TE.dtype, torch.float32))
    prob_UE = count.sum_tokens(routing_probabilities(logits_TE, scores))
    z_U = count.sum_tokens(logits_TE.logsumexp(-1, keepdim=True).square()).squeeze(-1)
    with torch.no_grad():
        chosen = chosen_TK.reshape(-1)
        physical_E = chosen.new_zeros(num_experts).index_add_(0, chosen, torch.ones_like(chosen))
        return RouterSums(count.count_experts(chosen_TK, num_experts), physical_E, prob_UE, z_U)
