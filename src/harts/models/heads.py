"""From hidden rows to what was asked for of each trained token.

Shape suffixes: T rows, U head rows, M targets, N tokens of all trajectories, D channels, V vocabulary, K most likely
tokens.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from harts.layout import PackedTree
from harts.models.called import called_logprobs
from harts.models.router_output import RouterOutput
from harts.models.scores import Scores
from harts.models.seams import LogitShape, has_own_call
from harts.ops import row_logprobs
from harts.ops.kernels import Kernels
from harts.ops.logprobs import top_tokens
from harts.ops.logprobs.indices import head_rows, heads_of_targets, heads_of_tokens, targets_of_tokens
from harts.ops.rows import RowIndex, gather_rows

__all__ = ["Parts", "check_top_k", "must_call", "run_head", "to_tokens"]


class Parts(NamedTuple):
    """What the head gave; a tuple, so that FSDP finds the tensors in it, none of them a view (FSDP warns of those)."""

    logprobs_M: Tensor
    entropy_M: Tensor | None
    hidden_UD: Tensor | None
    top_logprobs_UK: Tensor | None
    top_ids_UK: Tensor | None


def must_call(head: nn.Linear, shape: LogitShape) -> bool:
    """Whether a head's logits are more than its weight and a temperature give."""
    return has_own_call(head) or shape.cap is not None


def run_head(
    head: nn.Linear,
    hidden_TD: Tensor,
    packed: PackedTree,
    kernels: Kernels,
    *,
    shape: LogitShape,
    entropy: bool,
    hidden: bool,
    top_k: int | None,
) -> Parts:
    """Scores the rows' targets; in a sharded model while the head is gathered.

    A head with hooks or a forward of its own is called, `kernels.chunk_rows` rows at a time. Else its weight is all
    there is to it, and `kernels.row_logprobs` runs.
    """
    hidden_UD = gather_rows(hidden_TD, packed.layout(head_rows)) if hidden else None
    if must_call(head, shape):
        given_UD = gather_rows(hidden_TD, packed.layout(head_rows)) if hidden_UD is None else hidden_UD
        logprobs_M, entropy_U, top_logprobs_UK, top_ids_UK = called_logprobs(
            head, given_UD, packed, shape, entropy=entropy, top_k=top_k, chunk_rows=kernels.chunk_rows
        )
        entropy_M = None if entropy_U is None else gather_rows(entropy_U, packed.layout(heads_of_targets))
        return Parts(logprobs_M, entropy_M, hidden_UD, top_logprobs_UK, top_ids_UK)
    if shape.scaling != 1:
        packed = dataclasses.replace(packed, temperature_U=packed.temperature_U * shape.scaling)
    hidden_TD, weight_VD, bias_V = _cast(hidden_TD, head)
    with torch.autocast(hidden_TD.device.type, enabled=False):
        return _run_op(hidden_TD, weight_VD, bias_V, packed, kernels, entropy, top_k)._replace(hidden_UD=hidden_UD)


def _cast(hidden_TD: Tensor, head: nn.Linear) -> tuple[Tensor, Tensor, Tensor | None]:
    """Hidden rows, weight and bias in the dtype that autocast would give the head, forward and backward."""
    tensors = (hidden_TD, head.weight, head.bias)
    device = hidden_TD.device.type
    if torch.is_autocast_enabled(device):
        to = torch.get_autocast_dtype(device)
        tensors = tuple(x if x is None or x.dtype == torch.float64 else x.to(to) for x in tensors)  # type: ignore[assignment]
    if tensors[0].dtype != tensors[1].dtype:
        raise ValueError(
            f"model: expected hidden states in the head's dtype {tensors[1].dtype}, got {tensors[0].dtype}; cast them "
            "in a forward pre-hook on the head, or load both in one dtype"
        )
    return tensors


def _run_op(
    hidden_TD: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    packed: PackedTree,
    kernels: Kernels,
    entropy: bool,
    top_k: int | None,
) -> Parts:
    """The most likely tokens are more targets: they are differentiable, and have the bits of any target."""
    top_ids_UK, targets, scored = None, len(packed.token_M), packed
    if top_k is not None:
        top_ids_UK = top_tokens(hidden_TD, weight_VD, packed, top_k, bias_V=bias_V, chunk_rows=kernels.chunk_rows)
        head_row = torch.arange(len(top_ids_UK), device=packed.device).repeat_interleave(top_k)
        scored = dataclasses.replace(
            packed,
            head_of_M=torch.cat([packed.head_of_M, head_row]),
            token_M=torch.cat([packed.token_M, top_ids_UK.flatten()]),
        )
    logprobs, entropies = row_logprobs(
        hidden_TD,
        weight_VD,
        scored,
        bias_V=bias_V,
        entropy=entropy,
        chunk_rows=kernels.chunk_rows,
        impl=kernels.row_logprobs,
    )
    if top_ids_UK is None:
        return Parts(logprobs, entropies, None, None, None)
    return Parts(
        logprobs[:targets].clone(),
        None if entropies is None else entropies[:targets].clone(),
        None,
        logprobs[targets:].view_as(top_ids_UK).clone(),
        top_ids_UK,
    )


def to_tokens(parts: Parts, packed: PackedTree, router: RouterOutput | None) -> Scores:
    """One gather hands a row's value to every trajectory through it; its backward sums their gradients."""
    ids_UK, ids_NK = parts.top_ids_UK, None
    if ids_UK is not None:
        ids_NK = torch.nn.functional.pad(ids_UK, (0, 0, 0, 1), value=-1)[packed.layout(heads_of_tokens).index_K]

    def to_each(values: Tensor | None, index: Callable[[PackedTree], RowIndex]) -> Tensor | None:
        return None if values is None else gather_rows(values, packed.layout(index), missing=True)

    return Scores(
        logprobs_N=gather_rows(parts.logprobs_M, packed.layout(targets_of_tokens), missing=True),
        entropy_N=to_each(parts.entropy_M, targets_of_tokens),
        router=router,
        hidden_N=to_each(parts.hidden_UD, heads_of_tokens),
        top_logprobs_NK=to_each(parts.top_logprobs_UK, heads_of_tokens),
        top_ids_NK=ids_NK,
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
            f"top_k: expected a whole number from 1 to {vocabulary}, the model's vocabulary, got {top_k!r}; leave it "
            "out for none"
        )
