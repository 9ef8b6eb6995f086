"""TRL's trainers on the tree: `HartsGRPOTrainer`, `HartsRLOOTrainer`, and `share(trainer)` for those, DPO, KTO and SFT.

They all ask their model for per-token log-probabilities by one call, `model(..., labels=..., fused_lm_head=True)`. It
gives a `FusedCausalLMOutput`, since `trl.trainer.add_fused_lm_head` taught it to the model. `share` answers that call
with `harts.logprobs_padded` or `harts.logprobs_flat`; every other call (generation, evaluation with logits) runs as
before. So the losses, metrics and options of a trainer stay code of TRL.

Shape suffixes: B rows, L places of a padded row.
"""

import functools
import logging
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from types import MethodType
from typing import Any, TypeVar

import torch
from packaging.version import Version
from torch import Tensor, nn
from transformers.utils import ModelOutput

from harts.integrations.regroup import regroup, why_not
from harts.models import BatchScores, RouterConfig, attach, logprobs_flat, logprobs_padded
from harts.models.attach import Backbone, find_backbone
from harts.models.heads import must_call
from harts.models.seams import find_head, logit_shape

OLDEST, BEYOND = "1.15", "1.17"

try:
    _trl = Version(version("trl"))
except PackageNotFoundError as error:
    raise ImportError(f"harts.integrations.trl needs TRL: pip install 'trl>={OLDEST},<{BEYOND}'") from error
if not Version(OLDEST) <= _trl < Version(BEYOND):
    raise ImportError(
        f"harts.integrations.trl: expected TRL from {OLDEST} to below {BEYOND}, whose fused LM head it answers for, "
        f"found {_trl}; pip install 'trl>={OLDEST},<{BEYOND}'"
    )

from trl import GRPOTrainer, RLOOTrainer  # noqa: E402
from trl.trainer.utils import FusedCausalLMOutput  # noqa: E402

__all__ = ["HartsGRPOTrainer", "HartsRLOOTrainer", "share"]

Trainer = TypeVar("Trainer")

_log = logging.getLogger(__name__)

_MARK = "_harts_shared"
_FIELDS = {"log_probs", "entropy", "mean_logits", "is_top1"}
_PASSED_BY = {
    "input_ids",
    "attention_mask",
    "position_ids",
    "labels",
    "num_items_in_batch",
    "output_router_logits",
    "use_cache",
    # where packed sequences start, which position_ids say too
    "seq_idx",
    "cu_seq_lens_q",
    "cu_seq_lens_k",
    "max_length_q",
    "max_length_k",
}


def share(trainer: Trainer) -> Trainer:
    """Lets a TRL trainer run every distinct token of a batch once; call it before `trainer.train()`.

    The model, and the reference model if there is one, are attached in place (`harts.attach`), and answer the trainer's
    calls for log-probabilities on the prefix tree of the rows in the call. Where the loss allows it, the rows that
    GRPO and RLOO buffer for one optimiser step are regrouped so that rows with a common prefix come into one call.

    Args:
        trainer: of `trl`: GRPO, RLOO, DPO, KTO or SFT, or one derived from them.

    Returns:
        The same trainer. Calling twice is fine.

    Raises:
        TypeError: the trainer's model has no fused LM head, so it is none of those.
        ValueError: an option that cannot be honoured, by name, or a model that `harts.attach` refuses.
    """
    held: Any = trainer
    if getattr(held, _MARK, False):
        return trainer
    if not hasattr(held, "args") or not isinstance(getattr(held, "model", None), nn.Module):
        raise TypeError(f"share: expected a trainer of TRL with its model, got {type(trainer).__name__}")
    _check_options(held)
    for model in (held.model, getattr(held, "ref_model", None)):
        if model is not None:
            _answer(model, held.accelerator)
    if hasattr(held, "_buffered_inputs"):
        reason = why_not(held)
        if reason is None:
            _regroup_what_is_buffered(held)
        else:
            _log.warning("rows are not regrouped by prefix, because %s", reason)
    setattr(held, _MARK, True)
    return trainer


class HartsGRPOTrainer(GRPOTrainer):  # type: ignore[misc]
    """TRL's `GRPOTrainer`, same arguments, on the tree. See `share`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        share(self)


class HartsRLOOTrainer(RLOOTrainer):  # type: ignore[misc]
    """TRL's `RLOOTrainer`, same arguments, on the tree. See `share`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        share(self)


