"""Batches as trainers hold them, padded or packed: log-probs in the caller's own shape, every distinct token run once.

Shape suffixes: B rows, L places of a padded row, S sequences of a packed row, N its tokens. An output [B, L] or [1, N]
has one entry a token, at that token's own place: nothing is shifted.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Unpack, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from harts.layout import PackedTree, pack
from harts.models.router_output import RouterOutput
from harts.models.scores import Extras
from harts.models.scoring import score_tree
from harts.models.sharded import compute_device
from harts.ops.kernels import Kernels
from harts.trajectory import Trajectory
from harts.tree import PrefixTree

__all__ = ["BatchScores", "ScoreOptions", "logprobs_flat", "logprobs_padded"]

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


class ScoreOptions(Extras, total=False):
    """What both functions take besides: extras, kernels and token_budget as in `harts.logprobs`, key_cap as in
    `harts.pack`."""

    kernels: Kernels | None
    token_budget: int | None
    key_cap: int | None


@dataclass(frozen=True, eq=False)
class BatchScores:
    """What a batch was scored with, in the shape of its ids.

    Attributes:
        logprobs: log-probability (nats) of each scored token given those before it, fp32 (fp64 for an fp64 model),
            differentiable; 0 elsewhere.
        entropy: entropy (nats) of the distribution that each scored token was predicted from; None unless asked for.
        router: of a mixture of experts; None unless asked for.
        hidden: the hidden state that predicted each scored token, with the channels behind the shape of the ids; None
            unless asked for.
        top_logprobs, top_ids: of the most likely tokens in each scored token's place, largest first, behind the shape
            of the ids; None unless asked for. Ids elsewhere are -1.
        packed: the tree that ran: `packed.num_rows` rows for `packed.num_tokens` tokens.
    """

    logprobs: Tensor
    entropy: Tensor | None
    router: RouterOutput | None
    packed: PackedTree
    hidden: Tensor | None = None
    top_logprobs: Tensor | None = None
    top_ids: Tensor | None = None


def logprobs_padded(
    model: nn.Module,
    input_ids_BL: Tensor,
    attention_mask_BL: Tensor | None = None,
    *,
    scored_BL: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    allow_empty: bool = False,
    **options: Unpack[ScoreOptions],
) -> BatchScores:
    """Log-probs of a padded batch. Equal starts of rows are found by their ids and run once, forward and backward.

    Args:
        model: one that `harts.attach` was called on.
        input_ids_BL: integers [B, L]; what is padding may hold any id.
        attention_mask_BL: [B, L], 1 or True for a token, 0 for padding; None: no padding. The tokens of a row stand
            together; padding may be before them, behind them, or both (a prompt padded left and a completion padded
            right).
        scored_BL: [B, L], 1 or True where the token's log-probability is wanted: `labels != -100`, unshifted. None:
            all tokens but the first of each row, which nothing predicts.
        temperature: a number > 0, or one a row, [B]; logits are divided by it.
        allow_empty: whether rows may have nothing scored. They still count in the statistics of routers.
        **options: see `ScoreOptions`.

    Returns:
        `BatchScores` of shape [B, L], on the model's device.

    Raises:
        ValueError: a shape or value does not fit, padding between tokens, a row without tokens, without a scored token
            (unless allowed), or with its first token scored; the message names the row. See also `harts.logprobs`.
    """
    ids = _integers("input_ids", input_ids_BL, dims=2, shape="[B, L]")
    attended = _mask("attention_mask", attention_mask_BL, ids.shape)
    for row, kept in enumerate(attended):
        _check_together(row, kept)
    spans = [(int(np.argmax(kept)), int(np.argmax(kept)) + int(kept.sum())) for kept in attended]
    first = np.array([row * ids.shape[1] + span[0] for row, span in enumerate(spans)])
    scored = _scored("scored", scored_BL, attended, first)
    rows = [(ids[row, slice(*span)], scored[row, slice(*span)]) for row, span in enumerate(spans)]
    trajectories = _trajectories("row", rows, _temperatures(temperature, len(rows), "row"), allow_empty)
    return _score(model, trajectories, np.flatnonzero(attended), input_ids_BL.shape, options)


def logprobs_flat(
    model: nn.Module,
    input_ids_1N: Tensor,
    *,
    cu_seqlens: Tensor | Sequence[int] | None = None,
    position_ids: Tensor | None = None,
    scored_1N: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    allow_empty: bool = False,
    **options: Unpack[ScoreOptions],
) -> BatchScores:
    """Log-probs of sequences packed one behind another, without padding; equal starts run once, as in a padded batch.

    Args:
        model: one that `harts.attach` was called on.
        input_ids_1N: integers [1, N] or [N].
        cu_seqlens: integers [S + 1], rising from 0 to N: sequence i has the tokens `cu_seqlens[i]:cu_seqlens[i + 1]`.
        position_ids: in place of it, integers of the shape of the ids: 0, 1, 2, ... in each sequence.
        scored_1N: of the shape of the ids, 1 or True where the token's log-probability is wanted. None: all but the
            first of each sequence.
        temperature: a number > 0, or one a sequence, [S].
        allow_empty: whether sequences may have nothing scored.
        **options: see `ScoreOptions`.

    Returns:
        `BatchScores` of the shape of the ids, on the model's device.

    Raises:
        ValueError: as for `logprobs_padded`, naming the sequence; not exactly one of cu_seqlens and position_ids.
    """
    shape = tuple(input_ids_1N.shape)
    if len(shape) == 2 and shape[0] != 1:
        raise ValueError(
            f"input_ids: expected one packed row, [1, N] or [N], got {list(shape)}; use harts.logprobs_padded"
        )
    ids = _integers("input_ids", input_ids_1N.reshape(-1) if len(shape) == 2 else input_ids_1N, dims=1, shape="[1, N]")
    cuts = _cuts(len(ids), shape, cu_seqlens, position_ids)
    if scored_1N is not None and tuple(scored_1N.shape) != shape:
        raise ValueError(f"scored: expected the shape of input_ids {list(shape)}, got {list(scored_1N.shape)}")
    flat = None if scored_1N is None else scored_1N.reshape(-1)
    scored = _scored("scored", flat, np.ones(len(ids), np.bool_), cuts[:-1])
    rows = [(ids[start:stop], scored[start:stop]) for start, stop in itertools.pairwise(cuts)]
    trajectories = _trajectories("sequence", rows, _temperatures(temperature, len(rows), "sequence"), allow_empty)
    return _score(model, trajectories, np.arange(len(ids)), shape, options)


def _score(
    model: nn.Module, trajectories: list[Trajectory], place_N: Ints, shape: Sequence[int], options: ScoreOptions
) -> BatchScores:
    device = compute_device(model)
    packed = pack(PrefixTree.build(trajectories), key_cap=options.get("key_cap"), device=device)
    extras: Any = {name: value for name, value in options.items() if name != "key_cap"}
    scores = score_tree(model, packed, **extras)
    # the caller's places, each once: a copy, whose backward is a gather
    place = torch.from_numpy(place_N).to(device)

    def to_shape(values: Tensor | None, *, elsewhere: int = 0) -> Tensor | None:
        if values is None:
            return None
        out = values.new_full((int(np.prod(shape)), *values.shape[1:]), elsewhere)
        return out.index_copy(0, place, values).reshape(*shape, *values.shape[1:])

    return BatchScores(
        logprobs=cast(Tensor, to_shape(scores.logprobs_N)),
        entropy=to_shape(scores.entropy_N),
        router=scores.router,
        packed=packed,
        hidden=to_shape(scores.hidden_N),
        top_logprobs=to_shape(scores.top_logprobs_NK),
        top_ids=to_shape(scores.top_ids_NK, elsewhere=-1),
    )


# -- checks -----------------------------------------------------------------------------------------------------


def _integers(name: str, values: Tensor, *, dims: int, shape: str) -> Ints:
    if values.dim() != dims or values.numel() == 0:
        raise ValueError(f"{name}: expected a batch {shape} with at least one token, got shape {list(values.shape)}")
    if values.is_floating_point() or values.is_complex() or values.dtype == torch.bool:
        raise ValueError(f"{name}: expected integers, got {values.dtype}; convert with .long()")
    return values.detach().cpu().numpy().astype(np.int64, copy=False)


def _mask(name: str, values: Tensor | None, shape: tuple[int, ...]) -> Bools:
    if values is None:
        return np.ones(shape, np.bool_)
    if tuple(values.shape) != shape:
        raise ValueError(f"{name}: expected the shape of input_ids {list(shape)}, got {list(values.shape)}")
    mask = values.detach().cpu().numpy() if values.dtype != torch.bfloat16 else values.detach().float().cpu().numpy()
    if mask.dtype != np.bool_ and not np.isin(mask, (0, 1)).all():
        at = np.argwhere(~np.isin(mask, (0, 1)))[0].tolist()
        raise ValueError(f"{name}: expected 0/1 or booleans, got {mask[tuple(at)]} at {at}")
    return mask.astype(np.bool_)


def _check_together(row: int, kept: Bools) -> None:
    at = np.flatnonzero(kept)
    if len(at) == 0:
        raise ValueError(
            f"row {row}, attention_mask: expected at least one token, got only padding; leave this row out"
        )
    if int(at[-1]) - int(at[0]) + 1 != len(at):
        hole = int(at[0]) + int(np.argmin(kept[at[0] :]))
        raise ValueError(
            f"row {row}, attention_mask: expected padding only before and behind the row's tokens, got some between "
            f"them, at place {hole}; move the tokens together"
        )


def _scored(name: str, values: Tensor | None, attended: Bools, first: Ints) -> Bools:
    """Which places are scored; first: flat places of the rows' first tokens."""
    if values is None:
        scored = attended.copy()
        scored.reshape(-1)[first] = False
        return scored
    scored = _mask(name, values, attended.shape)
    if (scored & ~attended).any():
        at = np.argwhere(scored & ~attended)[0].tolist()
        raise ValueError(f"{name}: expected only tokens to be scored, got padding at {at}; unset it")
    bad = np.flatnonzero(scored.reshape(-1)[first])
    if len(bad):
        raise ValueError(
            f"{name}: expected the first token of each row or sequence unset, since nothing predicts it, got it "
            f"set in number {bad[0]}; unset it, or give the prompt that got before"
        )
    return scored


