"""Model families that are not taken, and versions of transformers in which one is not: each with its reason."""

from transformers import __version__

__all__ = ["REASONS", "check_version"]

REASONS = {
    "apertus": "its activation makes constants in bfloat16 whatever the model's dtype, so that no run is exact",
    "nemotron": "its layers hand their attention no keyword arguments, so that it cannot be told of a tree",
    "phimoe": "its router draws experts in training, once for a shared row, where each trajectory would draw its own",
    "stablelm": "its layers hand their attention no keyword arguments, so that it cannot be told of a tree",
}
"""By `model_type`."""


def check_version(model_type: str, since: str) -> None:
    """Refuses a version of transformers in which a family has not what `attach` needs.

    Args:
        model_type: the family.
        since: first version that has it, as "5.18"; "" for the oldest that HARTS takes.

    Raises:
        ValueError: an older one is installed.
    """
    if since and _numbers(__version__) < _numbers(since):
        raise ValueError(
            f"model: model_type {model_type!r} needs transformers {since} or newer, got {__version__}: "
            f"its layers hand their mixers no keyword arguments before; pip install 'transformers>={since}'"
        )


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2])
