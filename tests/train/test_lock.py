"""One trainer in a folder: a second one is refused by the owner's name, dead owners are not waited for."""

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

import harts
from harts.losses import LossConfig
from harts.testing.workloads import workload
from harts.train import TrainConfig, Trainer
from harts.train.lock import RunLock, check_unlocked

OWNER = "import sys, time; from pathlib import Path; from harts.train.lock import RunLock; "


@pytest.fixture
def settings(tmp_path: Path) -> TrainConfig:
    harts.write(tmp_path / "data.jsonl", workload("star3", scale=0.003))
    return TrainConfig(data=str(tmp_path / "data.jsonl"), steps=1, loss=LossConfig(algorithm="supervised"))


def test_a_second_trainer_is_refused_until_the_first_is_done(settings: TrainConfig, tmp_path: Path) -> None:
    first = Trainer(settings, tmp_path / "run")
    before = (tmp_path / "run/config.json").stat()
    owner = f"in use by process {os.getpid()} on host {platform.node()}; end that run, or pass another folder"
    for resume in (False, True):
        with pytest.raises(ValueError, match=owner):
            Trainer(settings, tmp_path / "run", resume=resume)
    assert (tmp_path / "run/config.json").stat().st_ino == before.st_ino
    list(first.run())
    assert not (tmp_path / "run/run.lock").exists()
    Trainer(settings, tmp_path / "run", resume=True)
    assert not (tmp_path / "run/run.lock").exists()  # nobody holds that trainer any more


def test_a_trainer_that_another_has_overtaken_does_not_go_on(settings: TrainConfig, tmp_path: Path) -> None:
    late = Trainer(settings, tmp_path / "run")
    late.lock.release()  # type: ignore[union-attr]
    list(Trainer(settings, tmp_path / "run").run())
    with pytest.raises(ValueError, match="another trainer has gone on from step 0"):
        list(late.run())


def test_the_lock_of_a_killed_process_is_taken_over(tmp_path: Path) -> None:
    code = OWNER + "lock = RunLock(Path(sys.argv[1])); print('locked', flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "locked\n"
        for use in (RunLock, check_unlocked):
            with pytest.raises(ValueError, match=f"in use by process {owner.pid} on host"):
                use(tmp_path)
        owner.kill()
    assert json.loads((tmp_path / "run.lock").read_text())["pid"] == owner.pid
    check_unlocked(tmp_path)
    lock = RunLock(tmp_path)
    assert json.loads((tmp_path / "run.lock").read_text()) == {"host": platform.node(), "pid": os.getpid()}
    lock.release()
    assert list(tmp_path.iterdir()) == []


def test_a_process_that_has_the_number_of_a_dead_owner_is_not_it(tmp_path: Path) -> None:
    (tmp_path / "run.lock").write_text(json.dumps({"host": platform.node(), "pid": os.getppid()}))
    RunLock(tmp_path).release()


def test_an_owner_on_another_host_is_named_and_how_to_go_on(tmp_path: Path) -> None:
    (tmp_path / "run.lock").write_text(json.dumps({"host": "node-17", "pid": 42}))
    for use in (RunLock, check_unlocked):
        with pytest.raises(ValueError, match=r"process 42 on host node-17; if that process .*, delete .*run\.lock"):
            use(tmp_path)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff", b"[1]", b'{"host": 1}'])
def test_a_damaged_lock_of_nobody_is_taken_over(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "run.lock").write_bytes(content)
    RunLock(tmp_path).release()
