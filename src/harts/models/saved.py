"""A model from a directory on this machine: nothing is asked of a network, and no code of a directory is run."""

from os import PathLike
from pathlib import Path

import torch
from torch import nn

from harts.models.presets import PRESETS

__all__ = ["load_saved"]


def load_saved(path: str | PathLike[str], *, dtype: torch.dtype) -> nn.Module:
    """The causal language model that `save_pretrained` wrote into a directory, on the CPU, in evaluation mode.

    Args:
        path: the directory; the weights of adapters (peft) may lie in it too, where those of the model are named there.
        dtype: of the parameters.

    Raises:
        ValueError: no such directory, none that transformers can load, or one whose model needs code of its own.
    """
    if not Path(path).is_dir():
        got = "a file" if Path(path).exists() else "none of that name"
        raise ValueError(
            f"model {str(path)!r}: expected a directory or one of {', '.join(PRESETS)}, got {got}; HARTS fetches "
            "nothing, so download a model of a hub first and pass its folder"
        )
    from transformers import AutoModelForCausalLM

    try:
        model, found = AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype, local_files_only=True, trust_remote_code=False, output_loading_info=True
        )
    except Exception as error:  # damaged files raise what they like: KeyError, RuntimeError, SafetensorError, ...
        if "trust_remote_code" in str(error):
            raise ValueError(
                f"model {str(path)!r}: expected a model that transformers knows, got one that brings its own code, "
                "which HARTS never runs; load it yourself and call harts.attach"
            ) from error
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise ValueError(
            f"model {str(path)!r}: cannot load it ({reason[0]}); pass a folder that save_pretrained wrote, with "
            "config.json and weights"
        ) from error
    if missing := sorted(found["missing_keys"]):  # transformers makes them up at random
        raise ValueError(
            f"model {str(path)!r}: expected all weights of a {type(model).__name__}, got none for {missing[0]} and "
            f"{len(missing) - 1} others; pass a folder that save_pretrained wrote whole"
        )
    return model.eval()  # type: ignore[no-any-return]
