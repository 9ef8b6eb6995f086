"""inspect_ai's logs to our chat rows: samples of a `.eval` archive, or of the `.json` log.

Members as in UKGovernmentBEIS/inspect_ai: log/_recorders/eval.py (the archive: header.json or _journal/start.json with
`eval`, a file samples/<id>_epoch_<epoch>.json for each sample, deflated or, in newer versions, Zstandard);
log/_log.py (EvalSample: id, epoch, uuid, messages, scores, attachments, events); model/_chat_message.py,
_util/content.py and tool/_tool_call.py (messages). Long texts may lie in `attachments`, under attachment://HASH.

Replies with `source` "input" were not sampled: they are context. A call's error is its result, as the model saw it.
Tools are those of the first call of a model that the events record. The reward is the score, where there is one score
and it is a number or C, I, P or N (1, 0, 0.5 and 0, as inspect's own metrics count them).
"""

import json
import struct
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from harts.formats.rows import Row

__all__ = ["archive_rows", "chat_fields", "is_log", "is_sample", "samples_of"]

_GRADES = {"C": 1.0, "I": 0.0, "P": 0.5, "N": 0.0}
_SAMPLES = "samples/"
_ZSTANDARD = 93  # PKWARE APPNOTE 4.4.5
_LOCAL_HEADER = 30
_REFERENCE = "attachment://"
_OF_MESSAGE = frozenset({"id", "source", "metadata", "model", "function", "error", "tool_error", "internal"})
_OF_TEXT = frozenset({"internal", "citations", "refusal"})


def is_sample(row: Row) -> bool:
    """Whether a row is a sample of a log."""
    return row.get("messages") is not None and row.get("epoch") is not None and "target" in row.fields


def is_log(row: Row) -> bool:
    """Whether a row is a whole log in JSON."""
    return isinstance(row.get("samples"), list) and isinstance(row.get("eval"), Mapping)


def samples_of(row: Row) -> Iterator[Row]:
    """The samples of a log, a row each."""
    for index, sample in enumerate(row.fields["samples"]):
        if not isinstance(sample, Mapping):
            raise row.error(f"samples[{index}]", "an object", type(sample).__name__, "fetch the file again")
        yield Row({**sample, "eval": row.fields["eval"]}, f"{row.place}, sample {index + 1}", row.number + index)


# -- The archive ------------------------------------------------------------------------------------------------------


def archive_rows(path: Path) -> Iterator[tuple[str, Any]]:
    """Places and samples of a `.eval` file, with what was evaluated beside each as `eval`.

    Raises:
        ValueError: an archive that is damaged, or none of inspect_ai.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            names = [name for name in archive.namelist() if name.startswith(_SAMPLES) and name.endswith(".json")]
            start = next((name for name in ("header.json", "_journal/start.json", "start.json")
                          if name in archive.namelist()), None)  # fmt: skip
            if start is None or not names:
                expected = "an archive of inspect_ai with header.json or _journal/start.json, and samples/*.json"
                got = ", ".join(archive.namelist()[:5]) or "nothing"
                raise ValueError(f"{path}: expected {expected}, got one of {got}; unpack other archives")
            evaluated = _member(path, archive, start).get("eval")
            for name in names:
                yield f"{path}, {name}", {**_member(path, archive, name), "eval": evaluated}
    except zipfile.BadZipFile as error:
        raise ValueError(f"{path}: the archive is truncated or damaged ({error}); fetch the file again") from error


def _member(path: Path, archive: zipfile.ZipFile, name: str) -> Mapping[str, Any]:
    info = archive.getinfo(name)
    text = _unzstd(path, info) if info.compress_type == _ZSTANDARD else archive.read(info)
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{path}, {name}: broken JSON ({error}); fetch the file again") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path}, {name}: expected an object, got {type(value).__name__}; fetch the file again")
    return value


def _unzstd(path: Path, info: zipfile.ZipInfo) -> bytes:
    """A member in Zstandard, which Python's zipfile cannot decompress: its bytes lie behind its local header."""
    import zstandard

    with path.open("rb") as file:
        file.seek(info.header_offset)
        header = file.read(_LOCAL_HEADER)
        name_length, extra_length = struct.unpack_from("<HH", header, _LOCAL_HEADER - 4)
        file.seek(name_length + extra_length, 1)
        packed = file.read(info.compress_size)
    parts = []
    try:
        while packed:  # one frame, or several in a row
            frame = zstandard.ZstdDecompressor().decompressobj()
            parts.append(frame.decompress(packed))
            if not frame.eof:
                raise ValueError(f"{path}, {info.filename}: the Zstandard stream is truncated; fetch the file again")
            packed = frame.unused_data
    except zstandard.ZstdError as error:
        raise ValueError(f"{path}, {info.filename}: damaged ({error}); fetch the file again") from error
    return b"".join(parts)


