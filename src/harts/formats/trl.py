"""What TRL's GRPO trainers pass around: `prompt_ids` and `completion_ids`, or the rows of async GRPO.

Field names as in huggingface/trl 1.10.0.dev0 at commit f2cd577. trl/trainer/grpo_trainer.py: a rollout_func returns
prompt_ids, completion_ids, logprobs and perhaps env_mask (1: the model's token, 0: the environment's); the batch that
is trained on has prompt_ids, prompt_mask, completion_ids, completion_mask, tool_mask, advantages,
sampling_per_token_logps (of the engine that sampled), old_per_token_logps and ref_per_token_logps.
trl/experimental/async_grpo: input_ids, completion_mask over all of them, old_log_probs, advantage, group_id. A row may
hold one sample or a batch.

Trained are the tokens for which completion_mask and tool_mask (or env_mask) are 1. Behaviour log-probabilities are the
first present of logprobs, sampling_per_token_logps, old_per_token_logps.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np

from harts.formats.padded import first_of, inside, per_token, split, zero_one
from harts.formats.rows import Row, build, common_fields, ids_of, respond
from harts.trajectory import Trajectory

__all__ = ["CHOICES", "READ", "matches", "trajectories"]

_MASKS = ("attention_mask", "prompt_mask", "completion_mask", "tool_mask", "env_mask")
_LOGPROBS = ("logprobs", "sampling_per_token_logps", "old_per_token_logps")
READ = frozenset({*_MASKS, "prompt_ids", "completion_ids", "input_ids", "ref_per_token_logps"})
CHOICES = (
    (*_LOGPROBS, "old_log_probs"),
    ("advantages", "advantage"),
    ("reward", "rewards"),
    ("group", "group_id"),
)


def matches(row: Row) -> bool:
    """Whether a row has this source's telling fields."""
    return row.get("completion_ids") is not None or {"input_ids", "completion_mask"} <= row.fields.keys()


def trajectories(row: Row) -> Iterator[Trajectory]:
    """One trajectory per sample."""
    row.refuse_unknown_masks(_MASKS)
    for sample in split(row, "input_ids" if row.get("completion_ids") is None else "completion_ids"):
        yield _of_input_ids(sample) if sample.get("completion_ids") is None else _of_completion(sample)


def _of_completion(row: Row) -> Trajectory:
    prompt = ids_of(row, "prompt_ids", row.require("prompt_ids"))
    completion = ids_of(row, "completion_ids", row.require("completion_ids"))
    attended = inside(row, "prompt_mask", len(prompt), what="prompt")
    if len(prompt) and not attended.any():
        action = 'where 0 means untrained (verifiers, prime-rl), pass fmt="verifiers" (--format verifiers)'
        raise row.error("prompt_mask", "1 at the tokens of the prompt, 0 at padding", "0 at all of them", action)
    prompt = prompt[attended]
    length = len(completion)
    kept = zero_one(row, "completion_mask", length, what="completion")
    trained = kept.copy()
    for name in ("tool_mask", "env_mask"):
        trained &= zero_one(row, name, length, what="completion")
    # Right padding ends in zeros, and so does a sample that mask_truncated_completions took out: nothing sees the rest.
    stop = int(np.flatnonzero(kept)[-1]) + 1 if kept.any() else 0
    values = {}
    for ours, theirs in (("logprobs", _LOGPROBS), ("ref_logprobs", ("ref_per_token_logps",))):
        found = first_of(row, theirs)
        if found is not None:
            values[ours] = (found, per_token(row, found, length, what="completion")[:stop])
    name = row.text("id", row.id)
    return respond(
        row,
        id=name,
        group=row.text("group", row.text("group_id", name)),
        prompt=prompt,
        response=completion[:stop],
        mask=("completion_mask", trained[:stop]),
        values=values,
        **_advantages(row, np.arange(length) < stop),
        **_reward(row) | common_fields(row),
    )


def _of_input_ids(row: Row) -> Trajectory:
    ids = ids_of(row, "input_ids", row.require("input_ids"))
    kept = inside(row, "attention_mask", len(ids), what="input")
    mask = zero_one(row, "completion_mask", len(ids), what="input")
    fields = _reward(row) | common_fields(row) | _advantages(row, kept)
    for ours, theirs in (("logprobs", "old_log_probs"), ("ref_logprobs", "ref_per_token_logps")):
        if row.get(theirs) is not None:
            fields[ours] = per_token(row, theirs, len(ids), what="input")[kept]
    name = row.text("id", row.id)
    group = row.text("group", row.text("group_id", name))
    return build(row, id=name, group=group, token_ids=ids[kept], loss_mask=mask[kept], **fields)


def _advantages(row: Row, kept: Any) -> dict[str, Any]:
    name = first_of(row, ("advantages", "advantage"))
    if name is None or np.ndim(row.fields[name]) == 0:
        return {} if name is None else {"advantages": row.fields[name]}
    return {"advantages": per_token(row, name, len(kept), what="completion")[kept]}


def _reward(row: Row) -> dict[str, Any]:
    reward = row.get("reward", "rewards")
    return {} if reward is None else {"reward": reward}
