"""harts train and harts calibrate as a user runs them."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import harts
from harts.cli import app
from harts.losses import LossConfig
from harts.models import RouterConfig
from harts.testing.trees import random_trajectories
from harts.train import TrainConfig


@pytest.fixture
def toml(tmp_path: Path) -> Path:
    trajectories = random_trajectories(
        np.random.default_rng(0), num_trajectories=6, min_length=20, max_length=80, vocab_size=40
    )
    harts.write(tmp_path / "data.jsonl", trajectories)
    file = tmp_path / "run.toml"
    file.write_text(
        "data = 'data.jsonl'\nsteps = 2\ngroups_per_step = 50\ntoken_budget = 600\n[loss]\nalgorithm = 'supervised'\n"
    )
    return file


def call(*words: object) -> Any:
    return CliRunner().invoke(app, [str(word) for word in words])


def test_one_json_document_and_progress_beside_it(toml: Path) -> None:
    result = call("train", toml, "--out", toml.parent / "run", "--json")
    assert result.exit_code == 0, result.stderr
    document = json.loads(result.stdout)
    assert document["steps"] == 2
    assert document["last"]["loss"] < document["first"]["loss"]
    assert document["first_look"]["logprob_max_abs"] < 1e-4
    assert document["first_look"]["speedup"] > 0
    assert "step 1/2" in result.stderr
    assert "GFLOP/s" in result.stderr
    assert re.search(r"step 1/2  loss \d.* learning_rate 0\.0010 .* \d+\.\d\d s, [\d,]+ rows/s", result.stderr)


def test_rewards_are_told_and_notes_repeated(toml: Path) -> None:
    found = random_trajectories(np.random.default_rng(0), num_trajectories=4, max_length=80, vocab_size=40)
    rows = [dataclasses.replace(each, group="g", advantages=None, reward=1.5) for each in found]
    harts.write(toml.parent / "data.jsonl", rows)
    toml.write_text("data = 'data.jsonl'\nsteps = 1\ntoken_budget = 600\n")
    result = call("train", toml, "--out", toml.parent / "run", "--no-look")
    assert result.exit_code == 0, result.stderr
    assert "reward_mean 1.5000  reward_std 0.0000" in result.stderr
    assert re.search(r"note 1 +all 4 trajectories have advantage zero", result.stdout)
    rows = [dataclasses.replace(each, reward=float(i)) for i, each in enumerate(rows)]
    harts.write(toml.parent / "data.jsonl", [*rows[:3], dataclasses.replace(rows[3], reward=0.0)])
    result = call("train", toml, "--out", toml.parent / "other", "--no-look", "--json")
    document = json.loads(result.stdout)
    assert document["notes"] == []
    assert document["last"]["reward_mean"] == pytest.approx(0.75)
    assert document["last"]["reward_std"] == pytest.approx(0.6875**0.5)


def test_a_finished_run_says_so_and_keeps_its_numbers(toml: Path) -> None:
    first = call("train", toml, "--out", toml.parent / "run", "--json", "--no-look")
    again = call("train", toml, "--out", toml.parent / "run", "--json", "--resume")
    assert again.exit_code == 0
    assert "already at step 2 of 2" in again.stderr
    assert json.loads(again.stdout)["sharing"] == json.loads(first.stdout)["sharing"]
    assert json.loads(again.stdout)["first_look"] is None


def test_bad_input_is_one_line_and_exit_code_2(toml: Path) -> None:
    out = toml.parent / "run"
    cases = [
        (["train", toml.parent / "no.toml", "--out", out], "no such file"),
        (["train", toml, "--out", out, "--device", "abacus"], "device: expected cpu"),
        (["train", toml, "--out", out, "--resume"], "expected a run to resume, found none"),
        (["train", toml, "--out", out, "--token-budget", 10], "token budget (10)"),
        (["train", toml, "--out", out, "--plan", toml], "expected a plan written by harts plan -o"),
        (["train", toml, "--out", out, "--data", toml.parent / "none.jsonl"], "none.jsonl"),
        (["calibrate", "-o", toml.parent / "nowhere" / "cost.json"], "make"),
    ]
    for words, message in cases:
        result = call(*words)
        assert result.exit_code == 2, words
        assert message in result.stderr
        assert result.stdout == ""


def test_plan_and_calibrate_feed_train(toml: Path) -> None:
    plan, cost = toml.parent / "plan.json", toml.parent / "cost.json"
    assert call("plan", toml.parent / "data.jsonl", "--token-budget", 300, "-o", plan).exit_code == 0
    followed = call("train", toml, "--out", toml.parent / "planned", "--plan", plan, "--json", "--no-look")
    assert json.loads(followed.stdout)["first"]["slots"] == json.loads(plan.read_text())["slots"]

    (ids,) = re.findall(r"vocabulary of the (\d+) token ids", followed.stderr)
    fitted = call("calibrate", "-o", cost, "--max-rows", 512, "--vocab-size", ids, "--json")
    assert fitted.exit_code == 0, fitted.stderr
    assert json.loads(fitted.stdout)["median_error"] > 0
    balanced = call("train", toml, "--out", toml.parent / "timed", "--cost-model", cost, "--json", "--no-look")
    assert balanced.exit_code == 0, balanced.stderr
    assert json.loads(balanced.stdout)["first"]["predicted_unit"] == "seconds"
    assert re.search(r"\d s of compute, \d+\.\d\d s predicted", balanced.stderr)
    other = call(
        "train", toml, "--out", toml.parent / "other", "--cost-model", cost, "--json", "--data", plan.parent / "x"
    )
    assert other.exit_code == 2


def test_every_setting_has_an_option_and_the_printed_config_is_the_run(toml: Path) -> None:
    words = ["--learning-rate", "1e-6", "--loss.algorithm", "grpo", "--loss.kl-coef=0.1", "--recompute", "false"]
    words += ["--max-grad-norm", "none", "--fused", "false", "--limit", 4, "--router.scope", "step"]
    result = call("train", *words, toml, "--print-config")
    assert result.exit_code == 0, result.stderr
    (toml.parent / "printed.toml").write_text(result.stdout)
    printed = TrainConfig.load(toml.parent / "printed.toml")
    assert (printed.learning_rate, printed.recompute, printed.max_grad_norm, printed.limit) == (1e-6, False, 1.0, 4)
    assert printed.loss == LossConfig(algorithm="grpo", kl_coef=0.1)
    assert printed.router == RouterConfig(scope="step")
    assert printed.fused is False
    given = {"learning_rate": 1e-6, "loss.algorithm": "grpo", "loss.kl_coef": 0.1, "recompute": False}
    given |= {"max_grad_norm": None, "fused": False, "limit": 4, "router.scope": "step"}
    assert dataclasses.replace(printed, max_grad_norm=None) == TrainConfig.load(toml, given)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--lr", "1e-6"], "unknown field lr; what others call lr is close to learning_rate here"),
        (["--batch-size", 8], "unknown field batch_size; what others call batch_size is close to groups_per_step here"),
        (["--beta", 0.1], "close to kl_coef in [loss] here"),
        (["--steps", "many"], "field steps: expected int, got 'many'"),
        (["--recompute", "maybe"], "field recompute: expected bool, got 'maybe'"),
        (["--schedule", "wsd"], "field decay_steps: expected 1 to 2 with the schedule 'wsd', got 0"),
        (["--decay-steps", 1], "field decay_steps: expected 0, as only the schedule 'wsd' uses it, got 1"),
        (["--min-learning-rate", 1], "field min_learning_rate: expected 0 to learning_rate, got 1.0"),
        (["--beta2", 1], "field beta2: expected a number in [0, 1), got 1.0"),
        (["--learning-rat", 1], "--learning-rate"),
        ([], "pass --out DIR"),
    ],
)
def test_bad_options_name_what_was_meant(toml: Path, words: list[object], message: str) -> None:
    result = call("train", toml, *words)
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())


def test_names_in_the_wrong_table_are_placed(toml: Path) -> None:
    toml.write_text("data = 'data.jsonl'\nkl_coef = 0.1\n")
    assert "unknown field kl_coef; did you mean kl_coef in [loss]?" in call("train", toml).stderr
