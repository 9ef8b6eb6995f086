"""What people put around a model and `harts.logprobs` does not call: refused by name, since it would be passed by.

`harts.logprobs` calls the decoder, then scores with the head's weight. So whatever lies on the decoder or below runs as
it does anywhere, hooks and replaced forwards included. What lies on the modules around it (the causal language model
and its wrappers) does not run. Their own forward does nothing else in transformers, peft and PyTorch, as long as nobody
has changed it.
"""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import CodeType
from typing import Any

import torch
from torch import nn
from torch._dynamo import OptimizedModule

__all__ = ["LogitShape", "check_around", "find_head", "has_own_call", "is_seam", "logit_shape", "user_hooks"]

_SEAM = "__harts_seam__"
_KNOWN = ("transformers", "peft", "torch", "harts")
_OWN_HOOKS = ("torch.distributed", "harts")
_HOOKS = {
    "_forward_pre_hooks": "forward pre-hook",
    "_forward_hooks": "forward hook",
    "_backward_pre_hooks": "backward pre-hook",
    "_backward_hooks": "backward hook",
}
_SCALING, _CAPPING = "logits_scaling", "final_logit_softcapping"
_FACTORS = ("logit_scale", "lm_head_multiplier")
_OPTIONS = (_SCALING, *_FACTORS, _CAPPING)


def is_seam(function: Any) -> bool:
    """Whether a forward or a hook carries `__harts_seam__ = True`: it promises to change no logits of its own."""
    return bool(getattr(function, _SEAM, False))


# -- around the decoder ----------------------------------------------------------------------------------------------


def check_around(model: nn.Module, inner: nn.Module, text: nn.Module) -> None:
    """Refuses what lies on the modules around the decoder and would not run.

    Args:
        model: as the user has it.
        inner: the causal language model in it.
        text: its decoder.

    Raises:
        ValueError: hooks, a forward of an instance or of a class of one's own, accelerate's autocast wrapper (outside
            an autocast of the same device) or `torch.compile`; the message names what and where.
    """
    for where, module in _around(model, text):
        _check_compiled(where, module)
        _check_forward(where, module, scales=module is inner)
        for kind, hook in user_hooks(module):
            raise ValueError(
                f"model: {kind} {_name(hook)!r} of {where} would not run, because harts.logprobs calls the decoder and "
                "the head alone; register it on those, or take it off. One that leaves logits alone may carry "
                f"{_SEAM} = True"
            )
    _check_compiled(f"the decoder ({type(text).__name__})", text)


