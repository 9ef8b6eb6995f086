"""What verifiers and prime-rl hold: `prompt_ids`, `completion_ids`, a mask and log-probabilities for each.

Field names as in https://docs.primeintellect.ai/verifiers/api_reference (TrajectoryStepTokens and ProcessedOutputs:
prompt_ids, prompt_mask, completion_ids, completion_mask, completion_logprobs; State: trajectory, a list of steps with
`tokens`, reward, advantage; example_id) and as in PrimeIntellect-ai/prime-rl, src/prime_rl/transport/types.py
(TrainingSample: the same, completion_temperatures, advantage or advantages, ref_logprobs, reward, routed_experts).

The names are nearly TRL's and mean something else: a mask of 0 is a token that is not trained, never padding. Prompt
and completion are kept whole; in a completion, 0 stands at the environment's tokens. A row may hold one sample, a batch
(lists of lists), or a rollout whose `trajectory` lists model calls; then each call with tokens is a trajectory.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from harts.formats.padded import per_token, split, zero_one
from harts.formats.routes import align, read_record
from harts.formats.rows import Row, build, common_fields, ids_of, to_numpy
from harts.trajectory import Trajectory

__all__ = ["CHOICES", "READ", "matches", "trajectories"]

_TOKENS = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "completion_logprobs", "ref_logprobs")
READ = frozenset({*_TOKENS, "completion_temperatures", "routed_experts", "tokens", "trajectory"})
CHOICES = (("group", "example_id"), ("reward", "rewards"), ("advantages", "advantage"))


def matches(row: Row) -> bool:
    """Whether a row has this source's telling fields: TRL's names, but the log-probabilities under another."""
    if row.get("completion_ids") is not None:
        return row.get("completion_logprobs") is not None
    if isinstance(row.get("tokens"), Mapping):
        return "completion_ids" in row.fields["tokens"]
    return any(isinstance(step, Mapping) and isinstance(step.get("tokens"), Mapping) for step in _steps(row))


def trajectories(row: Row) -> Iterator[Trajectory]:
    """One trajectory per sample, or per model call of a rollout with `trajectory`."""
    if row.get("completion_ids") is None and row.get("tokens") is None and row.get("trajectory") is not None:
        yield from _of_rollout(row)
        return
    row = _with_tokens(row, row.fields)
    for sample in split(row, "completion_ids"):
        yield _trajectory(sample)


def _steps(row: Row) -> list[Any]:
    steps = row.get("trajectory")
    return list(steps) if isinstance(steps, list | tuple) else []


def _of_rollout(row: Row) -> Iterator[Trajectory]:
    steps = _steps(row)
    shared = {name: row.fields[name] for name in ("temperature", "meta", "source", "reward") if name in row.fields}
    shared["group"] = row.text("group", row.text("example_id", row.id))
    for index, step in enumerate(steps):
        if not isinstance(step, Mapping) or not isinstance(step.get("tokens"), Mapping):
            got = "none" if isinstance(step, Mapping) else type(step).__name__
            action = "save the rollouts with the tokens of every step"
            raise row.error(f"trajectory[{index}].tokens", "an object with token ids", got, action)
        own = {name: step[name] for name in ("reward", "advantage") if step.get(name) is not None}
        fields = {**shared, **own, "id": f"{row.id}/step{index}"}
        yield _trajectory(_with_tokens(row, {**fields, "tokens": step["tokens"]}))


def _with_tokens(row: Row, fields: Mapping[str, Any]) -> Row:
    """The row with the members of its `tokens` beside the other fields."""
    tokens = fields.get("tokens")
    if not isinstance(tokens, Mapping):
        return replace(row, fields=fields)
    given = {name: value for name, value in fields.items() if name != "tokens" and value is not None}
    return replace(row, fields={**tokens, **given})


def _trajectory(row: Row) -> Trajectory:
    row.refuse_unknown_masks(("prompt_mask", "completion_mask"))
    prompt = ids_of(row, "prompt_ids", row.require("prompt_ids"))
    completion = ids_of(row, "completion_ids", row.require("completion_ids"))
    start, length = len(prompt), len(completion)
    in_prompt = np.zeros(start, np.bool_)
    if row.get("prompt_mask") is not None:
        in_prompt = zero_one(row, "prompt_mask", start, what="prompt")
    trained = zero_one(row, "completion_mask", length, what="completion")
    fields = common_fields(row) | _advantages(row, start, length) | _temperature(row, trained)
    if row.get("reward") is None and row.get("rewards") is not None:
        fields["reward"] = row.fields["rewards"]
    if row.get("completion_logprobs") is not None:
        if in_prompt.any():
            got = f"trained tokens at {int(np.count_nonzero(in_prompt))} positions, without log-probabilities"
            raise row.error(
                "prompt_mask", "0 (untrained) at every token of the prompt", got, "move them, or train none"
            )
        logprobs = per_token(row, "completion_logprobs", length, what="completion")
        fields["logprobs"] = np.concatenate([np.zeros(start), logprobs])
    if row.get("ref_logprobs") is not None:
        whole = to_numpy(row.get("ref_logprobs")).shape == (start + length,)
        reference = per_token(row, "ref_logprobs", start + length if whole else length, what="completion")
        fields["ref_logprobs"] = reference if whole else np.concatenate([np.zeros(start), reference])
    record = read_record(row, "routed_experts", row.get("routed_experts"), beside=row.fields)
    name = row.text("id", row.id)
    return build(
        row,
        id=name,
        group=row.text("group", row.text("example_id", name)),
        token_ids=np.concatenate([prompt, completion]),
        loss_mask=np.concatenate([in_prompt, trained]),
        routes=align(row, record, start + length),
        **fields,
    )


def _advantages(row: Row, start: int, length: int) -> dict[str, Any]:
    """A number for all, or one a token of the completion."""
    name = "advantages" if row.get("advantages") is not None else "advantage"
    value = row.get(name)
    if value is None or np.ndim(value) == 0:
        return {} if value is None else {"advantages": value}
    return {"advantages": np.concatenate([np.zeros(start), per_token(row, name, length, what="completion")])}


def _temperature(row: Row, trained: NDArray[np.bool_]) -> dict[str, Any]:
    """The one temperature of all trained tokens."""
    if row.get("completion_temperatures") is None:
        return {}
    values = per_token(row, "completion_temperatures", len(trained), what="completion")[trained]
    if not len(values):
        return {}
    if (values != values[0]).any():
        got = f"{float(values.min())} to {float(values.max())}"
        action = "make a trajectory of each, as turns of one group"
        raise row.error("completion_temperatures", "one temperature for all trained tokens", got, action)
    return {"temperature": float(values[0])}
