"""The learning example: the arms play and train the same in fp64, runs resume exactly, faults are caught."""

import importlib
import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from harts.testing.fp64 import all_fp64

FOLDER = Path(__file__).parents[2] / "examples" / "agent_rl"
NAMES = ("lake", "rollouts", "arms", "train", "compare")


@pytest.fixture(scope="module")
def example() -> Iterator[SimpleNamespace]:
    """The example's modules, which import each other as scripts do."""
    sys.path.insert(0, str(FOLDER))
    kept = {name: sys.modules.pop(name) for name in NAMES if name in sys.modules}
    try:
        modules: dict[str, ModuleType] = {name: importlib.import_module(name) for name in NAMES}
        yield SimpleNamespace(**modules)
    finally:
        sys.path.remove(str(FOLDER))
        for name in NAMES:
            sys.modules.pop(name, None)
        sys.modules.update(kept)


class Corridor:
    """A game of the same shape as the lake: go up three times; the board tells its seed and the place."""

    def reset(self, seed: int) -> list[int]:
        self.seed, self.place, self.turn = seed, 0, 0
        return self._observe()

    def step(self, action: int) -> tuple[list[int], bool, float]:
        self.turn += 1
        self.place += 1 if action == 0 else 0
        over = self.place == 3 or self.turn == 10
        return self._observe(), over, self.place / 3 if over else 0.0

    def _observe(self) -> list[int]:
        return [4, *((self.seed >> bit) % 2 + 6 for bit in range(13)), *(6 + (self.place > each) for each in range(3))]


def config_of(example: SimpleNamespace, arm: str, **changes: object) -> object:
    return example.train.Config(**{"arm": arm, "fp64": True, "boards": 2, "starts": 2, "branches": 2, **changes})


def test_the_arms_play_the_same_games_and_a_fault_does_not(example: SimpleNamespace, tmp_path: Path) -> None:
    for arm in ("rows", "tree", "wrong_parent"):
        example.train.Run(config_of(example, arm), tmp_path / arm, Corridor).train(3)
    found = example.compare.same_games(tmp_path / "rows", tmp_path / "tree")
    assert found["steps_with_the_same_games"] == found["steps"] == 3
    assert 0 < found["parameters_apart"] < 1e-8
    broken = example.compare.same_games(tmp_path / "rows", tmp_path / "wrong_parent")
    assert broken["parameters_apart"] > 1e-5


def test_a_run_resumes_exactly(example: SimpleNamespace, tmp_path: Path) -> None:
    config = config_of(example, "tree", fp64=False)
    example.train.Run(config, tmp_path / "whole", Corridor).train(4)
    example.train.Run(config, tmp_path / "cut", Corridor).train(2)
    with (tmp_path / "cut" / "steps.jsonl").open("a") as file:
        file.write(json.dumps({"step": 2, "games": "of a step that was not saved"}) + "\n")
    again = example.train.Run(config, tmp_path / "cut", Corridor)
    assert again.step == 2
    again.train(4)
    found = example.compare.same_games(tmp_path / "whole", tmp_path / "cut")
    assert found["steps_with_the_same_games"] == found["steps"] == 4
    assert found["parameters_apart"] == 0
    with pytest.raises(ValueError, match="expected the config that the run was begun with"):
        example.train.Run(config_of(example, "rows"), tmp_path / "cut", Corridor)


def test_replay_tells_faults_from_rounding(example: SimpleNamespace, tmp_path: Path) -> None:
    config = config_of(example, "rows", fp64=False, boards=3)
    example.train.Run(config, tmp_path / "rows", Corridor).train(3)
    batches = list(example.compare.games_of(tmp_path / "rows", 3))
    arms = ("reordered", "tree", "zero_state", "wrong_parent")
    last = example.compare.replay(batches, config, arms)[-1]
    assert 0 < last["tree"] < 20 * last["reordered"]
    assert min(last["zero_state"], last["wrong_parent"]) > 100 * last["reordered"]


def test_rollouts_keep_what_was_sampled(example: SimpleNamespace) -> None:
    """Behaviour log-probs are those of the model; branches begin with moves of a game before, which are not theirs."""
    config = config_of(example, "rows")
    with all_fp64():
        model = example.train.new_model(config)
        rows = example.rollouts.play_step(model, Corridor, seed=1, step=0, boards=2, starts=2, branches=3)
        scored = example.arms.by_row(model, rows)
    assert [row.group for row in rows] == [0, 0, 1, 1, 0, 0, 0, 1, 1, 1]
    for row, logprobs in zip(rows, scored, strict=True):
        torch.testing.assert_close(
            logprobs.detach(), torch.tensor(row.logprobs, dtype=torch.float64), rtol=0, atol=1e-10
        )
        assert row.over
        assert sum(row.chosen) == len(row.actions) - len(row.forced)
        if row.forced:
            assert row.actions[: len(row.forced)] == row.forced
            before = [each for each in rows[:4] if each.group == row.group]
            assert any(each.actions[: len(row.forced)] == row.forced for each in before)
    group = [value for value, row in zip(example.rollouts.advantages(rows), rows, strict=True) if row.group == 0]
    assert sum(group) == pytest.approx(0, abs=1e-9)


@pytest.mark.skipif(importlib.util.find_spec("textarena") is None, reason="textarena is not installed")
def test_the_lake_in_tokens(example: SimpleNamespace) -> None:
    """Seed 7 has a free way right, down, down ..."""
    game, words = example.lake.Lake(), example.lake.VOCABULARY
    start = game.reset(7)
    assert game.reset(7) == start
    assert game.reset(8) != start
    game.reset(7)
    assert len(start) == example.lake.TURN
    assert [words[each] for each in start[:2]] == ["<moved>", "P"]
    assert [words[each] for each in start].count("H") == 3
    observed, over, reward = game.step(words.index("[up]"))
    assert (words[observed[0]], over, reward) == ("<invalid>", False, 0.0)
    for move in ("[right]", "[down]", "[down]", "[down]", "[right]"):
        observed, over, _ = game.step(words.index(move))
        assert not over
    observed, over, reward = game.step(words.index("[right]"))
    assert (over, reward, words[observed[-1]]) == (True, 1.0, "P/G")