def _around(model: nn.Module, text: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Modules that the decoder lies in, outermost first, and what messages call them."""
    path = next(name for name, module in model.named_modules() if module is text)
    parts = path.split(".") if path else []
    for length in range(len(parts)):
        module = model.get_submodule(".".join(parts[:length]))
        name = ".".join(["model", *parts[:length]])
        yield f"{name} ({type(module).__name__})", module


def _check_compiled(where: str, module: nn.Module) -> None:
    if isinstance(module, OptimizedModule):
        raise ValueError(
            f"model: torch.compile of {where.split(' ')[0]} would be passed by; give the model it was made from "
            "(model._orig_mod)"
        )
    if module._compiled_call_impl is not None:
        raise ValueError(
            f"model: compile() of {where} would be passed by; undo it (module._compiled_call_impl = None), or compile "
            "parts of its layers, norms or MLPs say"
        )


def _check_forward(where: str, module: nn.Module, *, scales: bool) -> None:
    if "_original_forward" in vars(module):
        _check_autocast(where, module)
    own = _set_forward(module)
    if own is not None and not is_seam(own):
        raise ValueError(
            f"model: the forward that was set on {where} itself, {_name(own)!r}, would not run, because harts.logprobs "
            f"calls the decoder and the head alone; take it off (del model.forward). One that changes no logits may "
            f"carry {_SEAM} = True"
        )
    for attribute in ("forward", "__call__"):
        function = getattr(type(module), attribute)
        if _is_known(function) or is_seam(function) or (scales and attribute == "forward" and _reads_options(module)):
            continue
        raise ValueError(
            f"model: {type(module).__name__}.{attribute}, which {where} has in place of transformers' own, would not "
            "run, because harts.logprobs calls the decoder and the head alone; use the class of transformers. One that "
            f"does no more to logits than {', '.join(f'config.{name}' for name in _OPTIONS)} say may carry "
            f"{_SEAM} = True"
        )


def _set_forward(module: nn.Module) -> Any:
    """The forward that was set on a module itself, behind accelerate's wrapper; None where its class's runs."""
    own = vars(module).get("_original_forward", vars(module).get("forward"))  # accelerate keeps what it wrapped
    of_class, owner = getattr(own, "__func__", None), getattr(own, "__self__", None)
    # peft sets that of the module inside, accelerate the unwrapped one where it takes its wrapper off
    if isinstance(owner, nn.Module) and any(owner is each for each in module.modules()):
        return None if any(of_class is each for each in _chain(type(owner).forward)) else own
    return own


def _chain(function: Any) -> Iterator[Any]:
    """A function and what its decorators wrap, outermost first."""
    while function is not None:
        yield function
        function = getattr(function, "__wrapped__", None)


def _is_known(function: Any) -> bool:
    """Whether a function and all its decorators were written in one of the known libraries; `wraps` copies names."""
    files = [getattr(each, "__globals__", {}).get("__name__", "") for each in _chain(function)]
    return all(file.split(".")[0] in _KNOWN for file in files)


def _check_autocast(where: str, module: nn.Module) -> None:
    device = next(module.parameters()).device.type
    if not torch.is_autocast_enabled(device):
        raise ValueError(
            f"model: accelerate's autocast wrapper of {where} would be passed by, so that the model ran in another "
            "precision than its own forward; call harts.attach and harts.logprobs inside `with accelerator.autocast():`"
            ", or load the model in the dtype to run in and leave mixed_precision at 'no'"
        )


def user_hooks(module: nn.Module) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Hooks of a module but for those of PyTorch's sharding, our own, and seams: (kind, hook)."""
    for attribute, kind in _HOOKS.items():
        for hook in getattr(module, attribute).values():
            function = getattr(hook, "__func__", hook)
            file = getattr(function, "__module__", None) or ""
            if not file.startswith(_OWN_HOOKS) and not is_seam(function):
                yield kind, hook


def _name(function: Any) -> str:
    function = getattr(function, "__func__", function)
    return getattr(function, "__qualname__", None) or type(function).__name__


# -- the head --------------------------------------------------------------------------------------------------------


def find_head(head: Any) -> nn.Linear:
    """The linear layer that a head is, behind peft's full copy of a module.

    Raises:
        ValueError: it is none, or hooks and forwards lie on what peft put around it.
    """
    wrapper = head
    if hasattr(head, "modules_to_save"):
        head = head.original_module if head.disable_adapters else head.modules_to_save[head.active_adapters[0]]
        if "forward" in vars(wrapper) or any(True for _ in user_hooks(wrapper)):
            raise ValueError(
                f"model: hooks and forwards of peft's {type(wrapper).__name__} around the head would not run; put them "
                "on the linear layer in it"
            )
    if not isinstance(head, nn.Linear) or type(head).forward is not nn.Linear.forward:
        raise ValueError(
            f"model: expected the head to be a torch.nn.Linear, got {type(head).__name__}; leave the head out of the "
            "LoRA target modules (modules_to_save is fine)"
        )
    _check_compiled(f"the head ({type(head).__name__})", head)
    return head


def has_own_call(head: nn.Linear) -> bool:
    """Whether a head does more than its weight says: hooks, or a forward that was set on it."""
    return "forward" in vars(head) or any(True for _ in user_hooks(head))


@dataclass(frozen=True)
class LogitShape:
    """What a model does to the head's logits, as its config says.

    Attributes:
        scaling: `logits_scaling`, or 1 / `logit_scale`, or 1 / `lm_head_multiplier`: logits are divided by it.
        cap: `final_logit_softcapping`: behind that, logits become cap * tanh(logits / cap); None: they are not.
    """

    scaling: float = 1.0
    cap: float | None = None


def logit_shape(inner: nn.Module, config: Any) -> LogitShape:
    """Scaling and soft-capping of logits, where the model's forward applies them: transformers' own of our families
    does not, whatever the config says, a subclass or a seam may.

    Raises:
        ValueError: an option is no number above 0.
    """
    if _is_known(type(inner).forward) and not _reads_options(inner) and not is_seam(_set_forward(inner)):
        return LogitShape()
    scaling = _option(config, _SCALING) or 1.0
    for name in _FACTORS:
        scaling /= _option(config, name) or 1.0
    return LogitShape(scaling, _option(config, _CAPPING))


def _option(config: Any, name: str) -> float | None:
    value = getattr(config, name, None)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise ValueError(f"model: config.{name}: expected a number above 0 or None, got {value!r}")
    return float(value)


def _reads_options(module: nn.Module) -> bool:
    """Whether the forward of a module's class names one of the options."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return code is not None and not _names(code).isdisjoint(_OPTIONS)


def _names(code: CodeType) -> set[str]:
    found = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            found |= _names(constant)
        elif isinstance(constant, str):
            found.add(constant)
    return found
