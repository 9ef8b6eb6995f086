"""The README's code runs as it stands there."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import harts
from harts.cli import COMMANDS
from harts.models import tiny_model
from harts.testing.trees import random_trajectories

README = Path(__file__).parents[1] / "README.md"


def test_the_after_code_runs_and_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, after = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert "for trajectory in batch" in before
    harts.write(tmp_path / "rollouts.jsonl.gz", random_trajectories(np.random.default_rng(0), max_length=60))
    monkeypatch.chdir(tmp_path)
    model = tiny_model("tiny-qwen3.5")
    losses: list[Tensor] = []

    def your_loss(logprobs: Tensor, advantages: Any) -> Tensor:
        losses.append(-(logprobs * torch.tensor(advantages, dtype=logprobs.dtype)).mean())
        return losses[-1]

    exec(after, {"model": model, "your_loss": your_loss})
    torch.stack(losses).sum().backward()
    assert len(losses) == 8
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_every_command_is_described() -> None:
    text = README.read_text(encoding="utf-8")
    named = set(re.findall(r"^\| `harts (\w+)", text, re.MULTILINE))
    assert named == set(COMMANDS)


def test_links_lead_somewhere() -> None:
    root = README.parent
    for page in [README, *root.glob("docs/*.md"), *root.glob("examples/data/*.md")]:
        for link in re.findall(r"\]\(([^)#\s]+)\)", page.read_text(encoding="utf-8")):
            if "://" not in link:
                found = list(page.parent.glob(link)) if "*" in link else [page.parent / link]
                assert found, f"{page.name}: {link}"
                assert all(path.exists() for path in found), f"{page.name}: {link}"
