"""Token ids back to text, for people to read: the Qwen vocabulary of ChatML rows, or a transformers tokenizer.

A token is bytes, and a character can lie in several tokens; so pieces are bytes, and text is decoded only when joined.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from functools import cached_property
from os import PathLike
from typing import Any

import numpy as np
from numpy.typing import NDArray

from harts.formats import chatml
from harts.formats.files import Source, parts_of
from harts.formats.places import STDIN
from harts.formats.renaming import parse_fields, renamed
from harts.formats.rows import Row
from harts.formats.sessions import TOOLS, rows_of
from harts.formats.sources import format_of
from harts.formats.tokenizer import load_tokenizer

__all__ = ["Decoder", "QwenDecoder", "TokenizerDecoder", "decoder_for"]

Ids = NDArray[np.int32]

_SPECIAL = {
    151643: "<|endoftext|>",
    151644: "<|im_start|>",
    151645: "<|im_end|>",
    151657: "<tool_call>",
    151658: "</tool_call>",
    151665: "<tool_response>",
    151666: "</tool_response>",
    151667: "<think>",
    151668: "</think>",
}


class Decoder(ABC):
    """Bytes of tokens; a subclass says what one id is."""

    def __init__(self) -> None:
        self._known: dict[int, bytes] = {}

    @abstractmethod
    def piece(self, token_id: int) -> bytes:
        """Bytes of one token; an id that the vocabulary does not have becomes `<id>`."""

    def pieces(self, token_ids: Ids) -> list[bytes]:
        """Bytes of each token."""
        known, found = self._known, []
        for token_id in token_ids.tolist():
            piece = known.get(token_id)
            if piece is None:
                piece = known[token_id] = self.piece(token_id)
            found.append(piece)
        return found

    def text(self, token_ids: Ids) -> str:
        """Text of consecutive tokens; a character cut at either end becomes U+FFFD."""
        return b"".join(self.pieces(token_ids)).decode("utf-8", "replace")


class QwenDecoder(Decoder):
    """The vocabulary that `harts.formats.chatml` renders to."""

    def piece(self, token_id: int) -> bytes:
        """Bytes of one token."""
        special = _SPECIAL.get(token_id)
        if special is not None:
            return special.encode()
        if token_id >= min(_SPECIAL):
            return f"<{token_id}>".encode()
        piece: bytes = chatml.vocabulary().decode_single_token_bytes(token_id)
        return piece


class TokenizerDecoder(Decoder):
    """A transformers tokenizer, byte-level or with `▁` for a space."""

    def __init__(self, tokenizer: Any) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        self._added = {int(number): str(token) for number, token in tokenizer.added_tokens_decoder.items()}

    @cached_property
    def _byte_of(self) -> dict[str, int] | None:
        return _byte_characters() if "Ġ" in self._tokenizer.get_vocab() else None

    def piece(self, token_id: int) -> bytes:
        """Bytes of one token."""
        if token_id in self._added:
            return self._added[token_id].encode()
        token = self._tokenizer.convert_ids_to_tokens(token_id) if token_id < len(self._tokenizer) else None
        if token is None:
            return f"<{token_id}>".encode()
        if self._byte_of is not None and all(character in self._byte_of for character in token):
            return bytes(self._byte_of[character] for character in token)
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes([int(token[3:5], 16)])
        return str(token).replace("▁", " ").encode()


def decoder_for(
    source: Source, *, fmt: str = "auto", tokenizer: Any = None, fields: Mapping[str, str] | str | None = None
) -> Decoder | None:
    """What turns the token ids read from a source back into text, where that is known.

    Args:
        source: as `read` takes it. Rows in memory are looked at only where they can be read again.
        fmt, fields: as `read` takes them.
        tokenizer: the one given to `read`, or, for rows of token ids, the one that made them; a directory or a
            transformers tokenizer.

    Returns:
        None for rows of token ids without a tokenizer: nothing says which vocabulary they are in. Also for standard
        input without `fmt`: it cannot be looked at twice.

    Raises:
        ValueError: the tokenizer cannot be loaded.
    """
    if tokenizer is not None:
        return TokenizerDecoder(load_tokenizer(tokenizer) if isinstance(tokenizer, str | PathLike) else tokenizer)
    if fmt == "auto" and not isinstance(source, str | PathLike | list | tuple | dict):
        return None
    paths = source if isinstance(source, list | tuple) else [source]
    if fmt == "auto" and any(isinstance(path, str | PathLike) and str(path) == STDIN for path in paths):
        return None  # read once already
    if fmt == "auto":
        fmt = "chat" if all(_is_chat(part, parse_fields(fields)) for part in parts_of(source)) else "other"
    return QwenDecoder() if fmt in ("chat", "inspect", *TOOLS) else None


def _is_chat(part: Iterable[Row], names: Mapping[str, str]) -> bool:
    """Whether the first row is chat; a session without a reply of a model has no row and is no other thing."""
    first = next(rows_of(part), None)
    return first is None or format_of(renamed(first, names) if names else first) == "chat"


def _byte_characters() -> dict[str, int]:
    """The printable stand-ins of byte-level vocabularies: bytes that print stand for themselves, the others follow
    from U+0100 on (Radford et al. 2019, "Language models are unsupervised multitask learners")."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + at): byte for at, byte in enumerate(others)}
