"""What is known of a model's family, for tables and reports."""

import re
from dataclasses import dataclass
from typing import Any

from transformers import __version__

from harts.models.families import FAMILIES
from harts.models.kernel_choice import has_kernel

__all__ = ["FamilyFacts", "family_facts"]


@dataclass(frozen=True, kw_only=True)
class FamilyFacts:
    """One family.

    Attributes:
        model_type: of its text config.
        mixers: the token mixers that its layers may have.
        kernels: those of them that run a kernel by default on a CUDA GPU in bf16, with heads of 128 channels and
            without sliding windows; the others run plain PyTorch there.
        router: "softmax", "sigmoid" or "grouped sigmoid"; None without experts.
        transformers: the installed version.
    """

    model_type: str
    mixers: tuple[str, ...]
    kernels: tuple[str, ...]
    router: str | None
    transformers: str


def family_facts(config: Any) -> FamilyFacts:
    """Of the family of a text config.

    Raises:
        ValueError: HARTS has no such family.
    """
    family = FAMILIES.get(config.model_type)
    if family is None:
        raise ValueError(f"config: expected a model_type of {', '.join(FAMILIES)}, got {config.model_type!r}")
    mixers = family.mixer_types()
    router = None
    if family.router is not None:
        router = f"grouped {family.router.scores}" if family.router.groups else family.router.scores
    return FamilyFacts(
        model_type=config.model_type,
        mixers=tuple(_words(mixer.__name__) for mixer in mixers),
        kernels=tuple(_words(mixer.__name__) for mixer in mixers if has_kernel(mixer, config)),
        router=router,
        transformers=__version__,
    )


def _words(name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", " ", name).lower()
