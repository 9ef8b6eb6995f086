"""What rLLM's episodes hold: trajectories of steps, each a model call with `prompt_ids` and `response_ids`.

Field names as in rllm-org/rllm, rllm/agents/agent.py (Episode.to_dict: id, trajectories; Trajectory: uid, name, steps,
reward; Step: prompt_ids, response_ids, logprobs, one a token of the response, chat_completions, reward, advantage, a
number or one a token of the response, model_output; TrajectoryGroup: group_id, trajectories). A row may be an episode,
a trajectory or a group. The files of rllm/utils/episode_logger.py hold `chat_completions` and no token ids: they are
read as chat, a conversation a step, of which the last reply is trained.

A step becomes a trajectory `<row>/<trajectory>/step<k>`. As in rLLM, the group is the task (an episode's id up to the
colon) and the name of the agent. A trajectory's reward goes before its steps'.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from harts.formats.padded import per_token
from harts.formats.rows import Row, common_fields, ids_of, respond
from harts.trajectory import Trajectory

__all__ = ["CHOICES", "READ", "chat_rows", "is_chat", "matches", "trajectories"]

READ = frozenset({"trajectories", "steps", "name", "uid"})
CHOICES = (("id", "episode_id"), ("group", "group_id"))


def matches(row: Row) -> bool:
    """Whether a row has steps with token ids."""
    return any(map(_has_tokens, _all_steps(row)))


def is_chat(row: Row) -> bool:
    """Whether a row has steps with messages and none with token ids."""
    return not matches(row) and any(step.get("chat_completions") for step in _all_steps(row))


def trajectories(row: Row) -> Iterator[Trajectory]:
    """One trajectory per step."""
    for fields, place, step in _steps(row):
        if not _has_tokens(step):
            action = "save the episodes with the tokens of every step"
            raise row.error(f"{place}.response_ids", "token ids", "none", action)
        output = step.get("model_output")
        output = output if isinstance(output, Mapping) else {}
        own = {
            "prompt_ids": step.get("prompt_ids") or output.get("prompt_ids"),
            "response_ids": step.get("response_ids") or output.get("completion_ids"),
            "logprobs": step.get("logprobs") or output.get("logprobs") or None,
            "advantage": step.get("advantage"),
        }
        yield _trajectory(replace(row, fields={**fields, **own}))


def chat_rows(row: Row) -> Iterator[Row]:
    """One chat row per step: its messages, of which the last reply is trained."""
    for fields, place, step in _steps(row):
        given = step.get("chat_completions")
        if not isinstance(given, list) or not given:
            raise row.error(f"{place}.chat_completions", "a list of messages", repr(given)[:40], "drop this row")
        messages = [_context(message) for message in given[:-1]] + [_renamed(given[-1])]
        yield replace(row, fields={**fields, "messages": messages})


def _trajectory(row: Row) -> Trajectory:
    prompt = ids_of(row, "prompt_ids", row.require("prompt_ids"))
    response = ids_of(row, "response_ids", row.require("response_ids"))
    values = {}
    if row.get("logprobs") is not None:
        values["logprobs"] = ("logprobs", per_token(row, "logprobs", len(response), what="response"))
    return respond(
        row,
        id=row.id,
        group=row.text("group", row.id),
        prompt=prompt,
        response=response,
        values=values,
        advantages=row.get("advantage"),
        **common_fields(row),
    )


def _listed(row: Row) -> list[Mapping[str, Any]]:
    """The trajectories of a row; it may be one itself."""
    listed = row.get("trajectories")
    if isinstance(listed, list | tuple):
        return [trajectory for trajectory in listed if isinstance(trajectory, Mapping)]
    return [row.fields] if isinstance(row.get("steps"), list | tuple) else []


def _all_steps(row: Row) -> Iterator[Mapping[str, Any]]:
    for trajectory in _listed(row):
        steps = trajectory.get("steps")
        yield from (step for step in steps or () if isinstance(step, Mapping)) if isinstance(steps, list) else ()


def _steps(row: Row) -> Iterator[tuple[dict[str, Any], str, Mapping[str, Any]]]:
    """For each step: what it has of its row and trajectory, where it stands, and the step."""
    name = row.text("id", row.text("episode_id", row.text("uid", row.id)))
    task = row.text("group", row.text("group_id", name.split(":")[0]))
    named = row.get("group", "group_id") is not None
    kept = {key: row.fields[key] for key in ("temperature", "meta", "source") if row.get(key) is not None}
    for number, trajectory in enumerate(_listed(row)):
        agent, reward = trajectory.get("name"), trajectory.get("reward")
        group = task if named or agent is None else f"{task}:{agent}"
        for index, step in enumerate(trajectory.get("steps") or ()):
            place = f"trajectories[{number}].steps[{index}]"
            if not isinstance(step, Mapping):
                raise row.error(place, "an object", type(step).__name__, "drop this row")
            fields = {**kept, "id": f"{name}/{number}/step{index}", "group": group}
            given = reward if reward is not None else step.get("reward")
            yield fields if given is None else {**fields, "reward": given}, place, step


def _has_tokens(step: Mapping[str, Any]) -> bool:
    output = step.get("model_output")
    return bool(step.get("response_ids") or (isinstance(output, Mapping) and output.get("completion_ids")))


def _renamed(message: Any) -> Any:
    if not isinstance(message, Mapping) or "reasoning" not in message:
        return message
    kept = {name: value for name, value in message.items() if name != "reasoning"}
    return kept | ({"reasoning_content": message["reasoning"]} if message["reasoning"] else {})


def _context(message: Any) -> Any:
    message = _renamed(message)
    own = isinstance(message, Mapping) and message.get("role") == "assistant"
    return {**message, "ignore_loss": True} if own else message
