"""Chat templates that do not keep what they rendered are found out, with the first text that differs."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from harts.cli import app
from harts.formats import read
from harts.formats.stability import template_stability

START = "{% for m in messages %}{{ '<' + m.role + '>' }}"
THOUGHT = "{% if m.reasoning_content %}{{ '[' + m.reasoning_content + ']' }}{% endif %}"
END = "{{ m.content }}{{ '<|end|>' }}{% endfor %}{% if add_generation_prompt %}{{ '<assistant>PROMPT' }}{% endif %}"
STABLE = (START + THOUGHT + END).replace("PROMPT", "")
STRIPPED = STABLE.replace("if m.reasoning_content", "if m.reasoning_content and loop.last")
PROMPTED = (START + THOUGHT + END).replace("PROMPT", "[")

TALK: list[dict[str, Any]] = [
    {"role": "user", "content": "Where?"},
    {"role": "assistant", "content": "North.", "reasoning_content": "Hm."},
    {"role": "user", "content": "Sure?"},
    {"role": "assistant", "content": "Yes."},
]


def tokenizer(template: str) -> PreTrainedTokenizerFast:
    """A tokenizer of bytes."""
    letters = {letter: index for index, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    core = Tokenizer(models.BPE(vocab=letters, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|end|>")
    fast.chat_template = template
    return fast


def test_a_template_that_keeps_all() -> None:
    found = template_stability([{"messages": TALK}], tokenizer=tokenizer(STABLE))
    assert found is not None
    assert (found.conversations, found.turns, found.rewritten, found.unprompted) == (1, 2, 0, 0)
    assert found.history is found.prompt is None


def test_thinking_that_is_stripped_from_earlier_turns() -> None:
    rows = [{"id": "plain", "messages": [TALK[0], TALK[3]]}, {"id": "thinks", "messages": TALK}]
    found = template_stability(rows, tokenizer=tokenizer(STRIPPED))
    assert found is not None
    assert (found.conversations, found.rewritten) == (2, 1)
    change = found.history
    assert change is not None
    assert (change.place, change.message, change.later) == ("row 2", 0, 1)
    assert change.before.endswith("<assistant>"[-8:])
    assert change.first.startswith("[Hm.]North.")
    assert change.second.startswith("North.<|end|><user>")
    assert change.token == len("<user>Where?") + 1 + len("<assistant>")
    with pytest.raises(
        ValueError, match=r"token prefix of message 1, got another rendering from its token 24 on, 'Nor"
    ):
        read(rows, tokenizer=tokenizer(STRIPPED))


def test_a_generation_prompt_that_the_finished_message_lacks() -> None:
    found = template_stability([{"messages": TALK}], tokenizer=tokenizer(PROMPTED))
    assert found is not None
    assert (found.rewritten, found.unprompted, found.turns) == (0, 1, 2)
    assert found.prompt is not None
    assert (found.prompt.message, found.prompt.first, found.prompt.second) == (1, "[", "Yes.<|end|>")


def test_rows_that_no_template_renders() -> None:
    tokens = {"group": "g", "id": "a", "token_ids": [1, 2], "loss_mask": [0, 1]}
    raw = {"messages": TALK[::3], "render": "raw"}
    for source in ([tokens], [raw], "-"):
        assert template_stability(source, tokenizer=tokenizer(STRIPPED)) is None


@pytest.mark.parametrize(("template", "said"), [(STABLE, "every turn is a token prefix of the next"), (STRIPPED, "")])
def test_inspect_explain_says_so(template: str, said: str, tmp_path: Path) -> None:
    tokenizer(template).save_pretrained(tmp_path / "tokenizer")
    path = tmp_path / "chats.jsonl"
    path.write_text(json.dumps({"id": "c", "messages": TALK}) + "\n")
    command = ["inspect", str(path), "--explain", "--rows", "turn", "--tokenizer", str(tmp_path / "tokenizer")]
    shown = CliRunner().invoke(app, command)
    assert shown.exit_code == 0, shown.output
    found = json.loads(CliRunner().invoke(app, [*command, "--json"]).stdout)["explain"]["template"]
    text = " ".join(shown.stdout.split())
    if said:
        assert said in text
        assert found["history"] is None
    else:
        assert "Earlier turns are rewritten in 1 of them: read with --rows turn" in text
        assert "message 0, as it was: [[Hm.]North.<|end|>" in text
        assert "as message 1 sees it: [North.<|end|><user>" in text
        assert found["history"]["second"].startswith("North.")
