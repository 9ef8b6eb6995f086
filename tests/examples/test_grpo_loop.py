"""The GRPO loop before and after: few lines change, and the trained parameters do not."""

import difflib
import runpy
from pathlib import Path

import torch

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_at_most_five_lines_change() -> None:
    before, after = (
        (EXAMPLES / name).read_text(encoding="utf-8").splitlines()[1:]  # without the docstring
        for name in ("grpo_loop_before.py", "grpo_loop.py")
    )
    changed = [line for line in difflib.ndiff(before, after) if line.startswith("+ ")]
    assert 0 < len(changed) <= 5, changed


def test_before_and_after_train_the_same_parameters() -> None:
    before = runpy.run_path(str(EXAMPLES / "grpo_loop_before.py"))["train"]
    after = runpy.run_path(str(EXAMPLES / "grpo_loop.py"))["train"]
    start = before(steps=0).state_dict()
    expected, found = before(steps=2).state_dict(), after(steps=2).state_dict()
    moved = max(float((expected[name] - start[name]).abs().max()) for name in start)
    assert moved > 1e-3
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-3 * moved, msg=name)
