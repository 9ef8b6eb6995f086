"""The command line: exit codes, what goes to which stream, the JSON that others script against."""

import dataclasses
import gzip
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from harts.cli import COMMANDS, app
from harts.cli.options import parse_workloads
from harts.formats import read, write
from harts.models import tiny_model
from harts.testing.trees import AWKWARD
from harts.testing.workloads import workload
from harts.tree import PrefixTree

TAU = Path(__file__).parents[2] / "examples" / "data" / "tau-airline.jsonl.gz"


def run(*arguments: str, code: int = 0) -> Any:
    """Runs a command in this process; with --json the document that it printed."""
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == code, (result.output, result.exception)
    return json.loads(result.stdout) if "--json" in arguments and code != 2 else result


def process(*arguments: str, **settings: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "import harts.cli as c; c.main()", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=100, **settings)


@pytest.fixture
def rollouts(tmp_path: Path) -> Path:
    path = tmp_path / "rollouts.jsonl"
    rows = [
        {"group": "g", "id": str(index), "token_ids": [1, 2, 3, *ids], "loss_mask": [0, 0, 0, *[1] * len(ids)]}
        for index, ids in enumerate([[4, 5], [4, 6, 7], [8]])
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


# -- help, streams, exit codes ------------------------------------------------------------------------------------


def test_help_lists_the_commands_and_imports_none() -> None:
    result = process("--help")
    assert result.returncode == 0
    for name in COMMANDS:
        assert f" {name} " in result.stdout
    code = "import harts.cli as c, sys\ntry: c.main()\nexcept SystemExit: sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code, "--help"], check=True, capture_output=True)
    subprocess.run([sys.executable, "-c", code, "inspect", str(TAU), "--json"], check=True, capture_output=True)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(name: str) -> None:
    assert "Usage" in run(name, "--help").output


def test_a_bad_file_is_one_line_on_stderr(tmp_path: Path, rollouts: Path) -> None:
    broken = tmp_path / "broken.jsonl"
    broken.write_text(rollouts.read_text() + "{oops\n")
    for arguments, message in [
        (["inspect", str(tmp_path / "none.jsonl")], "no such file"),
        (["inspect", str(broken)], "broken.jsonl, line 4"),
        (["check", str(broken)], "broken.jsonl, line 4"),
    ]:
        result = run(*arguments, code=2)
        assert result.stdout == ""
        assert result.stderr.startswith("error: ")
        assert result.stderr.count("\n") == 1
        assert message in result.stderr


@pytest.mark.parametrize("of_session", [False, True])
def test_inspect_says_what_the_other_view_gives(of_session: bool, tmp_path: Path) -> None:
    """Of tau-bench, and of one long session, which shares nothing as a trajectory and much as calls."""
    long = tmp_path / "session.jsonl"
    turn = [{"role": "user", "content": "And now?"}, {"role": "assistant", "content": "North."}]
    long.write_text(json.dumps({"messages": turn * 40}) + "\n")
    path = str(long if of_session else TAU)
    whole, calls = run("inspect", path, "--json"), run("inspect", path, "--rows", "turn", "--json")
    assert whole["sharing_of_calls"] == calls["sharing_of_calls"] == pytest.approx(calls["sharing"])
    assert whole["sharing_of_conversations"] == calls["sharing_of_conversations"] == pytest.approx(whole["sharing"])
    assert calls["sharing"] > 3 * whole["sharing"]
    shown = run("inspect", path).output
    assert f"{calls['sharing']:.2f}x with one a model call (chat: --rows turn)" in shown
    assert f"{whole['sharing']:.2f}x with one a conversation" in run("inspect", path, "--rows", "turn").output


def test_a_truncated_gzip_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "cut.jsonl.gz"
    path.write_bytes(TAU.read_bytes()[:20_000])
    assert "cut.jsonl.gz" in run("inspect", str(path), code=2).stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["inspect"], "data"),
        (["inspect", str(TAU), "--rows", "words"], "rows"),
        (["inspect", str(TAU), "--limit", "0"], "limit"),
        (["oops"], "No such command"),
        (["check", "--dtype", "float16"], "dtype"),
        (["check", "--model", "tiny-gpt"], "expected a directory or one of tiny-qwen3.5"),
        (["check", "--workloads", "stars"], "expected one of star3"),
        (["check", "--no-trees", "--workloads", ""], "nothing to check"),
        (["check", "--no-trees", "--workloads", "star3:turns=x"], "NAME:SIZE=NUMBER"),
        (["check", "--no-trees", "--workloads", "star3", "--scale", "2"], "scale"),
        (["check", "--no-trees", "--workloads", "star3", "--device", "abacus"], "device: expected cpu"),
        (["check", "--no-trees", "--workloads", "mint", "--data-dir", "no-such"], "mint.jsonl.gz in no-such"),
        (["bench", "--workloads", "star3", "--token-budget", "100"], "token_budget: expected at least"),
        (["bench", "--turns", "0"], "turns"),
        (["bench", "--out", "no-such-folder/lines.jsonl"], "no folder no-such-folder; make it"),
        (["bench", "--arms", "rows,trees"], "arms: expected some of rows, merged, tree, shuffled, plain"),
        (["bench", "--model", "qwen3.5-4b", "--device", "cuda:99"], "device"),
        (["bench", "--memory", "1GiB", "--recompute"], "memory: expected no token_budget, recompute or"),
        (["bench", "--memory", "1GiB", "--gradients"], "memory: expected times of arms, got --gradients"),
        (["bench", "--memory", "much", "--scale", "0.01"], "memory: expected a positive number of bytes"),
        (["check", "--no-trees", "--workloads", "star3", "--memory", "9KiB"], "memory: expected at least"),
        (["bench", "--fuse"], "fuse: expected a CUDA device"),
        (["bench", "--profile", "kernels.txt"], "profile: expected a CUDA device"),
        (["bench", "--keep-attention", "--scale", "0.01"], "keep_attention: expected recomputation, got none"),
        (["bench", "--recompute", "--keep-attention", "--scale", "0.01"], "expected attention by a flash kernel"),
        (["calibrate", "-o", "cost.json", "--keep-attention"], "expected attention by a flash kernel"),
        (["bench", "--model", "my-model", "--layers", "2"], "layers: expected none with a saved model"),
    ],
)
def test_bad_usage_exits_with_2(arguments: list[str], message: str) -> None:
    result = run(*arguments, code=2)
    assert message in " ".join(result.stderr.replace("│", " ").split())
    assert "Traceback" not in result.stderr


