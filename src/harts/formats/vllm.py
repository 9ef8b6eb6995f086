"""What vLLM returns: `RequestOutput`, and the responses of its OpenAI-compatible server with `return_token_ids`.

Field names as in vllm-project/vllm: vllm/outputs.py (RequestOutput: request_id, prompt_token_ids, outputs;
CompletionOutput: index, token_ids, logprobs) at commit 003d3ee, and vllm/entrypoints/openai/{completion,
chat_completion}/protocol.py (choices[].token_ids; prompt_token_ids in each completion choice, or beside the choices of
a chat) at commit 002032e. Log-probabilities may come as a list of {token id: Logprob}, as a FlatLogprobs, as the
server's two forms, or as a plain list. Every output or choice becomes one trajectory `<id>/<index>` of the group
`<id>`. vLLM reports log-probabilities before temperature unless it runs with logprobs_mode=processed_logprobs.

Recorded experts (--enable-return-routed-experts): `routed_experts` of the output, a numpy array, or of the choice, the
base64 of an .npy file: a row for each token of prompt and response but the last, uint8, uint16 or int32 [tokens - 1,
num_hidden_layers, num_experts_per_tok] (protocol.py as above; vllm/distributed/aux_output_connector/connector.py at
commit 09155ae). A request's `routed_experts_prompt_start` takes rows off its front (vllm/sampling_params.py at commit
00388f6). vLLM 0.21 had the prompt's apart, in `prompt_routed_experts` beside the outputs, as int16 or nested lists,
with -1 where the prefix cache was hit (docs/training/routed_experts_replay.md at commit 0087e00).
"""

from collections.abc import Iterator, Mapping
from typing import Any

from harts.formats.routes import align, join, read_record
from harts.formats.rows import Row, common_fields, ids_of, respond
from harts.trajectory import Trajectory

__all__ = ["CHOICES", "READ", "matches", "trajectories"]

READ = frozenset({"prompt_token_ids", "prompt_routed_experts", "routed_experts_prompt_start", "sampling_params"})
READ |= {"advantages", "id", "routed_experts_shape", "routed_experts_dtype"}
CHOICES = (("outputs", "choices"), ("request_id", "id"))


def matches(row: Row) -> bool:
    """Whether a row has this source's telling fields."""
    return row.get("choices") is not None or (row.get("outputs") is not None and "prompt_token_ids" in row.fields)


def trajectories(row: Row) -> Iterator[Trajectory]:
    """One trajectory per sampled output."""
    row.refuse_unknown_masks(())
    name = row.text("request_id", row.text("id", row.id))
    group = row.text("group", name)
    outputs = row.require("outputs", "choices")
    if not isinstance(outputs, list | tuple) or not outputs:
        raise row.error("outputs", "a list of outputs", repr(outputs)[:40], "drop this row")
    for index, output in enumerate(outputs):
        place = f"{'outputs' if row.get('outputs') is not None else 'choices'}[{index}]"
        prompt = row.get("prompt_token_ids")
        if prompt is None:
            prompt = _get(output, "prompt_token_ids")
        response = _get(output, "token_ids")
        for field, value in (("prompt_token_ids", prompt), (f"{place}.token_ids", response)):
            if value is None:
                action = "ask the server for return_token_ids"
                raise row.error(field, "token ids", "none", action)
        logprobs = _logprobs(row, f"{place}.logprobs", _get(output, "logprobs"), response)
        yield respond(
            row,
            id=f"{name}/{_get(output, 'index', index)}",
            group=group,
            prompt=ids_of(row, "prompt_token_ids", prompt),
            response=ids_of(row, f"{place}.token_ids", response),
            values={"logprobs": (f"{place}.logprobs", logprobs)},
            routes=_routes(row, place, output, len(prompt), len(prompt) + len(response)),
            advantages=_get(output, "advantages", row.get("advantages")),
            **common_fields(row) | _reward(output),
        )


def _routes(row: Row, place: str, output: Any, prompt: int, length: int) -> Any:
    """Experts of each of `length` tokens, `prompt` of them the prompt's."""
    sampling = row.get("sampling_params")
    start = row.get("routed_experts_prompt_start")
    if start is None and sampling is not None:
        start = _get(sampling, "routed_experts_prompt_start")
    name = f"{place}.routed_experts"
    given = row.get("prompt_routed_experts")
    of_prompt = read_record(row, "prompt_routed_experts", given, beside=row.fields)
    if of_prompt is None:
        record = read_record(row, name, _get(output, "routed_experts"), beside=row.fields, start=start)
    else:
        of_response = read_record(row, name, _get(output, "routed_experts"), beside=row.fields)
        record = join(row, of_prompt, of_response, boundary=prompt)
    return align(row, record, length)


def _reward(output: Any) -> dict[str, Any]:
    reward = _get(output, "reward")
    return {} if reward is None else {"reward": reward}


def _logprobs(row: Row, name: str, value: Any, response: Any) -> list[Any] | None:
    """One log-probability per response token out of any of the forms vLLM has for them."""
    if value is None:
        return None
    starts = _get(value, "start_indices")
    if starts is not None:  # a FlatLogprobs as JSON
        spans = zip(starts, _get(value, "end_indices"), strict=True)
        ids, numbers = _get(value, "token_ids"), _get(value, "logprobs")
        value = [dict(zip(ids[start:end], numbers[start:end], strict=True)) for start, end in spans]
    for inner in ("token_logprobs", "content"):  # the server: completions, chat
        listed = _get(value, inner)
        if listed is not None:
            return [item if inner == "token_logprobs" else _get(item, "logprob") for item in listed]
    if len(value) != len(response):
        return list(value)  # respond tells the lengths
    done: list[Any] = []
    for token, item in zip(response, value, strict=True):
        if isinstance(item, Mapping):  # token id -> Logprob; JSON has made the id a string
            found = item.get(int(token), item.get(str(int(token))))
            if found is None:
                raise row.error(
                    name, f"the sampled token {token} at each position", "others only", "do not filter them"
                )
            item = found if isinstance(found, int | float) else _get(found, "logprob")
        done.append(item)
    return done


def _get(value: Any, name: str, default: Any = None) -> Any:
    """A member of a mapping or an object; null is absent."""
    found = value.get(name) if isinstance(value, Mapping) else getattr(value, name, None)
    return default if found is None else found
