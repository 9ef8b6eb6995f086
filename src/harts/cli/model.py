"""The model that a command runs: a tiny random one by name, or a directory in transformers' format."""

from typing import Annotated, Any, Literal

import torch
import typer
from torch import nn

__all__ = ["Device", "DtypeChoice", "Model", "is_preset", "load_model", "to_dtype", "vocabulary_of"]

DtypeChoice = Literal["float64", "float32", "bfloat16"]

Model = Annotated[
    str, typer.Option(help="A preset (tiny-qwen3.5, tiny-qwen3, tiny-llama, ...) or a directory of a saved model.")
]
Device = Annotated[str, typer.Option(help="Where to run: cpu, cuda, cuda:1, ...")]


def is_preset(name: str) -> bool:
    """Whether the name stands for a tiny random model, whose vocabulary can be chosen."""
    from harts.models import PRESETS

    return name in PRESETS


def to_dtype(name: DtypeChoice) -> torch.dtype:
    """The torch dtype of that name."""
    return getattr(torch, name)  # type: ignore[no-any-return]


def load_model(
    name: str, *, dtype: torch.dtype, device: str = "cpu", vocab_size: int | None = None, **changes: Any
) -> nn.Module:
    """Makes or loads a model, in evaluation mode.

    Args:
        name: a preset or a directory.
        dtype: of the parameters.
        device: where to put it.
        vocab_size: of a preset; None takes its own.
        changes: other config fields of a preset.

    Raises:
        ValueError: no such preset or directory, no such device, or a model that cannot be loaded.
    """
    from transformers.utils import logging

    from harts.models import tiny_model
    from harts.models.device import to_device
    from harts.models.saved import load_saved

    logging.set_verbosity_error()  # it warns of slow fall-backs that are meant here
    logging.disable_progress_bar()
    place = to_device(device)
    if is_preset(name):
        if vocab_size is not None:
            changes["vocab_size"] = vocab_size
        return tiny_model(name, dtype=dtype, **changes).to(place)
    return load_saved(name, dtype=dtype).to(place)


def vocabulary_of(model: nn.Module) -> int:
    """Number of token ids that the model knows."""
    from harts.models.attach import find_backbone

    return int(find_backbone(model).config.vocab_size)