def _check_options(trainer: Any) -> None:
    """Refuses what would be passed by.

    Raises:
        ValueError: naming the option.
    """
    if any(kind.__name__ == "AsyncGRPOTrainer" for kind in type(trainer).__mro__):
        raise ValueError(
            "share: expected a GRPO, RLOO, DPO, KTO or SFT trainer, got AsyncGRPOTrainer, which packs trees for "
            "attention by itself; use HartsGRPOTrainer"
        )
    args = trainer.args
    plugins = trainer.accelerator.state
    refused = {
        "fsdp": getattr(plugins, "fsdp_plugin", None) is not None,
        "deepspeed": getattr(plugins, "deepspeed_plugin", None) is not None,
        "parallelism_config": getattr(args, "parallelism_config", None) is not None,
        "torch_compile": args.torch_compile,
        "use_liger_kernel": args.use_liger_kernel,
        "neftune_noise_alpha": args.neftune_noise_alpha is not None,
        "use_transformers_continuous_batching": getattr(args, "use_transformers_continuous_batching", False),
        "use_weighting": getattr(args, "use_weighting", False),
    }
    if named := [name for name, on in refused.items() if on]:
        raise ValueError(
            f"share: TRL's option {named[0]} is not supported on a prefix tree; leave it out (docs/integrations.md "
            "lists what is)"
        )


# -- the call for log-probabilities ----------------------------------------------------------------------------------


def _answer(model: nn.Module, accelerator: Any) -> None:
    """Makes a model with TRL's fused LM head answer for it on the tree.

    Raises:
        TypeError: there is no such head.
        ValueError: it asks for what is not given.
    """
    inner: Any = find_backbone(model).inner
    before = inner.forward
    fused = vars(inner).get("_original_forward", before)  # accelerate keeps what it wrapped
    settings = _settings(fused)
    if unknown := sorted(set(settings["outputs"]) - _FIELDS):
        raise ValueError(f"share: expected outputs of the fused LM head among {sorted(_FIELDS)}, got {unknown[0]!r}")
    if settings["cast_lm_head_to_fp32"] and accelerator.mixed_precision != "no":
        raise ValueError(
            f"share: cast_lm_head_to_fp32 together with mixed precision ({accelerator.mixed_precision}) is not "
            "supported; load the model in that dtype (model_init_kwargs={'dtype': ...}) and set bf16 and fp16 to False"
        )
    fused.__func__.__harts_seam__ = True
    with accelerator.autocast():  # its wrapper around a reference model is there already, and would be refused outside
        attach(model)

    @functools.wraps(fused.__func__)  # generate() reads its signature
    def forward(self: Any, *args: Any, fused_lm_head: bool = False, **kwargs: Any) -> Any:
        if not fused_lm_head:
            return before(*args, **kwargs)
        if args:
            raise ValueError("fused_lm_head: expected keyword arguments alone, got positional ones")
        with accelerator.autocast():
            return _fused_output(model, settings, kwargs)

    forward.__harts_seam__ = True  # type: ignore[attr-defined]
    inner.forward = MethodType(forward, inner)


def _settings(fused: Callable[..., Any]) -> dict[str, Any]:
    """What `add_fused_lm_head` was called with, which its forward keeps.

    Raises:
        TypeError: the forward is not its.
    """
    function = getattr(fused, "__func__", fused)
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    found = {name: cell.cell_contents for name, cell in cells}
    names = ("temperature", "cast_lm_head_to_fp32", "outputs")
    if missing := [name for name in names if name not in found]:
        raise TypeError(
            f"share: expected a model with TRL's fused LM head, found a forward without its {missing[0]}; give a "
            "GRPO, RLOO, DPO, KTO or SFT trainer, before anything else replaces the model's forward"
        )
    return {name: found[name] for name in names}


