"""What SGLang's `/generate` returns: `output_ids` and `meta_info`.

Field names as in sgl-project/sglang: output_ids and meta_info in python/sglang/srt/managers/tokenizer_manager.py at
commit 001067f; meta_info's id, prompt_tokens, input_token_logprobs and output_token_logprobs as in its tests and
clients. A log-probability entry is [logprob, token id, text or null]. The response does not repeat the prompt:
put the request's `input_ids` beside it, or ask for the prompt's log-probabilities from its start
(return_logprob, logprob_start_len=0), whose entries name the prompt's tokens.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from harts.formats.rows import Row, common_fields, ids_of, respond
from harts.trajectory import Trajectory

__all__ = ["matches", "trajectories"]

_PROMPT = ("input_ids", "prompt_token_ids", "prompt_ids", "origin_input_ids")


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
    name = row.text("id", str(info.get("id") or row.id))
    temperature = _temperature(row)
    yield respond(
        row,
        id=name,
        group=row.text("group", name),
        prompt=ids_of(row, "input_ids", _prompt(row, info)),
        response=ids_of(row, "output_ids", response),
        values={"logprobs": ("meta_info.output_token_logprobs", logprobs)},
        advantages=row.get("advantages"),
        **temperature | common_fields(row),
    )


def _prompt(row: Row, info: Mapping[str, Any]) -> Any:
    prompt = row.get(*_PROMPT)
    if prompt is not None:
        return prompt
    entries, length = info.get("input_token_logprobs"), info.get("prompt_tokens")
    if entries is None or length is None or len(entries) != length:
        came = "none" if entries is None else f"{len(entries)} of {length} prompt tokens in input_token_logprobs"
        action = "put the request's input_ids into the row, or ask for logprob_start_len=0"
        raise row.error("input_ids", "the prompt's token ids", came, action)
    return _columns(row, "input_token_logprobs", entries)[1]


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
