"""A transformers tokenizer from a directory on this machine; nothing is asked of a network."""

from os import PathLike
from pathlib import Path
from typing import Any

__all__ = ["load_tokenizer"]


def load_tokenizer(path: str | PathLike[str]) -> Any:
    """The tokenizer that `save_pretrained` wrote into a directory.

    Raises:
        ValueError: no such directory, or none that holds a tokenizer.
    """
    if not Path(path).is_dir():
        got = "a file" if Path(path).exists() else "none of that name"
        action = "pass the folder that holds tokenizer.json; a tokenizer of a model hub has to be downloaded before"
        raise ValueError(f"tokenizer {str(path)!r}: expected a directory, got {got}; {action}")
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path, local_files_only=True)
    except Exception as error:  # what a broken tokenizer.json raises is a bare Exception
        action = "pass the folder that holds tokenizer.json"
        raise ValueError(f"tokenizer {str(path)!r}: cannot load it ({error}); {action}") from error
