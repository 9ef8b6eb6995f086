"""Damaged checkpoints are refused by the file's name, failed writes say what is kept."""

import dataclasses
import json
import re
import resource
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

import harts
from harts.losses import LossConfig
from harts.models import tiny_model
from harts.testing.workloads import workload
from harts.train import TrainConfig, Trainer
from harts.train.checkpoint import checked_info, load_checkpoint


@pytest.fixture
def settings(tmp_path: Path) -> TrainConfig:
    harts.write(tmp_path / "data.jsonl", workload("star3", scale=0.003))
    return TrainConfig(
        data=str(tmp_path / "data.jsonl"),
        steps=2,
        checkpoint_every=1,
        loss=LossConfig(algorithm="supervised"),
        model="tiny-llama",
    )


def train(settings: TrainConfig, out: Path, *, resume: bool = False) -> Trainer:
    trainer = Trainer(settings, out, resume=resume, log=lambda line: None)
    list(trainer.run())
    return trainer


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-7] ^= 16
    path.write_bytes(content)


def drop(path: Path) -> None:
    tensors = load_file(path)
    tensors.pop(next(iter(tensors)))
    save_file(tensors, path)


def older(path: Path) -> None:
    shutil.copy(path.parent.parent / "checkpoint-000001" / path.name, path)


def edit(path: Path) -> None:
    path.write_text(path.read_text().replace('"seed": 0', '"seed": 7'))


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("model.safetensors", flip, "expected the bytes that were written, got others"),
        ("model.safetensors", lambda path: path.write_bytes(path.read_bytes()[:100]), "bytes, got 100"),
        ("optimizer.safetensors", drop, "expected [0-9,]+ bytes, got"),
        ("optimizer.safetensors", Path.unlink, "expected a file that can be read"),
        ("config.json", flip, "expected the bytes that were written"),
        ("trainer.json", older, "expected that of checkpoint-000002, got one of step 1"),
        ("trainer.json", edit, "its SHA-256 is not that of its content"),
        ("trainer.json", lambda path: path.write_bytes(b"\xff\xfe{"), "got something else"),
        ("trainer.json", lambda path: path.write_text("[]"), "got something else"),
        ("trainer.json", lambda path: path.write_text('{"step": null}'), "no field 'sha256'"),
        ("trainer.json", Path.unlink, "No such file"),
    ],
)
def test_a_damaged_file_is_named_and_an_older_checkpoint_offered(
    settings: TrainConfig, tmp_path: Path, name: str, damage: Callable[[Path], None], message: str
) -> None:
    out = tmp_path / "run"
    train(settings, out)
    newest = out / "checkpoint-000002"
    model = (newest / "model.safetensors").read_bytes()
    damage(newest / name)
    with pytest.raises(ValueError, match=rf"checkpoint-000002/{name}: .*{message}") as caught:
        Trainer(settings, out, resume=True)
    assert "checkpoint-000001 is whole, and --resume goes on from it when checkpoint-000002 is" in str(caught.value)
    newest.rename(tmp_path / "damaged")
    train(settings, out, resume=True)
    assert (newest / "model.safetensors").read_bytes() == model


def test_no_damaged_checkpoint_is_offered(settings: TrainConfig, tmp_path: Path) -> None:
    train(settings, tmp_path / "run")
    for step in (1, 2):
        flip(tmp_path / f"run/checkpoint-00000{step}/model.safetensors")
    with pytest.raises(ValueError, match=r"no older one in .* is whole, so start again in another folder"):
        Trainer(settings, tmp_path / "run", resume=True)


def test_moments_of_another_model_are_refused(settings: TrainConfig, tmp_path: Path) -> None:
    trainer = train(settings, tmp_path / "run")
    path = tmp_path / "run/checkpoint-000002"
    file = path / "optimizer.safetensors"
    tensors = load_file(file)
    moment = tensors["lm_head.weight|exp_avg"]
    for name in ("nobody.weight|exp_avg", "unnamed"):
        save_file({**tensors, name: moment.clone()}, file)
        with pytest.raises(ValueError, match=f"optimizer.safetensors: expected moments .* got {re.escape(repr(name))}"):
            load_checkpoint(path, trainer.model, trainer.optimizer)
    save_file({**tensors, "lm_head.weight|exp_avg": moment[1:].clone()}, file)
    with pytest.raises(ValueError, match="got 'lm_head"):
        load_checkpoint(path, trainer.model, trainer.optimizer)


