"""Members of chat messages that no rendering would show are refused by name; nothing of a message is dropped."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from harts.formats import read
from harts.formats.chatml import text_of
from harts.formats.decoding import decoder_for

CALL = {"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
USER = {"role": "user", "content": "a"}
ASSISTANT = {"role": "assistant", "content": "b"}


def talk(**members: Any) -> dict[str, Any]:
    return {"id": "t", "messages": [USER, ASSISTANT | members]}


BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"reasoning": "x"}, "reasoning", "rename it to reasoning_content"),
    ({"thinking": "x"}, "thinking", "rename it to reasoning_content"),
    ({"function_call": {"name": "look", "arguments": "{}"}}, "function_call", "write it as tool_calls"),
    ({"weight": 0.5}, "weight", "ignore_loss"),
    ({"weight": True}, "weight", "ignore_loss"),
    ({"audio": {"id": "x"}}, "audio", "remove it"),
    ({"tool_call": [CALL]}, "tool_call", "did you mean tool_calls?"),
    ({"ignore_loss": 1}, "ignore_loss", "expected true or false, got 1"),
    ({"ignore_loss": "false"}, "ignore_loss", "expected true or false, got 'false'"),
    ({"reasoning_content": [{"text": "x"}]}, "reasoning_content", "expected a string, got list"),
    ({"tool_call_id": "1"}, "tool_call_id", "check the role"),
    ({"content": 3}, "content", "expected text, got int"),
    ({"content": ["b"]}, "content[0]", "join the texts"),
    ({"content": [{"type": "image", "text": "a cat"}]}, "content[0]", "got type 'image'"),
    ({"content": [{"text": "b"}]}, "content[0]", "got type None"),
    ({"content": [{"type": "text", "text": "b", "weight": 0}]}, "content[0].weight", "ignore_loss"),
    ({"tool_calls": CALL}, "tool_calls", "expected a list of calls, got dict"),
    ({"tool_calls": ["look"]}, "tool_calls[0]", "expected an object, got str"),
    ({"tool_calls": [CALL | {"result": "x"}]}, "tool_calls[0].result", "remove it"),
    ({"tool_calls": [{"name": "look", "parameters": {}}]}, "tool_calls[0].parameters", "remove it"),
    ({"tool_calls": [{"function": "look"}]}, "tool_calls[0].function", "expected an object, got str"),
    ({"tool_calls": [{"function": {"name": "look", "args": {}}}]}, "tool_calls[0].function.args", "remove it"),
]


@pytest.mark.parametrize(("members", "field", "action"), BAD)
@pytest.mark.parametrize("rows", ["trajectory", "turn"])
def test_members_that_would_be_dropped_are_named(
    members: dict[str, Any], field: str, action: str, rows: Any, tmp_path: Path
) -> None:
    path = tmp_path / "chats.jsonl"
    path.write_text(json.dumps(talk() | {"id": "good"}) + "\n" + json.dumps(talk(**members)) + "\n")
    with pytest.raises(ValueError) as caught:
        read(path, rows=rows)
    assert str(caught.value).startswith(f"{path}, line 2: trajectory 't', field messages[1].{field}: expected ")
    assert action in str(caught.value)


@pytest.mark.parametrize("name", ["ignore_loss", "tool_calls", "reasoning_content", "reasoning", "tool_call_id"])
def test_what_only_the_assistant_or_a_tool_has(name: str) -> None:
    value = {"ignore_loss": False, "tool_calls": [CALL]}.get(name, "x")
    with pytest.raises(ValueError, match=rf"field messages\[0\]\.{name}: expected a member of a message of role user"):
        read([{"messages": [{**USER, name: value}, ASSISTANT]}])


def test_members_that_are_known_are_taken() -> None:
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "s", "name": "n"},
        {"role": "user", "content": "a", "name": "n"},
        {"role": "assistant", "content": None, "reasoning_content": "r", "tool_calls": [CALL], "ignore_loss": False},
        {"role": "tool", "content": "c", "tool_call_id": "1", "name": "look"},
        {"role": "assistant", "content": [{"type": "text", "text": "d"}, {"type": "text", "text": "e"}]},
    ]
    plain = [*messages[:-1], {"role": "assistant", "content": "de"}]
    nulls = [{**message, "function_call": None, "audio": None} for message in plain]
    first, second, third = (read([{"messages": each}])[0] for each in (messages, plain, nulls))
    assert first.token_ids.tolist() == second.token_ids.tolist() == third.token_ids.tolist()
    assert first.loss_mask.tolist() == second.loss_mask.tolist()


@pytest.mark.parametrize("name", ["tool_calls", "reasoning_content"])
def test_a_raw_row_has_contents_only(name: str) -> None:
    row = talk(**{name: [CALL] if name == "tool_calls" else "r"}) | {"render": "raw"}
    with pytest.raises(ValueError, match=rf"messages\[1\]\.{name}: expected contents only beside render"):
        read([row])
    assert len(read([talk(**{name: None}) | {"render": "raw"}])) == 1


def test_tools_beside_raw_contents_would_not_be_shown() -> None:
    row = talk() | {"render": "raw", "tools": [{"type": "function", "function": {"name": "look"}}]}
    with pytest.raises(ValueError, match=r'field tools: expected no tools beside render "raw", .* got 1 tools'):
        read([row])
    assert len(read([row | {"tools": []}])) == 1


# -- tokenizers -------------------------------------------------------------------------------------------------------


def tokenizer() -> PreTrainedTokenizerFast:
    letters = {letter: index for index, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    core = Tokenizer(models.BPE(vocab=letters, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|end|>")
    # As the templates of text models do: content that is no string is not shown.
    fast.chat_template = (
        "{% for m in messages %}{{ m.role + ':' }}{% if m.content is string %}{{ m.content }}{% endif %}"
        "{{ '<|end|>' }}{% endfor %}{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
    )
    return fast


def test_a_template_is_given_text_parts_as_one_string() -> None:
    parts = [{"type": "text", "text": "first"}, {"type": "text", "text": "second"}]
    assert text_of({"content": parts}) == "firstsecond"
    one, two = read([talk(content=parts), talk(content="firstsecond") | {"id": "u"}], tokenizer=tokenizer())
    assert one.token_ids.tolist() == two.token_ids.tolist()
    assert int(np.count_nonzero(one.loss_mask)) == len("firstsecond") + 1


@pytest.mark.parametrize("name", ["no-such/model", "a-file"])
def test_a_tokenizer_that_is_no_directory_is_refused_at_once(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a-file").write_text("{}")
    monkeypatch.chdir(tmp_path)

    def asked(*arguments: Any, **options: Any) -> None:
        raise AssertionError("a network would be asked")

    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", asked)
    for use in (lambda: read([talk()], tokenizer=name), lambda: decoder_for([talk()], tokenizer=name)):
        with pytest.raises(ValueError, match=rf"tokenizer '{name}': expected a directory, got"):
            use()


def test_a_broken_tokenizer_is_refused(tmp_path: Path) -> None:
    tokenizer().save_pretrained(tmp_path)
    assert decoder_for([talk()], tokenizer=tmp_path) is not None
    (tmp_path / "tokenizer.json").write_text('{"model": 3}')
    for use in (lambda: read([talk()], tokenizer=tmp_path), lambda: decoder_for([talk()], tokenizer=tmp_path)):
        with pytest.raises(ValueError, match=r"cannot load it .*; pass the folder that holds tokenizer\.json"):
            use()


# -- JSON and masks ---------------------------------------------------------------------------------------------------

TOKENS = '{"group":"g","id":"z","token_ids":[1,2,3],"loss_mask":[0,1,0]'


@pytest.mark.parametrize(
    ("line", "field"),
    [
        (TOKENS + ',"loss_mask":[0,1,1]}', "loss_mask"),
        (TOKENS + ',"reward":NaN,"reward":1}', "reward"),
        (TOKENS + ',"meta":{"a":[{"b":1,"b":1}]}}', "b"),
        ('{"id":"z","messages":[{"role":"user","role":"assistant","content":"a"}]}', "role"),
    ],
)
def test_a_name_twice_in_one_object_is_refused(line: str, field: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(ValueError, match=f"line 1: trajectory 'z', field {field}: expected each field of an object"):
        read(path)


def test_two_masks_must_agree() -> None:
    row = json.loads(TOKENS + "}")
    (one,) = read([{**row, "token_mask": [False, True, False]}])
    assert one.loss_mask.tolist() == [False, True, False]
    for other in ([0, 1, 1], [0, 1]):
        with pytest.raises(ValueError, match="'z', field token_mask: expected what loss_mask says"):
            read([{**row, "token_mask": other}])