def _fused_output(model: nn.Module, settings: dict[str, Any], inputs: dict[str, Any]) -> ModelOutput:
    """TRL's output of the call, from the tree of its rows. Per-token fields are [B, L - 1], as labels shifted."""
    named = {name: value for name, value in inputs.items() if value is not None}
    if unknown := sorted(set(named) - _PASSED_BY):
        raise ValueError(
            f"fused_lm_head: {unknown[0]} is not supported on a prefix tree (text and unshifted labels only are)"
        )
    backbone, wanted = find_backbone(model), set(settings["outputs"])
    ids_BL, labels_BL = inputs["input_ids"], inputs["labels"]
    scored_BL = labels_BL != -100
    scored_BL[:, 0] = False
    if not torch.equal(labels_BL[scored_BL], ids_BL[scored_BL]):
        raise ValueError("labels: expected those of input_ids where they are not -100, got others")
    with_router = bool(inputs.get("output_router_logits", getattr(backbone.config, "output_router_logits", False)))
    scores = _scores(
        model,
        named,
        scored_BL,
        temperature=settings["temperature"],
        allow_empty=True,
        entropy="entropy" in wanted,
        hidden="mean_logits" in wanted,
        top_k=1 if "is_top1" in wanted else None,
        router=RouterConfig(scope="microbatch") if with_router else None,
    )
    logprobs, mask = scores.logprobs[:, 1:], scored_BL[:, 1:]
    count = inputs.get("num_items_in_batch")
    loss = -logprobs.sum() / (mask.sum().clamp(min=1) if count is None else count)
    aux_loss = None
    if scores.router is not None:
        aux_loss = scores.router.balance_loss()
        loss = loss + getattr(backbone.config, "router_aux_loss_coef", 0.0) * aux_loss
    mean = _mean_logits(backbone, scores, settings["temperature"]) if "mean_logits" in wanted else None
    return FusedCausalLMOutput(  # type: ignore[no-any-return]
        loss=loss,
        log_probs=logprobs,
        entropy=None if scores.entropy is None else scores.entropy[:, 1:],
        mean_logits=None if mean is None else mean[:, 1:].masked_fill(~mask, 0),
        is_top1=None if scores.top_ids is None else (scores.top_ids[..., 0] == labels_BL)[:, 1:] & mask,
        label_mask=mask,
        aux_loss=aux_loss,
    )


def _scores(model: nn.Module, inputs: dict[str, Any], scored_BL: Tensor, **options: Any) -> BatchScores:
    """Padded rows come with a mask; packed ones with positions, which tell where a sequence starts."""
    if "attention_mask" in inputs or "position_ids" not in inputs:
        return logprobs_padded(model, inputs["input_ids"], inputs.get("attention_mask"), scored_BL=scored_BL, **options)
    positions = inputs["position_ids"]
    scored_BL &= positions != 0  # nothing in its own sequence predicts a first token
    return logprobs_flat(model, inputs["input_ids"], position_ids=positions, scored_1N=scored_BL, **options)


@torch.no_grad()
def _mean_logits(backbone: Backbone, scores: BatchScores, temperature: float) -> Tensor:
    """Mean logit over the vocabulary, [B, L]: that of the hidden state against the mean of the head's rows.

    Raises:
        ValueError: the logits are more than the head's weight gives.
    """
    head, shape = find_head(backbone.head), logit_shape(backbone.inner, backbone.config)
    if must_call(head, shape):
        raise ValueError("share: mean_logits of a head with hooks, or of capped logits, are not supported")
    assert scores.hidden is not None, "asked for above"
    mean = scores.hidden.detach() @ head.weight.mean(0).to(scores.hidden.dtype)
    if head.bias is not None:
        mean = mean + head.bias.mean()
    return mean / (temperature * shape.scaling)


# -- rows with a common prefix into one call -------------------------------------------------------------------------


def _regroup_what_is_buffered(trainer: Any) -> None:
    """Regroups the rows of each optimiser step when the trainer has filled its buffer."""
    prepare = trainer._prepare_inputs

    def prepare_regrouped(generation_batch: Any) -> Any:
        before = trainer._buffered_inputs
        inputs = prepare(generation_batch)
        buffered = trainer._buffered_inputs
        if buffered is before or buffered is None:
            return inputs
        steps, window = trainer.args.steps_per_generation, trainer.args.gradient_accumulation_steps
        trainer._buffered_inputs = [
            part for start in range(0, steps, window) for part in regroup(buffered[start : start + window])
        ]
        return trainer._buffered_inputs[trainer._step % steps]

    trainer._prepare_inputs = prepare_regrouped