def test_interrupted_exits_with_130() -> None:
    """The parent may ignore SIGINT, as shells do for jobs in the background; here it always does."""
    own = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    ignore = "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN); os.execv(sys.argv[1], sys.argv[1:])"
    command = [sys.executable, "-c", ignore, sys.executable, "-c", f"{own}; import harts.cli as c; c.main()", "check"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        assert child.stderr is not None
        while "check:" not in child.stderr.readline():
            time.sleep(0.01)
        child.send_signal(signal.SIGINT)
        out, err = child.communicate(timeout=60)
    assert child.returncode == 130
    assert out == ""
    assert "error: interrupted" in err


def test_a_closed_pipe_is_no_error(tmp_path: Path) -> None:
    code = f"{sys.executable} -c 'import harts.cli as c; c.main()' inspect {TAU} --rows turn --json | head -c 1"
    result = subprocess.run(["sh", "-c", code], capture_output=True, text=True, check=False)
    assert result.stdout == "{"
    assert result.stderr == ""


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["inspect", str(TAU), "--json"], 141),
        (["inspect", str(TAU)], 141),
        (["show", str(TAU)], 141),
        (["--help"], 141),
        (["inspect", "none.jsonl"], 2),
    ],
)
def test_a_reader_that_goes_away_gives_the_code_of_sigpipe(arguments: list[str], code: int) -> None:
    command = [sys.executable, "-c", "import harts.cli as c; c.main()", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        child.stdout.close()
        complaint = child.stderr.read()
    assert child.returncode == code
    assert complaint == "" or code == 2
    assert "Traceback" not in complaint


# -- inspect ------------------------------------------------------------------------------------------------------


def test_inspect_counts_what_the_tree_counts() -> None:
    document = run("inspect", str(TAU), "--rows", "turn", "--json")
    tree = PrefixTree.build(read(TAU, rows="turn"))
    assert (document["trajectories"], document["groups"]) == (350, 6)
    assert (document["tokens"], document["unique_tokens"]) == (tree.num_tokens, tree.num_rows)
    assert document["sharing"] == pytest.approx(tree.sharing)
    assert document["segments"] == tree.num_segments
    assert document["trained_tokens"] == sum(each.num_trained for each in tree.trajectories)
    assert document["nesting"] == 3
    assert document["replayed_rows"] == 472
    assert sum(each["tokens"] for each in document["by_group"]) == document["tokens"]
    assert 1 < document["sharing_of_prefixes"] < document["sharing_in_groups"] < document["sharing"]


def test_inspect_shows_a_table_and_limits_groups(rollouts: Path) -> None:
    shown = run("inspect", str(rollouts)).stdout
    assert "3 in 1 groups" in shown
    assert "15" in shown
    assert "branch depth" in shown
    assert "branch depth" not in run("inspect", str(rollouts), "--groups", "0").stdout
    few = run("inspect", str(rollouts), "--limit", "2", "--json")
    assert (few["trajectories"], few["tokens"], few["unique_tokens"], few["branch_depth"]) == (2, 11, 7, 1)


def test_several_files_are_read_as_one(rollouts: Path, tmp_path: Path) -> None:
    other = tmp_path / "more.jsonl.gz"
    with gzip.open(other, "wt") as file:
        file.write(json.dumps({"group": "h", "id": "x", "token_ids": [9, 9], "loss_mask": [0, 1]}) + "\n")
    assert run("inspect", str(rollouts), str(other), "--json")["trajectories"] == 4


# -- check --------------------------------------------------------------------------------------------------------

SMALL = ("--no-trees", "--workloads", "think:rollouts=2:turns=2", "--scale", "0.02", "--json")


@pytest.mark.parametrize("model", ["tiny-qwen3.5", "tiny-llama"])
def test_check_holds_in_fp64(model: str) -> None:
    document = run("check", *SMALL, "--model", model)
    assert document["ok"] is True
    assert document["logprob_max_abs"] < 1e-10
    assert document["family"]["model_type"] == {"tiny-qwen3.5": "qwen3_5_text", "tiny-llama": "llama"}[model]
    assert document["family"]["kernels"] == document["family"]["mixers"]
    assert document["grad_max_rel"] < 1e-8
    assert 0 < document["logprob_bitwise_equal_fraction"] <= 1
    (batch,) = document["batches"]
    assert batch["name"] == "workload: think:rollouts=2:turns=2"
    assert batch["rows"] < batch["tokens"]


def test_check_holds_on_data_in_fp32(rollouts: Path) -> None:
    document = run("check", str(rollouts), "--dtype", "float32", "--json")
    assert document["ok"] is True
    assert document["batches"][0]["trajectories"] == 3
    assert document["logprob_error_ratio"] is not None


def test_check_reads_a_saved_model(rollouts: Path, tmp_path: Path) -> None:
    from harts.models import tiny_model

    tiny_model("tiny-qwen3.5", vocab_size=64).save_pretrained(tmp_path / "saved")  # type: ignore[operator]
    assert run("check", str(rollouts), "--model", str(tmp_path / "saved"), "--json")["ok"] is True
    tiny_model("tiny-qwen3.5", vocab_size=6).save_pretrained(tmp_path / "small")  # type: ignore[operator]
    result = run("check", str(rollouts), "--model", str(tmp_path / "small"), code=2)
    assert "expected ids below the vocabulary size 6" in result.stderr


def test_check_fails_where_the_initial_state_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    reference = importlib.import_module("harts.ops.linear_attention.reference")
    recur = reference._recur

    def from_zero(u: Any, w: Any, *rest: Any) -> Any:
        states, *_ = recur(u, w, *rest)
        return states.new_zeros(states.shape), states, u

    monkeypatch.setattr(reference, "_recur", from_zero)
    document = run("check", *SMALL, code=1)
    assert document["ok"] is False
    assert any("log-prob" in failure for failure in document["batches"][0]["failures"])
    shown = run("check", *SMALL[:-1], code=1).stdout
    assert "fails" in shown


def test_check_runs_awkward_trees(monkeypatch: pytest.MonkeyPatch) -> None:
    few = {name: AWKWARD[name] for name in ("single token", "duplicates", "empty response")}
    monkeypatch.setattr(importlib.import_module("harts.cli.check"), "AWKWARD", few)
    names = [each["name"] for each in run("check", "--workloads", "", "--json")["batches"]]
    assert names == ["awkward: duplicates", "awkward: empty response", "random: 0", "random: 1", "random: 2"]


# -- bench --------------------------------------------------------------------------------------------------------


@pytest.fixture
def small_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.import_module("harts.cli.bench_models"), "MODEL", {"hidden_size": 64, "head_dim": 64})