def test_damaged_metrics_are_refused_by_line(settings: TrainConfig, tmp_path: Path) -> None:
    train(settings, tmp_path / "run")
    file = tmp_path / "run/metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    for content, message in (
        (lines[0] + "{\n", r"metrics.jsonl:2: expected a JSON record with a step, got b'\{'"),
        ("[1]\n" + lines[1], "metrics.jsonl:1: expected a JSON record"),
        (lines[0], "metrics.jsonl: expected a record of each step up to 2, in order, got 1 last of 1"),
        (lines[1] + lines[1], "in order, got 2 last of 2"),
    ):
        file.write_text(content)
        with pytest.raises(ValueError, match=message):
            Trainer(settings, tmp_path / "run", resume=True)
        assert file.read_text() == content
    file.write_bytes(b"\xff\n")
    with pytest.raises(ValueError, match=r"metrics.jsonl:1: expected a JSON record"):
        Trainer(settings, tmp_path / "run", resume=True)
    file.unlink()
    with pytest.raises(ValueError, match=r"metrics.jsonl: expected the records of steps 1 to 2, got no such file"):
        Trainer(settings, tmp_path / "run", resume=True)
    file.touch()
    assert Trainer(settings, tmp_path / "run", resume=True).step == 2


def test_a_limit_on_file_sizes_leaves_the_last_checkpoint_whole(settings: TrainConfig, tmp_path: Path) -> None:
    out = tmp_path / "run"
    steps = Trainer(settings, out).run()
    next(steps)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(OSError, match=r"checkpoint-000002: cannot write it \(.*\); kept is .*checkpoint-000001"):
            next(steps)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert checked_info(out / "checkpoint-000001").step == 1
    assert sorted(path.name for path in out.iterdir()) == ["checkpoint-000001", "config.json", "metrics.jsonl"]
    train(settings, out, resume=True)
    assert [json.loads(line)["step"] for line in (out / "metrics.jsonl").read_text().splitlines()] == [1, 2]


def test_a_folder_that_is_gone_is_named_and_not_made_again(settings: TrainConfig, tmp_path: Path) -> None:
    out = tmp_path / "run"
    trainer = Trainer(settings, out)
    steps = trainer.run()
    next(steps)
    shutil.rmtree(out)
    with pytest.raises(OSError, match=r"metrics.jsonl: cannot write it \(No such file.*no checkpoint was there"):
        next(steps)
    with pytest.raises(OSError, match=r"checkpoint-000002: cannot write it \(No such file"):
        trainer.save()
    assert not out.exists()


def test_what_a_killed_process_left_is_removed_and_a_step_can_be_saved_twice(
    settings: TrainConfig, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    (out / ".checkpoint-000001.partial").mkdir(parents=True)
    trainer = train(settings, out)
    before = (out / "checkpoint-000002/trainer.json").stat()
    trainer.save()
    assert (out / "checkpoint-000002/trainer.json").stat().st_ino != before.st_ino
    names = ["checkpoint-000001", "checkpoint-000002", "config.json", "metrics.jsonl"]
    assert sorted(path.name for path in out.iterdir()) == names


def test_a_file_in_place_of_the_folder_is_refused_first(settings: TrainConfig, tmp_path: Path) -> None:
    said: list[str] = []
    with pytest.raises(ValueError, match=r"data.jsonl: expected a folder, got a file"):
        Trainer(settings, settings.data, log=said.append)
    assert said == []


def test_a_checkpoint_brings_tokenizer_and_chat_template(settings: TrainConfig, tmp_path: Path) -> None:
    source = tmp_path / "model"
    tiny_model("tiny-llama", vocab_size=100_000).save_pretrained(source)  # type: ignore[operator]
    names = ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "merges.txt"]
    for name in [*names, "README.md", "optimizer.bin"]:
        (source / name).write_text(name)
    train(dataclasses.replace(settings, model=str(source), steps=1, groups_per_step=1), tmp_path / "run")
    path = tmp_path / "run/checkpoint-000001"
    for name in names:
        assert (path / name).read_text() == name
    assert not (path / "README.md").exists()
    assert not (path / "optimizer.bin").exists()
    flip(path / "tokenizer.json")
    with pytest.raises(ValueError, match=r"tokenizer.json: expected the bytes that were written"):
        checked_info(path)
