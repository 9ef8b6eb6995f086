"""Tiny random models, whose weights show what a tree could get wrong."""

import math
from typing import Any

import torch
from torch import nn

from harts.models.families import FAMILIES
from harts.models.presets import COMMON, PRESETS

__all__ = ["remember", "tiny_config", "tiny_model"]


def tiny_config(name: str, **changes: Any) -> Any:
    """The config of `tiny_model`.

    Raises:
        ValueError: unknown name; the message lists those there are.
    """
    import transformers

    if name not in PRESETS:
        raise ValueError(f"model: expected one of {', '.join(PRESETS)} or a directory, got {name!r}")
    stem, settings = PRESETS[name]
    return getattr(transformers, f"{stem}Config")(**{**COMMON, **settings, **changes})


def tiny_model(name: str, *, dtype: torch.dtype = torch.float32, seed: int = 0, **changes: Any) -> nn.Module:
    """A small model with random weights, in evaluation mode, the same for the same arguments.

    Its recurrent layers keep 90-99.9 % of their state per token. transformers' own random initialisation forgets it
    within a token, and then no comparison could tell whether a branch started from the right state. Its routers prefer
    some experts; fresh ones give all nearly the same probability, which would hide a wrong weight.

    Args:
        name: one of `PRESETS`.
        dtype: of the parameters.
        seed: of the weights; the global random state is left as it was.
        changes: config fields to set otherwise, `vocab_size=...` say.

    Raises:
        ValueError: unknown name; the message lists those there are.
    """
    import transformers

    config = tiny_config(name, **changes)
    stem, _ = PRESETS[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = getattr(transformers, f"{stem.removesuffix('Text')}ForCausalLM")(config)
        for parameter in model.parameters():  # norms start at exactly one, which would hide a wrong scale
            if parameter.ndim == 1:
                parameter.data += 0.1 * torch.randn_like(parameter)
        remember(model)
        _make_choosy(model)
    model = model.to(dtype)
    _make_decays_exact(model)
    return model.eval()  # type: ignore[no-any-return]


def remember(model: nn.Module) -> None:
    """Sets `A_log` and `dt_bias` so that a token keeps 90-99.9 % of the recurrent state, each head another share."""
    for module in model.modules():
        a_log, dt_bias = getattr(module, "A_log", None), getattr(module, "dt_bias", None)
        if isinstance(a_log, nn.Parameter) and isinstance(dt_bias, nn.Parameter):
            forget = torch.logspace(math.log10(-math.log(0.999)), math.log10(-math.log(0.9)), a_log.numel())
            # the decay is exp(-A softplus(a + dt_bias)); a is small, and softplus(log(e - 1)) is 1
            channels = dt_bias.numel() // a_log.numel()  # with a decay of their own, some forget less
            bound: Any = getattr(module, "lower_bound", None)
            if getattr(module, "safe_gate", False):  # the decay is exp(bound sigmoid(exp(A) (a + dt_bias)))
                a_log.data.zero_()
                dt_bias.data = (-forget / bound).logit().repeat_interleave(channels).to(dt_bias)
            else:
                a_log.data = forget.log().view_as(a_log).to(a_log)
                dt_bias.data.fill_(math.log(math.e - 1))
            dt_bias.data -= torch.linspace(0, 1 if channels > 1 else 0, channels).repeat(a_log.numel()).to(dt_bias)


def _make_decays_exact(model: nn.Module) -> None:
    """Lightning attention of transformers keeps powers of its decays, made in fp32 whatever the model's dtype."""
    for module in model.modules():
        if hasattr(module, "decay_factors"):
            factors: Any = module.decay_factors
            module.query_decay, module.key_decay, module.diagonal_decay = factors(module.slope_rate)


def _make_choosy(model: nn.Module) -> None:
    """Scales the routers' weights so that the logits of a token spread by about one, and gives experts a bias."""
    family = FAMILIES[model.config.get_text_config().model_type]  # type: ignore[union-attr, operator]
    if family.router is None:
        return
    kind = family.router_class()
    for module in model.modules():
        if type(module) is kind:
            family.router.weight_of(module).data *= 8
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if name.endswith(("e_score_correction_bias", "expert_bias")):  # of the choice
            tensor.data += 0.2 * torch.randn_like(tensor)
