"""Checkpoints: model and optimiser as safetensors, written beside and renamed: a crash leaves the last one whole.

A checkpoint is a folder `checkpoint-000050` that transformers' `from_pretrained` reads too:

    config.json, model.safetensors   the model
    optimizer.safetensors            one tensor per parameter and moment, "layers.0.weight|exp_avg"
    trainer.json                     step, settings, data hash; sizes and SHA-256 of the other files and of itself
"""

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from harts.train.sharding import gather, like, put

__all__ = [
    "CheckpointInfo",
    "checked_info",
    "latest_checkpoint",
    "load_checkpoint",
    "read_info",
    "remove_partial",
    "save_checkpoint",
    "writing",
]

_PREFIX = "checkpoint-"
_SEPARATOR = "|"
_INFO = "trainer.json"
_TOKENIZER = (  # what a tokenizer, its chat template and generation of transformers lie in
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "*.tiktoken",
    "chat_template*", "generation_config.json",
)  # fmt: skip


@dataclass(frozen=True)
class CheckpointInfo:
    """What a checkpoint says of itself.

    Attributes:
        step: optimiser steps done.
        config: settings of the run, `TrainConfig.to_dict()`.
        data_hash: of the trajectories.
        files: size and SHA-256 of each file of the checkpoint but this one; filled when it is written.
    """

    step: int
    config: dict[str, Any]
    data_hash: str
    files: Mapping[str, tuple[int, str]] = field(default_factory=dict)


@contextlib.contextmanager
def writing(path: Path, out: Path) -> Iterator[None]:
    """Errors while `path` is written name it, and say which checkpoint of the folder `out` is kept.

    Raises:
        OSError: the disk is full, a limit on file sizes was met, the folder is gone, ...
    """
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        newest = latest_checkpoint(out)
        kept = "no checkpoint was there before" if newest is None else f"kept is {newest}: go on from it with --resume"
        raise OSError(f"{path}: cannot write it ({reason}); {kept}") from error


def save_checkpoint(
    out: Path,
    info: CheckpointInfo,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    keep: int = 2,
    writes: bool = True,
    source: Path | None = None,
) -> Path:
    """Writes `out/checkpoint-<step>` and removes all but the newest `keep`. Returns its path.

    Where the model is sharded every process calls this, to gather it, and one `writes`. Tokenizer and chat template are
    copied from the folder `source` that the model was read from.

    Raises:
        OSError: it cannot be written; those that were there before are as they were.
    """
    tensors, moments = _model_tensors(model, writes), _optimizer_tensors(model, optimizer, writes)
    final = out / f"{_PREFIX}{info.step:06d}"
    if not writes:
        return final
    partial = out / f".{final.name}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    with writing(final, out):
        try:
            partial.mkdir()
            _write(partial, info, model, tensors, moments, source)
            _put_in_place(partial, final)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        for old in _checkpoints(out)[:-keep]:
            shutil.rmtree(old)
    return final


def _write(
    folder: Path,
    info: CheckpointInfo,
    model: nn.Module,
    tensors: dict[str, Tensor],
    moments: dict[str, Tensor],
    source: Path | None,
) -> None:
    # Tensors as they are in memory: mixtures of experts would be split into files of another layout otherwise.
    model.save_pretrained(folder, state_dict=tensors, save_original_format=False)  # type: ignore[operator]
    save_file(moments, folder / "optimizer.safetensors")
    for path in [] if source is None else sorted(source.iterdir()):
        if any(path.match(pattern) for pattern in _TOKENIZER) and path.is_file() and not (folder / path.name).exists():
            shutil.copyfile(path, folder / path.name)
    files = {path.name: [path.stat().st_size, _sha256(path)] for path in sorted(folder.iterdir())}
    content = {"step": info.step, "config": info.config, "data_hash": info.data_hash, "files": files}
    whole = {**content, "sha256": _digest(content)}
    (folder / _INFO).write_text(json.dumps(whole, indent=2) + "\n", encoding="utf-8")
    for path in folder.iterdir():
        _flush(path)


