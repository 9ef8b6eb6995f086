"""Names of settings: those of tables with a dot, what others call them, their values as text and as a file."""

import dataclasses
import difflib
import json
from collections.abc import Iterator, Mapping
from typing import Any, Literal, get_args, get_origin

__all__ = ["SYNONYMS", "check_names", "describe", "fields_of", "nested", "parse", "to_toml"]

SYNONYMS: Mapping[str, str] = {
    "lr": "learning_rate",
    "max_steps": "steps",
    "num_steps": "steps",
    "epochs": "steps",
    "num_train_epochs": "steps",
    "batch_size": "groups_per_step",
    "train_batch_size": "groups_per_step",
    "per_device_train_batch_size": "token_budget",
    "micro_batch_size": "token_budget",
    "max_tokens": "token_budget",
    "model_name_or_path": "model",
    "dataset": "data",
    "train_files": "data",
    "bf16": "dtype",
    "precision": "dtype",
    "gradient_checkpointing": "recompute",
    "activation_checkpointing": "recompute",
    "scheduler": "schedule",
    "lr_scheduler": "schedule",
    "lr_scheduler_type": "schedule",
    "warmup": "warmup_steps",
    "grad_clip": "max_grad_norm",
    "gradient_clipping": "max_grad_norm",
    "adam_beta1": "beta1",
    "adam_beta2": "beta2",
    "adam_epsilon": "epsilon",
    "save_steps": "checkpoint_every",
    "save_freq": "checkpoint_every",
    "beta": "loss.kl_coef",
    "kl_beta": "loss.kl_coef",
    "loss_type": "loss.algorithm",
    "epsilon_high": "loss.clip_high",
}
"""What settings are called elsewhere -> here. Never read as the other: a value may mean something else there."""


def fields_of(kind: type, tables: Mapping[str, type]) -> dict[str, dataclasses.Field[Any]]:
    """All settings by name, those of a table as "loss.algorithm"."""
    found = {}
    for entry in dataclasses.fields(kind):
        if entry.name not in tables:
            found[entry.name] = entry
            continue
        for inner in dataclasses.fields(tables[entry.name]):
            found[f"{entry.name}.{inner.name}"] = inner
    return found


def describe(entry: dataclasses.Field[Any]) -> str:
    """The values that a setting takes, for people."""
    names = []
    for kind in _kinds(entry.type):
        if get_origin(kind) is Literal:
            names += list(map(str, get_args(kind)))
        else:
            names.append("none" if kind is type(None) else getattr(kind, "__name__", str(kind)))
    return "|".join(names)


def parse(text: str, entry: dataclasses.Field[Any]) -> Any:
    """The value that a text stands for; the text itself where none fits, for the config to refuse."""
    kinds = _kinds(entry.type)
    if type(None) in kinds and str not in kinds and text.lower() == "none":
        return None
    if bool in kinds and text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        if kind in kinds:
            try:
                return kind(text)
            except ValueError:
                continue
    return text


def _kinds(kind: Any) -> tuple[Any, ...]:
    if get_origin(kind) is Literal or not get_args(kind):
        return (kind,)
    return tuple(inner for each in get_args(kind) for inner in _kinds(each))


def nested(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Values of a file with changes put in, those of tables named with a dot."""
    merged = dict(values)
    for name, value in changes.items():
        table, _, inner = name.rpartition(".")
        if table:
            merged[table] = {**(merged.get(table) or {}), inner: value}
        else:
            merged[name] = value
    return merged


def check_names(values: Mapping[str, Any], kind: type, tables: Mapping[str, type], where: str, table: str = "") -> None:
    """Refuses names that are not known, with the one that was meant.

    Args:
        values: of the table.
        kind: of the config that it fills.
        tables: of the whole config, by name.
        where: for messages.
        table: name of this table, "" for the whole.

    Raises:
        ValueError: a name is not known.
    """
    known = [entry.name for entry in dataclasses.fields(kind)]
    for name in values:
        if name in known:
            continue
        inside = f" in [{table}]" if table else ""
        raise ValueError(f"{where}: unknown field {name}{inside}; {_meant(name, known, tables)}")


def _meant(name: str, known: list[str], tables: Mapping[str, type]) -> str:
    if name in SYNONYMS:
        return f"what others call {name} is close to {_place(SYNONYMS[name])} here"
    for table, kind in tables.items():
        if name in {entry.name for entry in dataclasses.fields(kind)}:
            return f"did you mean {_place(f'{table}.{name}')}?"
    close = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {close[0]}?" if close else f"known are {', '.join(known)}"


def _place(name: str) -> str:
    table, _, inner = name.rpartition(".")
    return f"{inner} in [{table}]" if table else inner


def to_toml(values: Mapping[str, Any]) -> str:
    """A file that has these settings: plain ones first, then tables. What is None is left out."""
    return "\n".join(_toml_lines(values)) + "\n"


def _toml_lines(values: Mapping[str, Any]) -> Iterator[str]:
    tables = {name: value for name, value in values.items() if isinstance(value, Mapping)}
    for name, value in values.items():
        if value is not None and name not in tables:
            yield f"{name} = {json.dumps(value, ensure_ascii=False)}"
    for name, table in tables.items():
        yield f"\n[{name}]"
        yield from _toml_lines(table)
