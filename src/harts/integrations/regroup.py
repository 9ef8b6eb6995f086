"""Rows that GRPO and RLOO of TRL buffer for one optimiser step, regrouped by prefix.

TRL shuffles the rows of a generation before it cuts them into microbatches, so rows of a group end up in different
calls of the model, where they cannot share. Order within a step matters to no loss that averages over all its rows.
"""

from typing import Any

import torch
from torch import Tensor

__all__ = ["regroup", "why_not"]

Batch = dict[str, Any]

_PER_MICROBATCH = ("bnpo",)
"""Loss types whose denominator counts the tokens of a microbatch."""


def why_not(trainer: Any) -> str | None:
    """Why the rows of a trainer must stay in the microbatches that TRL made; None: they need not."""
    args = trainer.args
    steps, window = args.steps_per_generation, args.gradient_accumulation_steps
    loss_type = getattr(args, "loss_type", None)
    if loss_type in _PER_MICROBATCH:
        return f"loss_type={loss_type!r} divides by the tokens of a microbatch"
    if getattr(args, "top_entropy_quantile", 1.0) < 1.0:
        return "top_entropy_quantile takes its quantile over a microbatch"
    if getattr(trainer, "_entropy_bonus_enabled", False):
        return "the entropy bonus is a mean over a microbatch"
    if getattr(trainer, "aux_loss_enabled", False):
        return "the routers' balancing loss is that of a microbatch"
    if steps % window and window % steps:
        return f"steps_per_generation={steps} and gradient_accumulation_steps={window} do not divide one another"
    return None


def regroup(batches: list[Batch]) -> list[Batch]:
    """The same rows in as many batches of the same sizes, ordered by their token ids.

    Args:
        batches: of one optimiser step, as TRL buffers them, each with prompt_ids [B, P] and completion_ids [B, C] and
            their masks, cut from one padded batch; other values are lists or tensors with one entry a row, numbers of
            the whole step, or None.

    Returns:
        New batches. Those with images, whose entries are not one a row, come back as they are.
    """
    if len(batches) < 2 or any(batch.get("pixel_values") is not None for batch in batches):
        return batches
    sizes = [len(batch["prompt_ids"]) for batch in batches]
    rows = [ids for batch in batches for ids in _token_ids(batch)]
    order = sorted(range(len(rows)), key=rows.__getitem__)
    merged = {name: _merge([batch[name] for batch in batches]) for name in batches[0]}
    out, start = [], 0
    for size in sizes:
        chosen = order[start : start + size]
        out.append({name: _pick(value, chosen) for name, value in merged.items()})
        start += size
    return out


def _token_ids(batch: Batch) -> list[list[int]]:
    """Of each row, without padding."""
    rows = []
    for number in range(len(batch["prompt_ids"])):
        parts = ("prompt", "completion")
        kept = [batch[f"{part}_ids"][number][batch[f"{part}_mask"][number].bool()] for part in parts]
        rows.append(torch.cat(kept).tolist())
    return rows


def _merge(values: list[Any]) -> Any:
    first = values[0]
    if isinstance(first, Tensor) and first.ndim:
        return torch.cat(values)
    if isinstance(first, list):
        return [each for value in values for each in value]
    return first


def _pick(value: Any, chosen: list[int]) -> Any:
    if isinstance(value, Tensor) and value.ndim:
        return value[torch.tensor(chosen, device=value.device)]
    if isinstance(value, list):
        return [value[index] for index in chosen]
    return value
