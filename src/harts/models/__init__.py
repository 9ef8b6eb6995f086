"""transformers models on a tree: attach, detach, score."""

from harts.models.attach import attach, detach
from harts.models.presets import PRESETS, tiny_model
from harts.models.scoring import logprobs

__all__ = ["PRESETS", "attach", "detach", "logprobs", "tiny_model"]
