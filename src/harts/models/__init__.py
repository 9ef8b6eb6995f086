"""transformers models on a tree: attach, detach, score."""

from harts.models.attach import attach, detach
from harts.models.kernel_choice import default_kernels
from harts.models.presets import PRESETS, tiny_model
from harts.models.recompute import recompute_activations
from harts.models.routing import RouterConfig, RouterOutput
from harts.models.scoring import logprobs

__all__ = [
    "PRESETS",
    "RouterConfig",
    "RouterOutput",
    "attach",
    "default_kernels",
    "detach",
    "logprobs",
    "recompute_activations",
    "tiny_model",
]
