"""Checkpoints: model and optimiser as safetensors, written beside and renamed: a crash leaves the last one whole.

A checkpoint is a folder `checkpoint-000050` that transformers' `from_pretrained` reads too:

    config.json, model.safetensors   the model
    optimizer.safetensors            one tensor per parameter and moment, "layers.0.weight|exp_avg"
    trainer.json                     step, settings, data hash
"""

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

__all__ = ["CheckpointInfo", "latest_checkpoint", "load_checkpoint", "read_info", "save_checkpoint"]

_PREFIX = "checkpoint-"
_SEPARATOR = "|"


@dataclass(frozen=True)
class CheckpointInfo:
    """What a checkpoint says of itself.

    Attributes:
        step: optimiser steps done.
        config: settings of the run, `TrainConfig.to_dict()`.
        data_hash: of the trajectories.
    """

    step: int
    config: dict[str, Any]
    data_hash: str


def save_checkpoint(
    out: Path, info: CheckpointInfo, model: nn.Module, optimizer: torch.optim.Optimizer, *, keep: int = 2
) -> Path:
    """Writes `out/checkpoint-<step>` and removes all but the newest `keep`. Returns its path."""
    final = out / f"{_PREFIX}{info.step:06d}"
    partial = out / f".{final.name}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    # Tensors as they are in memory: mixtures of experts would be split into files of another layout otherwise.
    model.save_pretrained(partial, save_original_format=False)  # type: ignore[operator]
    save_file(_optimizer_tensors(model, optimizer), partial / "optimizer.safetensors")
    content = {"step": info.step, "config": info.config, "data_hash": info.data_hash}
    (partial / "trainer.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    for path in partial.iterdir():
        _flush(path)
    if final.exists():
        shutil.rmtree(final)
    os.replace(partial, final)
    for old in _checkpoints(out)[:-keep]:
        shutil.rmtree(old)
    return final


def latest_checkpoint(out: Path) -> Path | None:
    """The checkpoint of the most steps below `out`, None where there is none."""
    found = _checkpoints(out)
    return found[-1] if found else None


def read_info(path: Path) -> CheckpointInfo:
    """What the checkpoint says of itself.

    Raises:
        ValueError: not a checkpoint, or a damaged one.
    """
    try:
        content = json.loads((path / "trainer.json").read_text(encoding="utf-8"))
        return CheckpointInfo(step=content["step"], config=content["config"], data_hash=content["data_hash"])
    except (OSError, KeyError, json.JSONDecodeError) as error:
        raise ValueError(f"{path}: expected a checkpoint of harts train (trainer.json unreadable: {error})") from error


def load_checkpoint(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> CheckpointInfo:
    """Puts parameters and optimiser state back, bit for bit.

    Raises:
        ValueError: the checkpoint is of another model (the first parameter that differs is named) or damaged.
    """
    info = read_info(path)
    state = model.state_dict()
    try:
        saved = _load_model(path)
        moments = load_file(path / "optimizer.safetensors")
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path}: damaged or incomplete ({error}); resume from another checkpoint") from error
    tied = {
        name
        for name in state
        if name not in saved and any(state[name].data_ptr() == state[k].data_ptr() for k in saved if k in state)
    }
    for name in sorted((saved.keys() ^ state.keys()) - tied):
        side = "the checkpoint" if name in saved else "the model"
        raise ValueError(f"{path}: a checkpoint of another model: parameter {name} is only in {side}")
    for name, tensor in saved.items():
        if tensor.shape != state[name].shape or tensor.dtype != state[name].dtype:
            raise ValueError(
                f"{path}: a checkpoint of another model: parameter {name} is {tensor.dtype} {list(tensor.shape)} there "
                f"and {state[name].dtype} {list(state[name].shape)} here"
            )
    with torch.no_grad():
        for name, tensor in saved.items():
            state[name].copy_(tensor)
    _load_optimizer(moments, model, optimizer)
    return info


def _checkpoints(out: Path) -> list[Path]:
    """Folders that `save_checkpoint` wrote, fewest steps first."""
    found = [path for path in out.glob(f"{_PREFIX}*") if path.is_dir() and path.name.removeprefix(_PREFIX).isdigit()]
    return sorted(found, key=lambda path: int(path.name.removeprefix(_PREFIX)))


def _flush(path: Path) -> None:
    with path.open("rb+") as file:
        os.fsync(file.fileno())


def _load_model(path: Path) -> dict[str, Tensor]:
    files = sorted(path.glob("model*.safetensors"))
    if not files:
        raise ValueError(f"{path}: expected model.safetensors, found none; is it a checkpoint of harts train?")
    tensors: dict[str, Tensor] = {}
    for file in files:
        tensors.update(load_file(file))
    return tensors


def _optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    tensors = {}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            tensors[f"{name}{_SEPARATOR}{key}"] = value.contiguous()
    return tensors


def _load_optimizer(moments: dict[str, Tensor], model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    parameters = dict(model.named_parameters())
    optimizer.state.clear()
    for full_name, value in moments.items():
        name, key = full_name.split(_SEPARATOR)
        parameter = parameters[name]
        optimizer.state[parameter][key] = value if key == "step" else value.to(parameter.device)