QUICK = ("bench", "--workloads", "star3", "--scale", "0.01", "--turns", "2", "--token-budget", "900")


def test_bench_reports_what_others_script_against(small_model: None) -> None:
    document = run(*QUICK, "--arms", "rows,merged,tree", "--json")
    (entry,) = document["workloads"]
    assert entry["workload"] == "star3"
    assert entry["efficiency"]["rows"] == pytest.approx(entry["speedup"]["rows"] / entry["flop_limit"]["rows"])
    assert entry["step_efficiency"]["rows"] > entry["efficiency"]["rows"]  # without the tree's build
    assert 3 < entry["flop_limit"]["rows"] < 7
    assert all(arm["median_s"] > 0 for arm in entry["arms"].values())
    assert entry["arms"]["rows"]["microbatches"] > entry["arms"]["tree"]["microbatches"]
    assert entry["arms"]["merged"]["rows"] == entry["arms"]["rows"]["rows"]  # no row of a star continues another
    assert entry["arms"]["tree"]["logprob_max_abs"] < 1e-5
    assert entry["arms"]["tree"]["compared_with"] == "rows"
    assert entry["machine"]["torch"] == torch.__version__


def test_bench_profiles_times_alone(tmp_path: Path) -> None:
    module = importlib.import_module("harts.cli.bench_job")
    fields = dict.fromkeys(field.name for field in dataclasses.fields(module.Job))
    job = module.Job(**{**fields, "gradients": True, "profile": tmp_path / "kernels.txt"})
    with pytest.raises(ValueError, match="profile: expected times, whose calls it looks into, got --gradients"):
        job.run([], None, None, 1.0, print)


