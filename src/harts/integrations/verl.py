"""An engine for verl: FSDP2 as verl drives it, with log-probabilities from the prefix tree of a rank's mini-batch.

verl loads this module by the entry point `verl.plugins`; `VERL_ENGINE_VENDOR=harts` and `strategy: fsdp2` choose the
engine. Only two things differ from verl's own: the module is attached, and a mini-batch with a token budget
(`use_dynamic_bsz`) is scored in one call, whose tree runs in pieces of that budget, instead of in micro-batches that
would tear groups apart. Loading weights, sharding, the losses, the optimiser and checkpoints stay code of verl.

Shape suffixes: N tokens of all sequences one behind another.
"""

import logging
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from packaging.version import Version
from torch import Tensor, nn

from harts.models import attach, logprobs_flat

OLDEST, BEYOND = "0.9", "0.10"

VENDOR = "harts"

_log = logging.getLogger(__name__)


def _check_version() -> None:
    """verl goes on without a plug-in that fails, with its own engine: so this says it aloud where it was asked for.

    Raises:
        ImportError: verl is missing or outside the range.
    """
    try:
        found = version("verl")
    except PackageNotFoundError:
        found = "none"
    if found != "none" and Version(OLDEST) <= Version(found) < Version(BEYOND):
        return
    message = (
        f"harts.integrations.verl: expected verl from {OLDEST} to below {BEYOND}, whose engines it builds on, got "
        f"{found}"
    )
    if os.environ.get("VERL_ENGINE_VENDOR") == VENDOR:
        _log.error("%s; verl falls back to its own engine", message)
    raise ImportError(message)


_check_version()

from verl.utils import tensordict_utils as tu  # noqa: E402
from verl.utils.device import get_device_id, get_device_name  # noqa: E402
from verl.workers.engine.base import EngineRegistry  # noqa: E402
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead  # noqa: E402
from verl.workers.engine.utils import detach_tree  # noqa: E402

__all__ = ["HartsEngine"]

_NOT_ON_A_TREE = ("calculate_sum_pi_squared", "distillation_use_topk", "distillation_only")


@EngineRegistry.register(  # type: ignore[untyped-decorator]
    model_type="language_model", backend="fsdp2", device=["cuda", "cpu"], vendor=VENDOR
)
class HartsEngine(FSDPEngineWithLMHead):  # type: ignore[misc]
    """verl's FSDP2 engine for language models on the prefix tree."""

    def _build_module(self) -> nn.Module:
        """verl's module, attached.

        Raises:
            ValueError: an option that cannot be honoured, by name, or a model that `harts.attach` refuses.
        """
        self._check_options()
        module = attach(super()._build_module())
        _log.warning("verl trains on the prefix tree of HARTS")
        return module

    def _check_options(self) -> None:
        model, engine = self.model_config, self.engine_config
        refused = {
            "strategy": engine.strategy != "fsdp2",
            "ulysses_sequence_parallel_size": engine.ulysses_sequence_parallel_size > 1,
            "pad_to_length": engine.pad_to_length,
            "entropy_checkpointing": engine.entropy_checkpointing,
            "use_fused_kernels": model.use_fused_kernels,
            "use_liger": model.use_liger,
            "enable_activation_offload": model.enable_activation_offload,
            "tiled_mlp": (model.tiled_mlp or {}).get("enabled", False),
            "qat": self._qat_enabled,
        }
        if named := [name for name, on in refused.items() if on]:
            given = getattr(engine, named[0], getattr(model, named[0], None))
            raise ValueError(
                f"VERL_ENGINE_VENDOR={VENDOR}: verl's option {named[0]} = {given!r} is not supported on a prefix tree; "
                "set strategy to fsdp2 and leave the others off (docs/integrations.md)"
            )

    def forward_backward_batch(self, data: Any, loss_function: Callable[..., Any], forward_only: bool = False) -> Any:
        """The mini-batch of this rank. With a token budget it is one tree, run in pieces of at most so many rows."""
        if not tu.get_non_tensor_data(data=data, key="use_dynamic_bsz", default=True):
            return super().forward_backward_batch(data, loss_function, forward_only)
        own = {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": len(data), "force_group_size": 1}
        before = {name: tu.get_non_tensor_data(data=data, key=name, default=None) for name in own}
        budget = int(data["max_token_len_per_gpu"])
        tu.assign_non_tensor(data, harts_token_budget=budget, **own)
        try:
            return super().forward_backward_batch(data, loss_function, forward_only)
        finally:
            data.pop("harts_token_budget", None)
            for name, value in before.items():
                data.pop(name)
                if value is not None:
                    tu.assign_non_tensor(data, **{name: value})

    def forward_step(self, micro_batch: Any, loss_function: Callable[..., Any] | None, forward_only: bool) -> Any:
        """Loss and outputs of one call; see verl."""
        micro_batch = micro_batch.to(get_device_id())
        dtype = self._autocast_dtype
        autocast: AbstractContextManager[Any] = (
            nullcontext() if dtype == torch.float32 else torch.autocast(device_type=get_device_name(), dtype=dtype)
        )
        with autocast:
            model_output = self._score(micro_batch)
            if loss_function is None:
                assert forward_only, "verl gives a loss function where it trains"
                loss, metrics = torch.ones((), device=get_device_name()), {}
            else:
                loss, metrics = loss_function(
                    model_output=model_output, data=micro_batch, dp_group=self.get_data_parallel_group()
                )
        return loss, {"model_output": detach_tree(model_output), "loss": loss.detach().item(), "metrics": metrics}

    def _score(self, micro_batch: Any) -> dict[str, Tensor]:
        """log_probs, and entropy if asked for, jagged like input_ids: at each token those of the next one.

        Scored are the tokens of the loss mask; others have 0.
        """
        for name in _NOT_ON_A_TREE:
            if tu.get_non_tensor_data(data=micro_batch, key=name, default=False):
                raise ValueError(f"VERL_ENGINE_VENDOR={VENDOR}: {name} is not supported on a prefix tree")
        if any(len(each) for each in micro_batch.get("multi_modal_inputs", [])):
            raise ValueError(
                f"VERL_ENGINE_VENDOR={VENDOR}: multi_modal_inputs: expected rows of text alone, got images"
            )
        input_ids = micro_batch["input_ids"]
        entropy = bool(tu.get_non_tensor_data(data=micro_batch, key="calculate_entropy", default=False))
        scores = logprobs_flat(
            self.module,
            input_ids.values(),
            cu_seqlens=input_ids.offsets(),
            scored_1N=_scored(micro_batch),
            temperature=micro_batch["temperature"],
            allow_empty=True,
            entropy=entropy,
            token_budget=tu.get_non_tensor_data(data=micro_batch, key="harts_token_budget", default=None),
        )

        def jagged(values_N: Tensor) -> Tensor:
            return torch.nested.nested_tensor_from_jagged(values_N.roll(-1), input_ids.offsets())

        found = {"log_probs": jagged(scores.logprobs)}
        return found if scores.entropy is None else {**found, "entropy": jagged(scores.entropy)}


def _scored(micro_batch: Any) -> Tensor | None:
    """The loss mask without first tokens, which nothing predicts; None where verl gives no mask."""
    mask = micro_batch.get("loss_mask", None)
    if mask is None:
        return None
    scored_N: Tensor = mask.values() != 0
    scored_N[micro_batch["input_ids"].offsets()[:-1]] = False
    return scored_N
