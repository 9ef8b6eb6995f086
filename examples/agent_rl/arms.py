"""How the rows of a step are scored: on the tree, or row by row through plain transformers; and faults to be caught."""

import dataclasses
import importlib
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import numpy as np
import torch
from rollouts import Row
from torch import Tensor, nn

import harts
from harts.blocks import BLOCK
from harts.layout import PackedTree
from harts.ops.chains.levels import Levels, levels

__all__ = ["ARMS", "FAULTS", "Score", "prepare"]

Score = Callable[[nn.Module, Sequence[Row]], list[Tensor]]
"""Log-probability of each token of each row, 0 where the model did not choose it."""


def prepare(model: nn.Module, arm: str) -> nn.Module:
    """The model as the arm trains it."""
    return model if arm in ("rows", "reordered") else harts.attach(model)


def on_tree(model: nn.Module, rows: Sequence[Row]) -> list[Tensor]:
    packed = _pack(rows)
    return list(packed.split(harts.logprobs(model, packed)))


def by_row(model: nn.Module, rows: Sequence[Row]) -> list[Tensor]:
    """All rows in one call, padded on the right, which a causal model never sees."""
    width = max(len(row.tokens) for row in rows)
    ids_BL = torch.tensor([[*row.tokens, *[0] * (width - len(row.tokens))] for row in rows])
    logits_BLV = model(input_ids=ids_BL, use_cache=False).logits[:, :-1]
    logprobs_BL = logits_BLV.log_softmax(-1).gather(-1, ids_BL[:, 1:, None])[..., 0]
    logprobs_BL = torch.nn.functional.pad(logprobs_BL, (1, 0))
    return [logprobs_BL[number, : len(row.tokens)] * torch.tensor(row.chosen) for number, row in enumerate(rows)]


def reordered(model: nn.Module, rows: Sequence[Row]) -> list[Tensor]:
    """The same, last row first: what summing in another order does by itself."""
    return by_row(model, rows[::-1])[::-1]


def _pack(rows: Sequence[Row]) -> PackedTree:
    trajectories = [harts.Trajectory(token_ids=np.array(row.tokens), loss_mask=np.array(row.chosen)) for row in rows]
    return harts.pack(harts.PrefixTree.build(trajectories))


def zero_state(model: nn.Module, rows: Sequence[Row]) -> list[Tensor]:
    """A fault: where several blocks go on from one, all but the first read a state of zero."""
    reference = importlib.import_module("harts.ops.linear_attention.reference")
    recur = reference._recur

    def forgetful(u: Tensor, w: Tensor, k_end: Tensor, decay: Tensor, layout: Levels, states: Tensor) -> Any:
        starts, ends, written = recur(u, w, k_end, decay, layout, states)
        kept = torch.cat([_first_of_equals(each) for each in layout.parent_E.split(list(layout.level_sizes))])
        return starts * kept[:, None, None, None], ends, written

    with mock.patch.object(reference, "_recur", forgetful):
        return on_tree(model, rows)


def _first_of_equals(parent_E: Tensor) -> Tensor:
    """True where no entry before has the same value."""
    return (parent_E[:, None] == parent_E[None, :]).tril(-1).sum(1) == 0


def wrong_parent(model: nn.Module, rows: Sequence[Row]) -> list[Tensor]:
    """A fault: each block goes on from another block than its own of the level above."""
    packed = _pack(rows)
    layout = packed.layout(levels, BLOCK, ())
    parts = layout.parent_E.split(list(layout.level_sizes))
    shifted = [(part + 1) % above for part, above in zip(parts, (1, *layout.level_sizes), strict=False)]
    broken = dataclasses.replace(packed)
    broken._layouts[levels, BLOCK, ()] = dataclasses.replace(layout, parent_E=torch.cat(shifted))
    return list(packed.split(harts.logprobs(model, broken)))


ARMS: dict[str, Score] = {
    "tree": on_tree,
    "rows": by_row,
    "reordered": reordered,
    "zero_state": zero_state,
    "wrong_parent": wrong_parent,
}
FAULTS = ("zero_state", "wrong_parent")
