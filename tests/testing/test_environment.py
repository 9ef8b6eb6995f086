"""What a measurement says of its code is about HARTS, wherever it is called from."""

import subprocess
from pathlib import Path

import pytest

import harts.testing.environment
from harts.testing.environment import environment


def _repository(folder: Path) -> str:
    """Makes one with a commit; returns its short hash."""
    for words in (
        ["init", "-q"],
        ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-q", "--allow-empty", "-m", "first"],
    ):
        subprocess.run(["git", *words], cwd=folder, check=True)
    done = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], cwd=folder, capture_output=True, check=True)
    return done.stdout.decode().strip()


def test_the_commit_is_that_of_the_code_and_not_of_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HARTS_COMMIT", raising=False)
    here = environment()["commit"]
    theirs = _repository(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert environment()["commit"] == here != theirs
    assert environment("1b02d43")["commit"] == "1b02d43"
    inside = tmp_path / "venv" / "environment.py"
    inside.parent.mkdir()
    inside.touch()
    monkeypatch.setattr(harts.testing.environment, "__file__", str(inside))
    assert environment()["commit"] == "unknown"
    monkeypatch.setenv("HARTS_COMMIT", "of-a-copy")
    assert environment()["commit"] == "of-a-copy"


def test_settings_of_the_allocator_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    assert "allocator" not in environment()
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    assert environment()["allocator"] == "expandable_segments:True"