def test_bench_shows_a_table(small_model: None) -> None:
    shown = run(*QUICK[:-2], "--arms", "rows,merged,tree,plain").stdout
    assert "star3" in shown
    assert "FLOP limit" in shown
    assert shown.count("merged") == shown.count("plain") == 2


def test_bench_shows_no_speed_where_the_arms_differ(small_model: None, monkeypatch: pytest.MonkeyPatch) -> None:
    command = importlib.import_module("harts.cli.bench_report")
    monkeypatch.setattr(command, "TOLERANCE", {"float32": -1.0})
    document = run(*QUICK, "--json", code=1)
    (entry,) = document["workloads"]
    assert document["ok"] is False
    assert entry["speedup"]["rows"] is None
    assert entry["arms"]["tree"]["seconds"] is None
    assert "no speed is shown" in run(*QUICK, code=1).stdout


def test_bench_takes_up_where_it_stopped(small_model: None, tmp_path: Path) -> None:
    out = tmp_path / "results.jsonl"
    first = run(*QUICK, "--once-above", "inf", "--out", str(out), "--json")
    kept = out.read_text()
    again = run(*QUICK, "--once-above", "inf", "--out", str(out), "--json")
    assert again["workloads"] == first["workloads"]
    assert out.read_text() == kept
    run(*QUICK, "--arms", "tree", "--turns", "1", "--out", str(out), "--json")
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["measured"] for line in lines] == [["rows", "tree"], ["tree"]]
    assert all(line["whole"] for line in lines)
    out.write_text("[1]\n")
    result = CliRunner().invoke(app, [*QUICK, "--out", str(out)])
    assert result.exit_code == 2
    assert "line 1: expected a JSON object" in result.stderr


