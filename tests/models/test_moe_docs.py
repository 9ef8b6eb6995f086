"""The recipe of docs/moe.md runs as it stands, and does what the page says."""

import re
from pathlib import Path
from typing import Any

import torch

PAGE = Path(__file__).parents[2] / "docs" / "moe.md"


def test_the_recipe_runs_and_its_gradients_are_those_of_one_microbatch() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    split: dict[str, Any] = {}
    exec(code, split)
    whole: dict[str, Any] = {}
    exec(code.replace("(trajectories[:2], trajectories[2:])", "(trajectories,)"), whole)
    assert torch.equal(split["step"].load_YE, whole["step"].load_YE)
    assert split["step"].load_YE.sum(1).tolist() == [3 * 15] * 4
    assert split["bias"].abs().max() > 0
    for one, other in zip(split["model"].parameters(), whole["model"].parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, atol=1e-6, rtol=1e-4)
