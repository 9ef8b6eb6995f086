"""Model, cost model and optimiser of a run, as its config asks for them."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from harts.cost import CostModel, model_identity
from harts.formats import check_vocabulary
from harts.models import attach, recompute_activations, tiny_model
from harts.models.attach import find_backbone
from harts.models.fuse import can_fuse, fuse
from harts.models.saved import load_saved
from harts.train.config import TrainConfig
from harts.train.sharding import parameter_dtype, split_by_kind
from harts.trajectory import Trajectory

__all__ = ["make_cost_model", "make_model", "make_optimizer"]


def make_model(
    config: TrainConfig, trajectories: Sequence[Trajectory], *, vocab_size: int | None
) -> tuple[nn.Module, bool]:
    """The attached model on its device, all of it, in the dtype of its parameters, and whether it is fused.

    Args:
        config: of the run.
        trajectories: whose token ids must be in the model's vocabulary.
        vocab_size: of a preset; None: the model is a directory.

    Raises:
        ValueError: no such model, a token id outside its vocabulary, or one that cannot be fused and is to be.
    """
    compute = getattr(torch, config.dtype)
    dtype = parameter_dtype(compute)
    if vocab_size is not None:
        model = tiny_model(config.model, dtype=dtype, seed=config.seed, vocab_size=vocab_size)
    else:
        model = load_saved(config.model, dtype=dtype)
        check_vocabulary(trajectories, model.get_input_embeddings().weight.shape[0])  # type: ignore[operator]
    attach(model.to(config.device)).train()
    fused = can_fuse(model, dtype=compute) if config.fused is None else config.fused
    if fused:
        if not can_fuse(model, dtype=compute):
            raise ValueError(
                f"config, field fused: expected false, or nothing, for {config.model!r} in {config.dtype} on "
                f"{config.device}; Qwen3.5, Qwen3-Next and Qwen3-MoE run fused, in bfloat16 on a CUDA GPU"
            )
        fuse(model)
    if config.recompute:
        recompute_activations(model, keep_attention=config.keep_attention)
    return model, fused


def make_cost_model(config: TrainConfig, model: nn.Module) -> CostModel:
    """What plans balance: the calibrated cost model that the config names, else FLOPs."""
    shape = find_backbone(model).config
    if config.cost_model is not None:
        return CostModel.load(config.cost_model, model=model_identity(shape))
    return CostModel.from_config(shape, recompute=config.recompute, keep_attention=config.keep_attention)


def make_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.Optimizer:
    """AdamW over what the model trains; vectors (norms, biases) do not decay."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups: list[dict[str, Any]] = []
    for ndim, decay in ((True, config.weight_decay), (False, 0.0)):
        alike = split_by_kind(p for p in trained if (p.ndim >= 2) is ndim)
        groups += [{"params": params, "weight_decay": decay} for params in alike]
    betas = (config.beta1, config.beta2)
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=betas, eps=config.epsilon)
