"""What verl's rollouts hold: `prompts`, `responses` and their masks, padded or not.

Field names as in verl-project/verl 0.10.0.dev at commit 1dda039: verl/experimental/agent_loop/agent_loop.py
(AgentLoopOutput: prompt_ids, response_ids, response_mask, response_logprobs, reward_score; the batch: prompts padded
left, responses padded right, response_mask with 1 for the model's tokens and 0 for observations and padding,
attention_mask over both, rollout_log_probs, rm_scores) and verl/trainer/ppo (old_log_probs, ref_log_prob, advantages,
token_level_scores, uid). A row may hold one sample or a batch. The JSON Lines that `trainer.rollout_data_dir` makes
hold text only and cannot be read.

Trained are the tokens for which response_mask is 1. Behaviour log-probabilities are the first present of
rollout_log_probs, response_logprobs, old_log_probs. Per-token scores are summed to the reward. `uid` is the group.

Recorded experts (actor_rollout_ref.rollout.enable_rollout_routing_replay): `routed_experts`, [tokens, layers, experts
per token] from the first token on, the rows that the engine recorded (agent_loop.py, AgentLoopOutput); in a batch
int16 with a row for every place, padding included, and zeros where none is recorded: the last token, and what follows
the last generation.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from harts.formats.padded import first_of, inside, per_token, split, zero_one
from harts.formats.routes import align, read_record, without_filler
from harts.formats.rows import Row, common_fields, ids_of, respond, to_numpy
from harts.trajectory import Trajectory

__all__ = ["CHOICES", "READ", "matches", "trajectories"]

_LOGPROBS = ("rollout_log_probs", "response_logprobs", "old_log_probs")
_SCORES = ("token_level_scores", "rm_scores", "token_level_rewards")
READ = frozenset({"attention_mask", "response_mask", "input_ids", "routed_experts", "advantages"})
CHOICES = (
    ("prompts", "prompt_ids"),
    ("responses", "response_ids"),
    _LOGPROBS,
    ("ref_log_prob", "ref_log_probs"),
    ("reward", "reward_score", "score", *_SCORES),
    ("group", "uid"),
    ("id", "request_id"),
)


def matches(row: Row) -> bool:
    """Whether a row has this source's telling fields."""
    return row.get("responses", "response_ids") is not None


def trajectories(row: Row) -> Iterator[Trajectory]:
    """One trajectory per sample."""
    row.refuse_unknown_masks(("attention_mask", "response_mask"))
    for sample in split(row, "responses" if row.get("responses") is not None else "response_ids"):
        yield _trajectory(sample)


def _trajectory(row: Row) -> Trajectory:
    prompt = ids_of(row, "prompts", row.require("prompts", "prompt_ids"))
    response = ids_of(row, "responses", row.require("responses", "response_ids"))
    length = len(response)
    if row.get("input_ids") is not None:  # the padded batch: prompts on the left, responses on the right
        row.require("attention_mask")
    attended = inside(row, "attention_mask", len(prompt) + length, what="prompt and response")
    if len(prompt) and not attended[: len(prompt)].any():
        action = "check the mask; drop a sample that has no prompt"
        raise row.error("attention_mask", "1 at the tokens of the prompt", "0 at all of them", action)
    prompt, kept = prompt[attended[: len(prompt)]], attended[len(prompt) :]
    values = {}
    for ours, theirs in (("logprobs", _LOGPROBS), ("ref_logprobs", ("ref_log_prob", "ref_log_probs"))):
        found = first_of(row, theirs)
        if found is not None:
            values[ours] = (found, per_token(row, found, length, what="response")[kept])
    advantages = row.get("advantages")
    if np.ndim(advantages) == 1:
        advantages = per_token(row, "advantages", length, what="response")[kept]
    name = row.text("id", row.text("request_id", row.id))
    mask = zero_one(row, "response_mask", length, what="response")[kept]
    return respond(
        row,
        id=name,
        group=row.text("group", row.text("uid", name)),
        prompt=prompt,
        response=response[kept],
        mask=("response_mask", mask),
        values=values,
        routes=_routes(row, attended, mask),
        advantages=advantages,
        **_reward(row) | common_fields(row),
    )


def _routes(row: Row, attended: NDArray[np.bool_], mask: NDArray[np.bool_]) -> Any:
    """Experts of each attended token; recorded at least for all that a trained token follows."""
    record = read_record(row, "routed_experts", row.get("routed_experts"), beside=row.fields)
    if record is None:
        return None
    length = int(np.count_nonzero(attended))
    experts = record.experts_RYK
    if len(experts) == len(attended):
        experts = experts[attended]
    elif length < len(attended):
        expected = f"a row for each place of prompts and responses ({len(attended)})"
        raise row.error("routed_experts", expected, f"{len(experts)} rows", "give the batch's own tensor")
    trained = length - len(mask) + np.flatnonzero(mask)
    record = without_filler("routed_experts", experts)
    return align(row, record, length, least=int(trained[-1]) if len(trained) else 0)


def _reward(row: Row) -> dict[str, Any]:
    score = row.get("reward", "reward_score", "score")
    if score is not None:
        return {"reward": score}
    per_token_scores = row.get(*_SCORES)
    return {} if per_token_scores is None else {"reward": float(np.sum(to_numpy(per_token_scores)))}
