"""harts plan, harts show and harts inspect --explain."""

import ast
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from rich.text import Text
from typer.testing import CliRunner

from harts.cli import app, output
from harts.formats import read
from harts.plan import Plan, make_plan
from harts.tree import PrefixTree

TAU = Path(__file__).parents[2] / "examples" / "data" / "tau-airline.jsonl.gz"
PLAN_KEYS = (
    *("slots", "replicas", "unique_rows", "recomputed_rows", "replayed_rows", "idle_fraction"),
    *("lower_bound", "makespan", "gap", "plan_s"),
)


def run(*arguments: Any, code: int = 0) -> Any:
    """Runs a command; with --json the document that it printed."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "160"})
    assert result.exit_code == code, (result.output, result.exception)
    return json.loads(result.stdout) if "--json" in arguments and code != 2 else result


@pytest.fixture(scope="module")
def tau() -> PrefixTree:
    return PrefixTree.build(read(TAU))


# -- plan ---------------------------------------------------------------------------------------------------------


def test_plan_has_the_promised_keys_and_is_checked(tau: PrefixTree, tmp_path: Path) -> None:
    saved = tmp_path / "plan.json"
    found = run("plan", TAU, "--replicas", 4, "--token-budget", 20_000, "--check", "-o", saved, "--json")
    expected = make_plan(tau, token_budget=20_000, num_replicas=4)
    for key in PLAN_KEYS[:-1]:
        assert found[key] == getattr(expected, key), key
    assert found["plan_s"] > 0
    assert (found["ok"], found["speedup"], found["out"]) == (True, expected.speedup, str(saved))
    assert found["hints"] == list(expected.hints)
    assert Plan.load(saved, tree=tau) == expected


def test_plan_for_people(tau: PrefixTree) -> None:
    text = run("plan", TAU, "--replicas", 4, "--token-budget", 20_000, "--check").output
    plan = make_plan(tau, token_budget=20_000, num_replicas=4)
    assert f"{plan.unique_rows:,} unique, {plan.recomputed_rows:,} recomputed" in text
    assert f"{plan.speedup:.2f}x over separate rows (predicted)" in text
    assert "fits every tree into one microbatch" in " ".join(text.split())
    assert "every law holds" in text
    assert len([line for line in text.splitlines() if "▰" in line]) == plan.slots
    many = run("plan", TAU, "--replicas", 16, "--token-budget", 20_000, "--rows", "turn", "--slots", 1).output
    assert "least full" in many
    assert "empty" in many


def test_plan_refuses_what_cannot_be_planned(tmp_path: Path) -> None:
    for arguments, message in [
        (["--token-budget", 200], "13886 is the smallest token_budget that works"),
        (["--token-budget", 20_000, "--replicas", 0], "num_replicas: expected an integer >= 1"),
        (["--token-budget", 20_000, "--cost-model", tmp_path / "none.json"], "none.json"),
    ]:
        result = run("plan", TAU, *arguments, code=2)
        assert message in result.stderr
        assert result.stdout == ""


def test_a_saved_plan_of_other_data_is_refused(tau: PrefixTree, tmp_path: Path) -> None:
    saved = tmp_path / "plan.json"
    run("plan", TAU, "--token-budget", 20_000, "--limit", 5, "-o", saved)
    with pytest.raises(ValueError, match="expected the data it was made of"):
        Plan.load(saved, tree=tau)


# -- show ---------------------------------------------------------------------------------------------------------


def test_show_draws_the_tree(tau: PrefixTree) -> None:
    text = run("show", TAU, "--max-lines", 5).output
    assert f"{tau.num_rows:,} of them distinct (1.89x) in {tau.num_segments} segments" in text
    assert "3,838 x24 ▱▱▱▱▱▱▱▱ <|im_start|>system # Airline Agent Policy" in text
    assert "more segments" in text


def test_show_as_json_is_the_tree(tau: PrefixTree) -> None:
    found = run("show", TAU, "--json")
    segments = found["segments"]
    assert [each["parent"] for each in segments] == tau.parent_S.tolist()
    assert sum(each["tokens"] for each in segments) == found["unique_tokens"] == tau.num_rows
    assert sum(each["trained"] for each in segments) == int(tau.trained_T.sum())
    assert sorted(name for each in segments for name in each["ends"]) == sorted(one.id for one in tau.trajectories)
    assert segments[0]["text"].startswith("<|im_start|>system\n# Airline Agent Policy")


def test_show_writes_a_page(tau: PrefixTree, tmp_path: Path) -> None:
    page = tmp_path / "tree.html"
    found = run("show", TAU, "-o", page, "--replicas", 3, "--json")
    longest = max(map(len, tau.trajectories))
    assert (found["out"], found["token_budget"], found["replicas"]) == (str(page), 2 * longest, 3)
    text = page.read_text(encoding="utf-8")
    assert "Airline Agent Policy" in text
    assert "<title>tau-airline" in text
    first = text
    run("show", TAU, "-o", page, "--replicas", 3)
    assert page.read_text(encoding="utf-8") == first
    assert "smallest token_budget" in run("show", TAU, "-o", page, "--token-budget", 9, code=2).stderr


def test_show_token_ids_without_a_tokenizer(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    row = {"group": "g", "id": "[bold]a[/]", "token_ids": [7, 8, 9], "loss_mask": [0, 1, 1]}
    path.write_text(json.dumps(row))
    text = run("show", path).output
    assert "3 x1 ▰▰▰▰▰▱▱▱ [bold]a[/] 7 8 9" in text
    assert run("show", path, "--json")["segments"][0]["text"] is None


# -- inspect --explain --------------------------------------------------------------------------------------------


def test_explain_gives_the_three_sizes_and_near_misses() -> None:
    found = run("inspect", TAU, "--explain", "--json")
    report = found["explain"]
    assert (report["sizes"]["tree"], report["sizes"]["prefix"]) == (found["unique_tokens"], 188_044)
    assert report["sizes"]["per_call"] == run("inspect", TAU, "--rows", "turn", "--json")["tokens"]
    assert report["tree_mended"] + sum(miss["rows"] for miss in report["misses"]) == report["sizes"]["tree"]
    text = run("inspect", TAU, "--explain").output
    for part in ("A  one row a model call", "B  rows merged", "C  tree", "what wins them back", "airline/003"):
        assert part in text
    assert f"{report['sizes']['per_call']:,}" in text


def test_explain_names_duplicates_and_survives_markup(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    prompt = list(range(50, 90))
    rows = [
        {"group": "[red]g[/", "id": f"[{at}", "token_ids": [1, extra, *prompt, 2], "loss_mask": [*[0] * 42, 1]}
        for at, extra in enumerate([5, 6, 6])
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = run("inspect", path, "--explain").output
    assert "1 trajectories have the tokens of an earlier one" in text
    assert "[1, [2" in text
    assert "other words" in text
    assert "Only token ids were compared" in text
    assert "[red]g[/" in text


# -- text from data -----------------------------------------------------------------------------------------------


def test_text_from_data_is_neither_markup_nor_obeyed_by_the_terminal(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    rows = [
        {
            "id": f"[/b]\x1b[31m{n}",
            "group": "[INST][/b]\u202egroup",
            "token_ids": [1, 2, 3 + n, 4],
            "loss_mask": [0, 1, 1, 1],
        }
        for n in (0, 0, 1)
    ]
    rows[1]["id"] = "same\x07"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for arguments in (("inspect",), ("inspect", "--explain"), ("show",)):
        text = run(arguments[0], path, *arguments[1:]).output
        assert not {"\x1b", "\x07", "\u202e"} & set(text), arguments
        if arguments[0] == "inspect":
            assert "[INST][/b]\\u202egroup" in text, arguments
        else:
            assert "[/b]\\x1b[31m1" in text
    failed = run("inspect", tmp_path / "[/b]\x1b.jsonl", code=2).stderr
    assert "[/b]\\x1b.jsonl" in failed
    assert "\x1b" not in failed


def test_show_refuses_a_name_that_is_no_page_before_it_reads(tmp_path: Path) -> None:
    refused = run("show", tmp_path / "not-there.jsonl", "-o", tmp_path / "x.txt", code=2).stderr
    assert "expected -o with a name that ends in .html or .htm, got 'x.txt'" in " ".join(refused.split())
    assert not list(tmp_path.iterdir())


HOSTILE = "[/b]\x1b[31m\u202e\x07x"
SHOWN = "[/b]\\x1b[31m\\u202e\\x07x"


def test_no_text_is_markup_nor_obeyed_on_a_console_of_ours() -> None:
    console = output.PlainConsole(width=80, file=io.StringIO(), force_terminal=True)
    table = output.table(HOSTILE, HOSTILE)
    table.add_row(HOSTILE)
    for text in (HOSTILE, Text(HOSTILE, "bold"), table, output.key_values(HOSTILE, {HOSTILE: HOSTILE})):
        with console.capture() as captured:
            console.print(text, highlight=False)
        found = re.sub(r"\x1b\[[0-9;]*m", "", captured.get())  # our own styles
        assert (SHOWN.replace("\\x07", "") if isinstance(text, Text) else SHOWN) in found  # rich's Text drops a bell
        assert not {"\x1b", "\x07", "\u202e"} & set(found)
    with console.capture() as captured:
        console.print(output.marked("fails", "bold red", "a\nb"))
    assert "\x1b[1;31mfails\x1b[0m a\nb" in captured.get()


def test_commands_print_through_consoles_of_ours_alone() -> None:
    for path in sorted(Path(output.__file__).parent.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                name = ast.unparse(node.func)
                version = path.name == "__init__.py" and name == "typer.echo"
                straight = name in ("print", "typer.echo", "rich.print") or name.split(".")[-1] == "Console"
                assert version or not straight, f"{path.name}:{node.lineno}"


def test_paths_that_were_written_are_shown_as_escapes(tmp_path: Path) -> None:
    name = "[b]\x1b[31m"
    for arguments in (("plan", TAU, "--token-budget", "20000", "-o"), ("show", TAU, "-o")):
        ending = ".html" if arguments[0] == "show" else ".json"
        text = "".join(run(arguments[0], *arguments[1:], tmp_path / (name + ending)).output.split())
        assert "[b]\\x1b[31m" + ending in text
        assert "\x1b" not in text


def test_progress_says_its_title_once(capsys: pytest.CaptureFixture[str]) -> None:
    with output.watch("check [b]") as tell:
        tell("one")
        tell("[/b] two\x1b")
    assert capsys.readouterr().err == "check [b]:\n  one\n  [/b] two\\x1b\n"
