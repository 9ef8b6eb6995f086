"""What SGLang's `/generate` returns: `output_ids` and `meta_info`.

Field names as in sgl-project/sglang: output_ids and meta_info in python/sglang/srt/managers/tokenizer_manager.py at
commit 001067f; meta_info's id, prompt_tokens, input_token_logprobs and output_token_logprobs as in its tests and
clients. A log-probability entry is [logprob, token id, text or null]. The response does not repeat the prompt:
put the request's `input_ids` beside it, or ask for the prompt's log-probabilities from its start
(return_logprob, logprob_start_len=0), whose entries name the prompt's tokens.

Recorded experts (--enable-return-routed-experts, and return_routed_experts in the request): meta_info's
`routed_experts`, base64 of int32 [tokens - 1, num_hidden_layers, num_experts_per_tok] for prompt and response; the
request's `routed_experts_start_len` takes rows off its front. As in sglang 0.5.23: _maybe_collect_routed_experts in
python/sglang/srt/managers/scheduler_components/batch_result_processor.py, get_topk in srt/state_capturer/base.py.
SGLang does not return the shape: `routed_experts_shape` holds it. `routed_experts_dtype` names another dtype
(srt/state_capturer/routed_experts_wire.py at commit a6463a1).
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from harts.formats.routes import align, read_record
from harts.formats.rows import Row, common_fields, ids_of, respond
from harts.trajectory import Trajectory

__all__ = ["CHOICES", "READ", "matches", "trajectories"]

_PROMPT = ("input_ids", "prompt_token_ids", "prompt_ids", "origin_input_ids")
READ = frozenset({"output_ids", "meta_info", "sampling_params", "advantages"})
READ |= {"routed_experts_shape", "routed_experts_dtype", "routed_experts_start_len"}
CHOICES = (_PROMPT,)


def matches(row: Row) -> bool:
    """Whether a row has this source's telling fields."""
    return isinstance(row.get("meta_info"), Mapping)


def trajectories(row: Row) -> Iterator[Trajectory]:
    """The row's one trajectory."""
    row.refuse_unknown_masks(())
    info = row.require("meta_info")
    if not isinstance(info, Mapping):
        raise row.error("meta_info", "an object", type(info).__name__, "give what /generate returned")
    triples = info.get("output_token_logprobs")
    response, logprobs = row.get("output_ids"), None
    if triples is not None:
        logprobs, sampled = _columns(row, "output_token_logprobs", triples)
        if response is None:
            response = sampled
        elif list(map(int, response)) != sampled:
            raise row.error("output_ids", "the ids in output_token_logprobs", "other ids", "give one request's output")
    if response is None:
        raise row.error("output_ids", "this field or meta_info.output_token_logprobs", "none", "ask for return_logprob")
    prompt, response = ids_of(row, "input_ids", _prompt(row, info)), ids_of(row, "output_ids", response)
    name = row.text("id", str(info.get("id") or row.id))
    temperature = _temperature(row)
    yield respond(
        row,
        id=name,
        group=row.text("group", name),
        prompt=prompt,
        response=response,
        values={"logprobs": ("meta_info.output_token_logprobs", logprobs)},
        advantages=row.get("advantages"),
        routes=_routes(row, info, len(prompt) + len(response)),
        **temperature | common_fields(row),
    )


def _prompt(row: Row, info: Mapping[str, Any]) -> Any:
    prompt = row.get(*_PROMPT)
    if prompt is not None:
        return prompt
    entries, length = info.get("input_token_logprobs"), info.get("prompt_tokens")
    if entries is None or length is None or len(entries) != length:
        got = "none" if entries is None else f"{len(entries)} of {length} prompt tokens in input_token_logprobs"
        action = "put the request's input_ids into the row, or ask for logprob_start_len=0"
        raise row.error("input_ids", "the prompt's token ids", got, action)
    return _columns(row, "input_token_logprobs", entries)[1]


def _routes(row: Row, info: Mapping[str, Any], length: int) -> Any:
    beside = {**row.fields, **{name: value for name, value in info.items() if value is not None}}
    start = beside.get("routed_experts_start_len")
    name = "meta_info.routed_experts"
    return align(row, read_record(row, name, info.get("routed_experts"), beside=beside, start=start), length)


def _columns(row: Row, name: str, entries: Sequence[Any]) -> tuple[list[Any], list[int]]:
    try:
        return [entry[0] for entry in entries], [int(entry[1]) for entry in entries]
    except (TypeError, IndexError, ValueError) as error:
        expected = "entries [logprob, token id, text]"
        raise row.error(f"meta_info.{name}", expected, str(error), "give it as /generate returned it") from error


def _temperature(row: Row) -> dict[str, Any]:
    sampling = row.get("sampling_params")
    temperature = sampling.get("temperature") if isinstance(sampling, Mapping) else None
    return {} if temperature is None else {"temperature": temperature}