def _put_in_place(partial: Path, final: Path) -> None:
    """Gives the folder its name; one of the same step, saved before, is whole until then."""
    aside = partial.with_suffix(".old")
    if final.exists():
        os.replace(final, aside)
    os.replace(partial, final)
    shutil.rmtree(aside, ignore_errors=True)
    folder = os.open(final.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def remove_partial(out: Path) -> None:
    """Removes what a process that was killed while it wrote a checkpoint left behind."""
    for path in out.glob(f".{_PREFIX}*.partial"):
        shutil.rmtree(path, ignore_errors=True)


def latest_checkpoint(out: Path) -> Path | None:
    """The checkpoint of the most steps below `out`, None where there is none."""
    found = _checkpoints(out)
    return found[-1] if found else None


def read_info(path: Path) -> CheckpointInfo:
    """What the checkpoint says of itself.

    Raises:
        ValueError: not a checkpoint, one of another step than its name says, or a damaged one.
    """
    file = path / _INFO
    try:
        content = json.loads(file.read_bytes())
        found = content.pop("sha256")
        if _digest(content) != found:
            raise ValueError("its SHA-256 is not that of its content")
        files = {str(name): (int(size), str(digest)) for name, (size, digest) in content["files"].items()}
        info = CheckpointInfo(int(content["step"]), dict(content["config"]), str(content["data_hash"]), files)
    except (OSError, AttributeError, KeyError, TypeError, ValueError) as error:
        reason = f"no field {error}" if isinstance(error, KeyError) else error
        raise ValueError(f"{file}: expected what harts train writes there, got something else ({reason})") from error
    if path.name != f"{_PREFIX}{info.step:06d}":
        raise ValueError(f"{file}: expected that of {path.name}, got one of step {info.step}")
    return info


def checked_info(path: Path) -> CheckpointInfo:
    """What the checkpoint says of itself, after all its files were compared with their checksums.

    Raises:
        ValueError: a file is missing or not as it was written. It is named, and so is the newest older checkpoint that
            is whole.
    """
    try:
        info = read_info(path)
        for name, (size, digest) in info.files.items():
            _check_file(path / name, size, digest)
    except ValueError as error:
        raise ValueError(f"{error}; the checkpoint is damaged: {_way_out(path)}") from error
    return info


def _check_file(file: Path, size: int, digest: str) -> None:
    try:
        if file.stat().st_size != size:
            raise ValueError(f"{file}: expected {size:,} bytes, got {file.stat().st_size:,}")
        if _sha256(file) != digest:
            raise ValueError(f"{file}: expected the bytes that were written, got others (SHA-256 differs)")
    except OSError as error:
        raise ValueError(f"{file}: expected a file that can be read ({error.strerror})") from error


def _way_out(damaged: Path) -> str:
    older = [path for path in _checkpoints(damaged.parent) if path.name < damaged.name]
    for path in reversed(older):
        try:
            info = read_info(path)
            for name, (size, digest) in info.files.items():
                _check_file(path / name, size, digest)
        except ValueError:
            continue
        return f"{path.name} is whole, and --resume goes on from it when {damaged.name} is renamed or deleted"
    return f"no older one in {damaged.parent} is whole, so start again in another folder"


def load_checkpoint(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Puts parameters and optimiser state back, bit for bit.

    Raises:
        ValueError: the checkpoint is of another model (the first parameter that differs is named) or damaged.
    """
    state = model.state_dict()
    saved = _load_model(path)
    moments = _load_tensors(path / "optimizer.safetensors")
    same = {name: id(parameter) for name, parameter in model.named_parameters(remove_duplicate=False)}
    there = {same[name] for name in saved if name in same}
    tied = {name for name in state if name not in saved and same.get(name) in there}
    for name in sorted((saved.keys() ^ state.keys()) - tied):
        side = "the checkpoint" if name in saved else "the model"
        raise ValueError(f"{path}: a checkpoint of another model: parameter {name} is only in {side}")
    for name, tensor in saved.items():
        if tensor.shape != state[name].shape or tensor.dtype != state[name].dtype:
            raise ValueError(
                f"{path}: a checkpoint of another model: parameter {name} is {tensor.dtype} {list(tensor.shape)} there "
                f"and {state[name].dtype} {list(state[name].shape)} here"
            )
    for name, tensor in saved.items():
        put(state[name], tensor)
    _load_optimizer(path / "optimizer.safetensors", moments, model, optimizer)


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
        tensors.update(_load_tensors(file))
    return tensors


def _optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer, keep: bool) -> dict[str, Tensor]:
    tensors = {}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            tensors[f"{name}{_SEPARATOR}{key}"] = gather(value, keep=keep).contiguous()
    return tensors if keep else {}


def _model_tensors(model: nn.Module, keep: bool) -> dict[str, Tensor]:
    """The state dict with all of each tensor, empty unless kept; tied ones are one tensor still."""
    same = {name: id(parameter) for name, parameter in model.named_parameters(remove_duplicate=False)}
    gathered: dict[int, Tensor] = {}
    tensors = {}
    for name, value in model.state_dict().items():
        key = same.get(name, id(value))
        if key not in gathered:
            gathered[key] = gather(value, keep=keep)
        tensors[name] = gathered[key]
    return tensors if keep else {}


def _load_optimizer(file: Path, moments: dict[str, Tensor], model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    parameters = dict(model.named_parameters())
    for full_name, value in moments.items():
        name, _, key = full_name.rpartition(_SEPARATOR)
        expected = parameters[name].shape if name in parameters else None
        if expected is None or (key != "step" and value.shape != expected):
            raise ValueError(
                f"{file}: expected moments of this model's parameters, got {full_name!r} {list(value.shape)}; it was "
                "written for another model"
            )
    optimizer.state.clear()
    for full_name, value in moments.items():
        name, _, key = full_name.rpartition(_SEPARATOR)
        parameter = parameters[name]
        optimizer.state[parameter][key] = value if key == "step" else like(parameter, value)


def _load_tensors(file: Path) -> dict[str, Tensor]:
    try:
        return load_file(file)  # type: ignore[no-any-return]
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{file}: damaged or missing ({error}); resume from another checkpoint") from error


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
