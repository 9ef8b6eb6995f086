"""Refuses what would treat a shared row otherwise than the rows of each trajectory: draws, and statistics of a batch.

A row of the tree stands for several trajectories. Dropout and noise would be drawn once for all of them, and what
normalises over a batch would see each row once.
"""

from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.instancenorm import _InstanceNorm

__all__ = ["check_draws"]

_RATES = (
    "attention_dropout",
    "activation_dropout",
    "dropout",
    "drop_prob",
    "drop_path",
    "hidden_dropout",
    "residual_dropout",
    "embedding_dropout",
    "dropout_p",
    "dropout_prob",
    "attention_dropout_prob",
    "hidden_dropout_prob",
    "rank_dropout",
    "module_dropout",
)
"""Names under which modules keep a rate of their own and draw without a module; peft keeps one for each adapter."""

_CLASSES = ("dropout", "droppath", "stochasticdepth", "noise")
"""What the classes of other libraries are called that draw; their rate is p, prob or one of the names above."""


def check_draws(model: nn.Module) -> None:
    """Refuses modules that draw at random in training mode, and those that normalise over rows.

    Raises:
        ValueError: there are some; the message names the first and its class.
    """
    found = [(name, what) for name, module in model.named_modules() for what in _reasons(module)]
    if not found:
        return
    name, what = found[0]
    if "attention_dropout=" in what:
        name = "config.attention_dropout"
    others = f" and {len(found) - 1} others" if len(found) > 1 else ""
    if what.startswith("normalises"):
        raise ValueError(
            f"model: {name}{others} {what}, and a row of the tree, which stands for several trajectories, would count "
            "once; put batch normalisation into evaluation mode (with running statistics), or leave it out"
        )
    raise ValueError(
        f"model: dropout is active in {name}{others}: {what}; a row of the tree stands for several trajectories, which "
        "would no longer be dropped alone. Set it to 0 or call model.eval()"
    )


def _reasons(module: nn.Module) -> Iterator[str]:
    kind = type(module).__name__
    if isinstance(module, _NormBase):
        by_batch = module.training or not module.track_running_stats
        if by_batch or isinstance(module, _InstanceNorm):
            yield f"normalises over the rows of a batch ({kind})"
    sampling = vars(module).get("sample_at_inference")  # of PVeRA, by adapter
    if isinstance(sampling, dict) and (module.training or any(sampling.values())):
        yield f"{kind} of PVeRA, which samples"
    if not module.training:
        return
    if isinstance(module, nn.RReLU):
        if module.lower != module.upper:
            yield f"{kind} draws its slopes from {module.lower} to {module.upper}"
    elif isinstance(module, _DropoutNd):
        if module.p > 0:
            yield f"{kind} with p={module.p}"
    elif any(word in kind.lower() for word in _CLASSES):
        rates = [vars(module).get(name) for name in ("p", "prob", *_RATES)]
        if any(map(_positive, rates)) or all(rate is None for rate in rates):
            yield f"{kind}"
    else:
        for name in _RATES:
            if _positive(vars(module).get(name)):
                yield f"{kind} with {name}={vars(module)[name]}"
    if _positive(vars(module).get("neftune_noise_alpha")) and module._forward_hooks:
        yield f"{kind} with noise (neftune_noise_alpha={vars(module)['neftune_noise_alpha']})"


def _positive(rate: Any) -> bool:
    if isinstance(rate, dict):
        return any(map(_positive, rate.values()))
    return isinstance(rate, int | float) and not isinstance(rate, bool) and rate > 0