def test_bench_takes_up_no_other_data_and_no_missing_turns(
    small_model: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, whole = tmp_path / "results.jsonl", workload("star3", scale=0.01)
    rows = []
    for name, trajectories in (("one", whole), ("two", whole[:8])):
        path = tmp_path / name / "mine.jsonl"
        path.parent.mkdir()
        write(path, trajectories)
        options = ("--arms", "tree", "--turns", "2", "--out", str(out), "--json")
        (entry,) = run("bench", str(path), *options)["workloads"]
        rows.append(entry["arms"]["tree"]["rows"])
    assert rows == [PrefixTree.build(whole).num_rows, PrefixTree.build(whole[:8]).num_rows]
    assert all(json.loads(line)["whole"] for line in out.read_text().splitlines())
    monkeypatch.setattr("harts.testing.measure._Bench.expected_s", lambda bench, arm: 1e9 * len(bench.runs))
    (entry,) = run(*QUICK[:-4], "--turns", "2", "--arms", "tree", "--seconds", "1e8", "--json")["workloads"]
    assert len(entry["arms"]["tree"]["seconds"]) == 1
    assert not entry["whole"]


def test_bench_keeps_the_ids_of_a_saved_model(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    write(path, workload("star3", scale=0.01)[:2])
    tiny_model("tiny-llama", vocab_size=100).save_pretrained(tmp_path / "model")
    result = CliRunner().invoke(app, ["bench", str(path), "--model", str(tmp_path / "model")])
    assert result.exit_code == 2
    first = next(int(i) for i in read(path)[0].token_ids if i >= 100)
    assert f"expected ids below the vocabulary size 100, got {first}" in " ".join(result.stderr.split())


def test_bench_names_the_machine_that_it_ran_on() -> None:
    each = {"model": "m", "layers": 1, "dtype": "float32", "machine": {"gpu": "H200"}, "scale": 1.0, "turns": 1}
    each |= {"token_budget": 10, "recompute": False, "clock": "wall"}
    title = importlib.import_module("harts.cli.bench_report")._title
    assert "float32 on CPU" in title({**each, "device": "cpu"})
    assert "float32 on H200" in title({**each, "device": "cuda"})


def test_bench_times_data_and_gradients(small_model: None, tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    write(path, workload("star3", scale=0.01))
    (entry,) = run("bench", str(path), "--turns", "1", "--token-budget", "900", "--json")["workloads"]
    assert (entry["workload"], entry["scale"]) == ("mine", 1.0)
    assert entry["speedup"]["rows"] > 0
    options = ("--gradients", "--dtype", "bfloat16", "--layers", "2")
    (entry,) = run("bench", str(path), "--token-budget", "900", *options, "--json")["workloads"]
    assert entry["layers"] == 2
    assert 0.5 < entry["gradients"]["ratio_median"] < 2
    assert "worst parameter" in run("bench", str(path), "--token-budget", "900", *options).stdout


def test_workload_sizes_on_the_command_line() -> None:
    assert parse_workloads("star3, think:rollouts=2:turns=5") == [("star3", {}), ("think", {"rollouts": 2, "turns": 5})]
    for bad in ("think:rollouts", "think:=3", "think:turns=1.5", "star3,,flat"):
        with pytest.raises(ValueError, match="workloads: expected"):
            parse_workloads(bad)


def test_no_color_codes_in_a_pipe(rollouts: Path) -> None:
    result = process("inspect", str(rollouts), env={**os.environ, "PYTHONIOENCODING": "utf-8"})
    assert result.returncode == 0
    assert "\x1b" not in result.stdout


def test_check_says_which_default_workloads_it_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import harts.testing.real_rows as real_rows

    monkeypatch.delenv("HARTS_DATA", raising=False)
    monkeypatch.setattr(real_rows, "_CHECKOUT", tmp_path)
    monkeypatch.setattr("harts.cli.check.WORKLOADS", "thin:rows=8,mint:groups=1")
    words = ["check", "--model", "tiny-llama", "--no-trees", "--json", "--workloads"]
    left = CliRunner().invoke(app, [*words, "thin:rows=8,mint:groups=1"])
    assert left.exit_code == 0, left.stderr
    assert json.loads(left.stdout)["left_out"] == ["mint"]
    named = CliRunner().invoke(app, [*words, "mint:groups=1"])
    assert named.exit_code == 2
    assert "mint.jsonl.gz" in named.stderr
