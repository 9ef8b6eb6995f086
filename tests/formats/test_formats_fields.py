"""Rows under names of one's own: `fields` says which is which, for every format, in Python and on the command line."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from harts.cli import app
from harts.formats import read
from harts.formats.decoding import QwenDecoder, decoder_for

ROW: dict[str, Any] = {"output": {"ids": [1, 2, 3], "lp": [None, -0.5, -1.0]}, "m": [0, 1, 1], "task": 7, "note": "x"}
NAMES = {"token_ids": "output.ids", "loss_mask": "m", "logprobs": "output.lp", "group": "task"}
TEXT = ",".join(f"{ours}={theirs}" for ours, theirs in NAMES.items())


@pytest.mark.parametrize("fields", [NAMES, TEXT, TEXT.replace(",", " , ")])
def test_rows_of_tokens(fields: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "harts.formats"):
        one, two = read([ROW, ROW | {"id": "own", "note": None}], fields=fields)
    assert one.token_ids.tolist() == [1, 2, 3]
    assert one.logprobs is not None
    assert one.logprobs.tolist() == [0.0, -0.5, -1.0]
    assert [(each.id, each.group) for each in (one, two)] == [("row0", "7"), ("own", "7")]
    assert ["row 1: present and not used: note (read as harts" in message for message in caplog.messages] == [True]


def test_a_name_with_a_point_in_it_and_a_group_left_out() -> None:
    (one,) = read([{"a.b": [1, 2], "a": {"b": [9]}, "m": [0, 1]}], fields="token_ids=a.b,loss_mask=m")
    assert (one.token_ids.tolist(), one.group) == ([1, 2], "row0")


def test_chat_and_other_formats(caplog: pytest.LogCaptureFixture) -> None:
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    row = {"chat": talk, "score": 0.5, "extra": 1}
    with caplog.at_level(logging.WARNING, "harts.formats"):
        (one,) = read([row], fields={"messages": "chat", "reward": "score"})
    assert "not used: extra (read as chat" in caplog.messages[0]
    assert (one.reward, one.token_ids.tolist()) == (0.5, read([{"messages": talk}])[0].token_ids.tolist())
    assert isinstance(decoder_for([row], fields={"messages": "chat"}), QwenDecoder)
    (two,) = read([{"p": "The sky is", "c": " blue."}], fields="prompt=p,completion=c")
    assert two.num_trained > 0
    (three,) = read([{"p": [1, 2], "c": [3]}], fields="prompt_ids=p,completion_ids=c", fmt="trl")
    assert three.token_ids.tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ("token_ids", "fields: expected OURS=THEIRS, several with commas between"),
        ("token_ids=", "fields: expected OURS=THEIRS"),
        ("token_ids=m,token_ids=m", "fields: expected each of our fields once, got token_ids twice"),
        (TEXT + ",logprob=x", "fields: expected fields of harts"),
        (TEXT + ",logprob=x", "got 'logprob'; did you mean logprobs?"),
        ("token_ids=ids,loss_mask=mask", "field fields: expected one of ids, mask, got a row with output, output.ids"),
        ("token_ids=output.ids", "field loss_mask: expected this field (or token_mask), got none"),
        ("note=task,token_ids=output.ids", "field note: expected it to be task, got a field note in the row too"),
    ],
)
def test_bad_mappings(fields: str, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        read([ROW], fields=fields)
    assert message in str(caught.value)


def test_the_option(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(ROW) + "\n")
    for command in (["inspect"], ["show"], ["plan", "--token-budget", "10"]):
        result = CliRunner().invoke(app, [*command, str(path), "--fields", TEXT, "--json"])
        assert result.exit_code == 0, result.output
        assert CliRunner().invoke(app, [*command, str(path), "--json"]).exit_code == 2
