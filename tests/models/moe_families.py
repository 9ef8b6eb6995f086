"""The presets with routers, and what transformers' own routers gave."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from harts.models import PRESETS
from harts.models.attach import find_backbone
from harts.models.families import FAMILIES as MODEL_TYPES

LATENT = ("tiny-axk1", "tiny-deepseek-v3", "tiny-glm4-moe-lite")
WINDOWED = ("tiny-afmoe", "tiny-exaone-moe", "tiny-laguna", "tiny-mimo-v2")
SIGMOIDS = (
    *LATENT,
    *WINDOWED,
    "tiny-dots1",
    "tiny-glm4-moe",
    "tiny-hunyuan3",
    "tiny-lfm2-moe",
    "tiny-minimax-m2",
    "tiny-nemotron-h",
    "tiny-bailing-hybrid",
    "tiny-kimi-linear",
    "tiny-solar",
)
"""Those that score each expert by itself; written out here, as the tests are to find a wrong entry in the table."""


def _model_type(stem: str) -> str:
    return getattr(transformers, f"{stem}Config").model_type  # type: ignore[no-any-return]


FAMILIES = [name for name, (stem, _) in PRESETS.items() if MODEL_TYPES[_model_type(stem)].router is not None]

Route = Callable[[nn.Module, Any, tuple[Tensor, Tensor, Tensor]], Any]


def routers_of(model: nn.Module) -> list[nn.Module]:
    """In the order of layers."""
    kind = find_backbone(model).family.router_class()
    return [module for module in model.modules() if kind is not None and type(module) is kind]


@contextmanager
def hooked(model: nn.Module, hook: Route) -> Iterator[None]:
    """Runs `hook` behind every router."""
    handles = [router.register_forward_hook(hook) for router in routers_of(model)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def probabilities(name: str, logits: Tensor) -> Tensor:
    """What the balancing loss of a preset takes the mean of."""
    if name not in SIGMOIDS:
        return logits.softmax(-1)
    scores = 1 / (1 + torch.exp(-logits))
    return scores / scores.sum(-1, keepdim=True)


def weights_of_forced(name: str, router: Any, logits: Tensor, forced: Tensor) -> Tensor:
    """The router's weights of experts that it did not choose, as the models' papers write them."""
    if name in SIGMOIDS:
        weights = (1 / (1 + torch.exp(-logits))).gather(1, forced)
        weights = weights / (weights.sum(-1, keepdim=True) + (1e-6 if name == "tiny-lfm2-moe" else 0))
        return weights * {"tiny-hunyuan3": 2.826, "tiny-laguna": 1.0, "tiny-minimax-m2": 1.0}.get(name, 1.5)
    if name in ("tiny-olmoe", "tiny-flex-olmo"):
        return logits.softmax(-1).gather(1, forced)
    if name == "tiny-deepseek-v2":
        return 1.5 * logits.softmax(-1).gather(1, forced)
    if name == "tiny-mistral4":
        return 1.5 * logits.gather(1, forced).softmax(-1)
    return logits.gather(1, forced).softmax(-1)
