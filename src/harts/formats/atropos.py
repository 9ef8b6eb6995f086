"""What Atropos environments write: groups of `tokens`, `masks` and `scores`.

Field names as in NousResearch/atropos, atroposlib/envs/base.py (ScoredDataGroup, a list for each sample, and
ScoredDataItem, one sample): tokens; masks, with -100 at tokens that are not trained and the token itself elsewhere;
scores; advantages, one a token; ref_logprobs; inference_logprobs, one a token. A row is a group: its samples become
trajectories `<id>/<index>`.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np

from harts.formats.padded import per_token, split
from harts.formats.rows import Row, build, common_fields, ids_of, to_numpy
from harts.trajectory import Trajectory

__all__ = ["CHOICES", "READ", "matches", "trajectories"]

READ = frozenset({"tokens", "masks", "advantages", "ref_logprobs", "inference_logprobs"})
CHOICES = (("reward", "scores"),)
_UNTRAINED = -100


def matches(row: Row) -> bool:
    """Whether a row has this source's telling fields."""
    return row.get("tokens") is not None and row.get("masks") is not None


def trajectories(row: Row) -> Iterator[Trajectory]:
    """One trajectory per sample of the group."""
    row.refuse_unknown_masks(())
    group = row.text("group", row.id)
    for sample in split(row, "tokens"):
        yield _trajectory(sample, group)


def _trajectory(row: Row, group: str) -> Trajectory:
    tokens = ids_of(row, "tokens", row.require("tokens"))
    row.require("masks")
    mask = per_token(row, "masks", len(tokens), what="sample's")
    wrong = np.flatnonzero((mask != _UNTRAINED) & (mask != tokens))
    if len(wrong):
        at = int(wrong[0])
        expected = f"{_UNTRAINED} where untrained and the token elsewhere"
        action = "write 0/1 masks as loss_mask, beside token_ids"
        raise row.error("masks", expected, f"{mask[at].item()} at token {tokens[at].item()} (position {at})", action)
    trained = mask != _UNTRAINED
    fields: dict[str, Any] = common_fields(row)
    if row.get("reward") is None and row.get("scores") is not None:
        fields["reward"] = row.fields["scores"]
    for ours, theirs in (("logprobs", "inference_logprobs"), ("ref_logprobs", "ref_logprobs")):
        if row.get(theirs) is not None:  # at the prompt there are fillers, which are no log-probabilities
            fields[ours] = np.where(trained, per_token(row, theirs, len(tokens), what="sample's"), 0.0)
    advantages = row.get("advantages")
    if advantages is not None:
        scalar = to_numpy(advantages).ndim == 0
        fields["advantages"] = advantages if scalar else per_token(row, "advantages", len(tokens), what="sample's")
    return build(row, id=row.text("id", row.id), group=group, token_ids=tokens, loss_mask=trained, **fields)
