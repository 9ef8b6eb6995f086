"""Whether an output folder is free, and whether a run may go on from the checkpoint in it."""

import json
from pathlib import Path

from harts.train.checkpoint import CheckpointInfo, latest_checkpoint
from harts.train.config import TrainConfig

__all__ = ["check_settings", "find_checkpoint"]

# Settings that may differ between a checkpoint and the run that goes on from it.
_MAY_CHANGE = {
    "data",
    "model",
    "tokenizer",
    "steps",
    "checkpoint_every",
    "device",
    "token_budget",
    "recompute",
    "keep_attention",
    "fused",
    "deterministic",
    "share",
}


def find_checkpoint(out: Path, *, resume: bool) -> Path | None:
    """The checkpoint to go on from, None to start from the first step.

    Raises:
        ValueError: a folder in use without `resume`, or nothing to resume with it.
    """
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out}: expected a folder, got a file; pass another path")
    checkpoint = latest_checkpoint(out) if out.exists() else None
    metrics = out / "metrics.jsonl"
    if resume and checkpoint is None and not metrics.exists():
        raise ValueError(f"{out}: expected a run to resume, found none; leave --resume out")
    if not resume and (checkpoint is not None or (metrics.exists() and metrics.stat().st_size)):
        raise ValueError(f"{out}: holds a run already; pass --resume to go on with it, or another folder")
    return checkpoint


def check_settings(
    checkpoint: Path, info: CheckpointInfo, config: TrainConfig, *, data_hash: str, needs_start: bool
) -> None:
    """Refuses to go on with other data or settings.

    Args:
        checkpoint: for messages.
        info: what it says of itself.
        config: of the run that goes on.
        data_hash: of its trajectories.
        needs_start: whether the loss refers to the weights that training started from.

    Raises:
        ValueError: they differ; the field is named.
    """
    if info.data_hash != data_hash:
        raise ValueError(f"{checkpoint}: was written while training on other data; pass the same file and options")
    ours = json.loads(json.dumps(config.to_dict()))
    for name, value in info.config.items():
        if name not in _MAY_CHANGE and ours.get(name) != value:
            raise ValueError(
                f"{checkpoint}: field {name} was {value!r} there and is {ours.get(name)!r} here; a resumed run "
                f"keeps its settings, except {', '.join(sorted(_MAY_CHANGE))}"
            )
    if needs_start and info.config["model"] != config.model:
        raise ValueError(
            f"{checkpoint}: field model was {info.config['model']!r} there and is {config.model!r} here; the "
            "KL term refers to the weights that training started from, so the model must stay where it was"
        )