# -- A sample ---------------------------------------------------------------------------------------------------------


def chat_fields(row: Row) -> tuple[dict[str, Any], frozenset[str]]:
    """A sample as the fields of a chat row, and the names of its fields that are read.

    Raises:
        ValueError: a message that is no object, a call of a tool that ran on the server.
    """
    evaluated = row.get("eval")
    evaluated = evaluated if isinstance(evaluated, Mapping) else {}
    attachments = row.get("attachments")
    attached = attachments if isinstance(attachments, Mapping) else {}
    messages = row.fields["messages"]
    if not isinstance(messages, list):
        raise row.error("messages", "a list of messages", type(messages).__name__, "fetch the file again")
    name, epoch = row.id, row.fields["epoch"]
    task = evaluated.get("task")
    run = evaluated.get("eval_id") or evaluated.get("run_id") or task
    fields: dict[str, Any] = {
        "messages": [_message(row, index, message, attached) for index, message in enumerate(messages)],
        "group": name if task is None else f"{task}/{name}",
        "id": str(row.get("uuid") or "/".join(str(part) for part in (run, name, f"epoch{epoch}") if part is not None)),
    }
    read = {"messages", "id", "uuid", "epoch", "eval", "attachments", "events"}
    tools = _tools(row, attached)
    if tools:
        fields["tools"] = tools
    reward = _reward(row)
    if reward is not None:
        fields["reward"] = reward
        read.add("scores")
    return fields, frozenset(read)


def _message(row: Row, index: int, message: Any, attached: Mapping[str, Any]) -> Any:
    place = f"messages[{index}]"
    if not isinstance(message, Mapping):
        return message  # refused with all others that are none
    found = {name: _resolved(value, attached) for name, value in message.items() if name not in _OF_MESSAGE}
    role = found.get("role")
    error = message.get("error")
    if role == "tool" and isinstance(error, Mapping) and error.get("message"):
        found["content"] = _resolved(error["message"], attached)
    if role != "tool":
        found.pop("tool_call_id", None)
    if isinstance(found.get("content"), list):
        parts, thoughts = _parts(row, place, found["content"])
        found["content"] = parts
        if thoughts and role == "assistant":
            found["reasoning_content"] = "\n".join(thoughts)
    if role == "assistant":
        if found.get("tool_calls"):
            found["tool_calls"] = [_call(call) for call in found["tool_calls"]]
        if message.get("source") == "input":
            found["ignore_loss"] = True
    return found


def _parts(row: Row, place: str, content: list[Any]) -> tuple[list[Any], list[str]]:
    """Parts as our chat rows have them, and the reasoning among them."""
    parts: list[Any] = []
    thoughts: list[str] = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind == "reasoning":
            if not part.get("redacted") and part.get("reasoning"):
                thoughts.append(str(part["reasoning"]))
        elif kind == "tool_use":
            here, action = f"{place}.content[{index}]", "HARTS cannot tell what the model saw: drop this sample"
            raise row.error(here, "text and reasoning", f"a call of {part.get('name')} on the server", action)
        elif kind == "text":
            parts.append({name: value for name, value in part.items() if name not in _OF_TEXT})
        else:
            parts.append(part)  # refused with all others that are no text
    return parts, thoughts


def _call(call: Any) -> Any:
    if not isinstance(call, Mapping) or not isinstance(call.get("function"), str):
        return call
    function = {"name": call["function"], "arguments": call.get("arguments") or {}}
    return {"id": call.get("id"), "type": "function", "function": function}


def _tools(row: Row, attached: Mapping[str, Any]) -> list[Any]:
    """The tools that the first recorded call of a model was given."""
    for event in row.get("events") or ():
        if isinstance(event, Mapping) and event.get("event") == "model":
            tools = _resolved(event.get("tools") or [], attached)
            known = ("name", "description", "parameters")
            return [
                {"type": "function", "function": {name: tool[name] for name in known if name in tool}}
                for tool in tools
                if isinstance(tool, Mapping)
            ]
    return []


def _resolved(value: Any, attached: Mapping[str, Any]) -> Any:
    """The value with the texts that it refers to."""
    if isinstance(value, str):
        return attached.get(value[len(_REFERENCE) :], value) if value.startswith(_REFERENCE) else value
    if isinstance(value, list):
        return [_resolved(item, attached) for item in value]
    if isinstance(value, Mapping):
        return {name: _resolved(item, attached) for name, item in value.items()}
    return value


def _reward(row: Row) -> float | None:
    scores = row.get("scores")
    if not isinstance(scores, Mapping) or len(scores) != 1:
        return None
    (score,) = scores.values()
    value = score.get("value") if isinstance(score, Mapping) else None
    if isinstance(value, str):
        return _GRADES.get(value)
    return float(value) if isinstance(value, bool | int | float) else None
