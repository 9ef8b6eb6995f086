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


def gradients_of(code: str, names: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
    """The sum of all losses of the README's loop, and the gradients before its optimiser's step."""
    model, losses, found = names["model"], [], {}

    def your_loss(logprobs: Tensor, trajectory: harts.Trajectory) -> Tensor:
        weights = torch.tensor(trajectory.advantages * trajectory.loss_mask)
        losses.append(-(logprobs * weights).mean())
        return losses[-1]

    class Optimizer:
        def step(self) -> None:
            found.update({name: each.grad.clone() for name, each in model.named_parameters()})

    exec(code, {**names, "torch": torch, "your_loss": your_loss, "optimizer": Optimizer()})
    return torch.stack(losses).detach(), found


@pytest.mark.parametrize("token_budget", ["16_384", "20"])
def test_before_and_after_have_the_same_losses_and_gradients(
    token_budget: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, after = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    harts.write(tmp_path / "rollouts.jsonl.gz", random_trajectories(np.random.default_rng(0), max_length=60))
    monkeypatch.chdir(tmp_path)
    trajectories = harts.read("rollouts.jsonl.gz")
    model = tiny_model("tiny-qwen3.5", dtype=torch.float64)
    expected_losses, expected = gradients_of(before, {"model": model, "trajectories": trajectories})
    model.zero_grad()
    assert "16_384" in after
    losses, found = gradients_of(after.replace("16_384", token_budget), {"model": model})
    assert len(losses) == len(trajectories)
    torch.testing.assert_close(losses, expected_losses, rtol=1e-5, atol=1e-6)
    for name, grad in expected.items():
        assert (found[name] - grad).abs().max() <= 1e-4 * grad.abs().max() + 1e-7, name


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
