"""Token ids back to text: the Qwen vocabulary, tokenizers of two kinds, and where nothing is known."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harts.formats import read
from harts.formats.chatml import encode
from harts.formats.decoding import QwenDecoder, TokenizerDecoder, decoder_for

TEXT = "Grüße, 世界 \U0001f600\n\tand  spaces ﷺ 12345"


def test_qwen_text_comes_back() -> None:
    decoder = QwenDecoder()
    ids = encode(TEXT)
    assert decoder.text(ids) == TEXT
    assert b"".join(decoder.pieces(ids)) == TEXT.encode()
    assert decoder.text(np.array([151644, 151645, 151667, 151700, 2**31 - 1])) == (
        "<|im_start|><|im_end|><think><151700><2147483647>"
    )
    cut = encode("\U00012000")
    assert len(cut) > 1
    assert decoder.text(cut[:1]) == "\ufffd"


def test_a_rendered_conversation_reads_well() -> None:
    row = {
        "messages": [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "reasoning_content": "hm", "content": "Ho"},
        ]
    }
    (one,) = read([row])
    text = QwenDecoder().text(one.token_ids)
    assert text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\nhm\n</think>\n\nHo<|im_end|>"


def _byte_level() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={character: at for at, character in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")


def test_a_byte_level_tokenizer(tmp_path: Path) -> None:
    tokenizer = _byte_level()
    ids = np.array([*tokenizer(TEXT)["input_ids"], tokenizer.eos_token_id, 9_999])
    assert TokenizerDecoder(tokenizer).text(ids) == TEXT + "<end><9999>"
    assert len(TokenizerDecoder(tokenizer).pieces(ids)) == len(TEXT.encode()) + 2
    tokenizer.save_pretrained(tmp_path)
    loaded = decoder_for(["any.jsonl"], tokenizer=str(tmp_path))
    assert loaded is not None
    assert loaded.text(ids) == TEXT + "<end><9999>"


def test_a_tokenizer_with_marks_for_spaces() -> None:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {"▁to": 0, "do": 1, "<0x0A>": 2, "<0xE4>": 3, "▁": 4}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="do")))
    decoder = TokenizerDecoder(tokenizer)
    assert decoder.pieces(np.array([0, 1, 2, 3, 4])) == [b" to", b"do", b"\n", b"\xe4", b" "]


def test_the_decoder_follows_the_format(tmp_path: Path, tau_file: Path) -> None:
    tokens, both = tmp_path / "tokens.jsonl", tmp_path / "both.jsonl"
    row = {"group": "g", "id": "a", "token_ids": [1, 2], "loss_mask": [0, 1]}
    tokens.write_text(json.dumps(row))
    both.write_text(json.dumps({**row, "messages": [{"role": "assistant", "content": "x"}]}))
    assert isinstance(decoder_for(tau_file), QwenDecoder)
    assert isinstance(decoder_for([tau_file], fmt="chat"), QwenDecoder)
    for source in (tokens, both, [tau_file, tokens]):
        assert decoder_for(source) is None
    assert isinstance(decoder_for(both, fmt="chat"), QwenDecoder)
    assert decoder_for(iter([row])) is None


def test_a_tokenizer_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expected a directory, got none of that name"):
        decoder_for("any.jsonl", tokenizer=str(tmp_path / "none"))
