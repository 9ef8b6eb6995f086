"""From hidden rows to what was asked for of each trained token.

Shape suffixes: T rows, U head rows, M targets, N tokens of all trajectories, D channels, V vocabulary, K most likely
tokens.
"""

import dataclasses
from typing import NamedTuple

import torch
from torch import Tensor, nn

from harts.layout import PackedTree
from harts.models.routing import RouterOutput
from harts.models.scores import Scores
from harts.ops import row_logprobs
from harts.ops.kernels import Kernels
from harts.ops.logprobs import top_tokens
from harts.ops.rows import gather_rows

__all__ = ["Parts", "check_top_k", "run_head", "to_tokens"]


class Parts(NamedTuple):
    """What the head gave; a tuple, so that FSDP finds the tensors in it, none of them a view (FSDP warns of those)."""

    logprobs_M: Tensor
    entropy_M: Tensor | None
    hidden_UD: Tensor | None
    top_logprobs_UK: Tensor | None
    top_ids_UK: Tensor | None


def run_head(
    head: nn.Linear,
    hidden_TD: Tensor,
    packed: PackedTree,
    kernels: Kernels,
    *,
    entropy: bool,
    hidden: bool,
    top_k: int | None,
) -> Parts:
    """Scores the rows' targets; in a sharded model while the head is gathered.

    The most likely tokens are more targets, so that they are differentiable and have the bits of any target.
    """
    top_ids_UK, targets = None, len(packed.token_M)
    scored = packed
    if top_k is not None:
        top_ids_UK = top_tokens(hidden_TD, head.weight, packed, top_k, bias_V=head.bias, chunk_rows=kernels.chunk_rows)
        head_row = torch.arange(len(top_ids_UK), device=packed.device).repeat_interleave(top_k)
        scored = dataclasses.replace(
            packed,
            head_of_M=torch.cat([packed.head_of_M, head_row]),
            token_M=torch.cat([packed.token_M, top_ids_UK.flatten()]),
        )
    logprobs, entropies = row_logprobs(
        hidden_TD,
        head.weight,
        scored,
        bias_V=head.bias,
        entropy=entropy,
        chunk_rows=kernels.chunk_rows,
        impl=kernels.row_logprobs,
    )
    hidden_UD = gather_rows(hidden_TD, packed.head_row_U) if hidden else None
    if top_ids_UK is None:
        return Parts(logprobs, entropies, hidden_UD, None, None)
    return Parts(
        logprobs[:targets].clone(),
        None if entropies is None else entropies[:targets].clone(),
        hidden_UD,
        logprobs[targets:].view_as(top_ids_UK).clone(),
        top_ids_UK,
    )


def to_tokens(parts: Parts, packed: PackedTree, router: RouterOutput | None) -> Scores:
    """One gather hands a row's value to every trajectory through it; its backward sums their gradients."""
    target_of_N = packed.target_of_N
    head_of_N, ids_UK = target_of_N, parts.top_ids_UK
    if parts.hidden_UD is not None or ids_UK is not None:
        head_of_N = torch.nn.functional.pad(packed.head_of_M, (0, 1), value=len(packed.head_row_U))[target_of_N]

    def to_each(values: Tensor | None, index_N: Tensor) -> Tensor | None:
        return None if values is None else gather_rows(values, index_N, missing=True)

    return Scores(
        logprobs_N=gather_rows(parts.logprobs_M, target_of_N, missing=True),
        entropy_N=to_each(parts.entropy_M, target_of_N),
        router=router,
        hidden_N=to_each(parts.hidden_UD, head_of_N),
        top_logprobs_NK=to_each(parts.top_logprobs_UK, head_of_N),
        top_ids_NK=None if ids_UK is None else torch.nn.functional.pad(ids_UK, (0, 0, 0, 1), value=-1)[head_of_N],
    )


def check_top_k(top_k: int | None, vocabulary: int) -> None:
    """Refuses a number of most likely tokens that there are not.

    Raises:
        ValueError: it is no whole number from 1 to the vocabulary.
    """
    if top_k is None:
        return
    if isinstance(top_k, bool) or not isinstance(top_k, int) or not 1 <= top_k <= vocabulary:
        raise ValueError(
            f"top_k: expected a whole number from 1 to {vocabulary}, the model's vocabulary, came {top_k!r}; leave it "
            "out for none"
        )