def _cuts(
    length: int,
    shape: tuple[int, ...],
    cu_seqlens: Tensor | Sequence[int] | None,
    position_ids: Tensor | None,
) -> Ints:
    if (cu_seqlens is None) == (position_ids is None):
        got = "none" if cu_seqlens is None else "both"
        raise ValueError(f"expected exactly one of cu_seqlens and position_ids, got {got}")
    if position_ids is not None:
        return _cuts_of_positions(position_ids, shape)
    cuts = _integers("cu_seqlens", torch.as_tensor(cu_seqlens), dims=1, shape="[S + 1]")
    if len(cuts) < 2 or cuts[0] != 0 or cuts[-1] != length:
        raise ValueError(f"cu_seqlens: expected to rise from 0 to {length}, the number of tokens, got {cuts.tolist()}")
    sizes = np.diff(cuts)
    if (sizes < 1).any():
        bad = int(np.argmax(sizes < 1))
        raise ValueError(
            f"sequence {bad}, cu_seqlens: expected at least one token, got {sizes[bad]}; leave empty sequences out"
        )
    return cuts


def _cuts_of_positions(position_ids: Tensor, shape: tuple[int, ...]) -> Ints:
    if tuple(position_ids.shape) != shape:
        raise ValueError(
            f"position_ids: expected the shape of input_ids {list(shape)}, got {list(position_ids.shape)}; one "
            "position a token (several, as for images, are not supported)"
        )
    positions = _integers("position_ids", position_ids.reshape(-1), dims=1, shape="[1, N]")
    starts = np.flatnonzero(positions == 0)
    cuts = np.append(starts, len(positions))
    if len(starts) == 0 or starts[0] != 0:
        raise ValueError(f"sequence 0, position_ids: expected to start at 0, got {positions[0]}")
    expected = np.arange(len(positions)) - np.repeat(starts, np.diff(cuts))
    if (positions != expected).any():
        at = int(np.argmax(positions != expected))
        raise ValueError(
            f"position_ids: expected 0, 1, 2, ... in each sequence, got {positions[at]} in place of {expected[at]} at "
            f"place {at}; give cu_seqlens"
        )
    return cuts


def _temperatures(temperature: float | Tensor, count: int, what: str) -> list[float]:
    if isinstance(temperature, Tensor) and temperature.dim() > 0:
        if tuple(temperature.shape) != (count,):
            raise ValueError(
                f"temperature: expected a number or one a {what} ({count}), got shape {list(temperature.shape)}"
            )
        return [float(each) for each in temperature.detach().tolist()]
    return [float(temperature)] * count


def _trajectories(
    what: str, rows: list[tuple[Ints, Bools]], temperatures: list[float], allow_empty: bool
) -> list[Trajectory]:
    for number, (_, scored) in enumerate(rows):
        if not allow_empty and not scored.any():
            raise ValueError(
                f"{what} {number}: expected at least one scored token, got none (a completion of length zero?); leave "
                "it out, or pass allow_empty=True for zeros"
            )
    return [
        Trajectory(token_ids=cast(Any, ids), loss_mask=scored, temperature=temperatures[number], id=f"{what} {number}")
        for number, (ids, scored) in enumerate(rows)
    ]
