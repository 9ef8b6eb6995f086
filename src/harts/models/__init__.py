"""transformers models on a tree: attach, detach, score."""

from harts.models.attach import attach, detach
from harts.models.batches import BatchScores, logprobs_flat, logprobs_padded
from harts.models.kernel_choice import default_kernels
from harts.models.presets import PRESETS
from harts.models.recompute import recompute_activations
from harts.models.router_losses import RouterStep
from harts.models.router_output import RouterConfig, RouterOutput
from harts.models.scores import Scores
from harts.models.scoring import backward, logprobs, score_tree
from harts.models.tiny import tiny_model

__all__ = [
    "PRESETS",
    "BatchScores",
    "RouterConfig",
    "RouterOutput",
    "RouterStep",
    "Scores",
    "attach",
    "backward",
    "default_kernels",
    "detach",
    "logprobs",
    "logprobs_flat",
    "logprobs_padded",
    "recompute_activations",
    "score_tree",
    "tiny_model",
]
