"""What `harts bench` reports of a measurement, keeps in a file and shows as tables."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from harts.cli import output
from harts.files import check_target, write_text
from harts.testing.measure import ArmResult, Measurement

__all__ = ["TOLERANCE", "Records", "render", "report"]

TOLERANCE: Mapping[str, float] = {"float64": 1e-9, "float32": 1e-3, "bfloat16": 0.2}
"""Largest difference of log-probs (nats) between arms with which times are shown. `harts check` measures the rest."""

_PLAIN = 0.5
"""The same of the arm without HARTS, whose bf16 roundings are others."""

Record = dict[str, Any]


class Records:
    """JSON lines of what was measured, one per workload and setting; a file that is written whole each time."""

    def __init__(self, path: Path | None) -> None:
        """Reads the file, if there is one.

        Raises:
            ValueError: a line is no JSON object, or no file can be written there.
        """
        if path is not None:
            check_target(path)
        self.path = path
        self.lines = self._read()

    def _read(self) -> list[Record]:
        if self.path is None or not self.path.exists():
            return []
        lines: list[Record] = []
        for number, line in enumerate(self.path.read_text(encoding="utf-8").splitlines(), 1):
            try:
                lines.append(dict(json.loads(line)))
            except (ValueError, TypeError) as error:
                raise ValueError(
                    f"{self.path}, line {number}: expected a JSON object per line, as harts bench writes; name another "
                    "file with --out"
                ) from error
        return lines

    def find(self, header: Mapping[str, Any]) -> Record | None:
        """What was measured of this setting, all of it, on this machine at this commit."""
        return next((line for line in self.lines if line.get("whole") and _same(line, header)), None)

    def put(self, header: Mapping[str, Any], found: Mapping[str, Any], *, whole: bool) -> Record:
        """Adds a record, in place of an earlier part of it; returns it."""
        record = {**header, **found, "whole": whole}
        self.lines = [line for line in self._read() or self.lines if line.get("whole") or not _same(line, header)]
        self.lines.append(record)
        if self.path is not None:
            write_text(self.path, "".join(json.dumps(output.finite(line)) + "\n" for line in self.lines))
        return record

    def keep(self, header: Mapping[str, Any], found: Mapping[str, Any]) -> None:
        """Adds a part of a record, in case that the rest never comes."""
        self.put(header, found, whole=False)


def _same(line: Mapping[str, Any], header: Mapping[str, Any]) -> bool:
    def without_command(record: Mapping[str, Any]) -> Any:
        kept: Any = {key: record.get(key) for key in header}
        kept["machine"] = {name: value for name, value in (kept["machine"] or {}).items() if name != "command"}
        return json.loads(json.dumps(output.finite(kept)))  # as it is in the file

    return bool(without_command(line) == without_command(header))


def report(measured: Measurement, header: Mapping[str, Any]) -> Record:
    """One workload's entry; no times of arms that do not agree with the one they are compared with."""
    tolerance = TOLERANCE[header["dtype"]]
    arms: Record = {}
    agree = {}
    for arm, each in measured.arms.items():
        agree[arm] = each.logprob_max_abs <= (max(tolerance, _PLAIN) if arm == "plain" else tolerance)
        arms[arm] = _arm(each, agree[arm], header)
    ratios: Record = {"speedup": {}, "efficiency": {}, "step_efficiency": {}}
    for arm in ("rows", "merged", "shuffled", "plain"):
        fine = agree.get("tree", False) and agree.get(arm, True)
        values = measured.speedup(arm), measured.efficiency(arm), measured.efficiency(arm, step_alone=True)
        for name, value in zip(ratios, values, strict=True):
            if value is not None:
                ratios[name][arm] = value if fine else None
    return {
        **ratios,
        "flop_limit": {"rows": measured.flop_limit, "merged": measured.flop_limit_merged},
        "head_share": measured.head_share,
        "ok": all(agree.values()),
        "left_out": dict(measured.left_out),
        "arms": arms,
    }


def _arm(each: ArmResult, agrees: bool, header: Mapping[str, Any]) -> Record:
    times: Record = {
        "seconds": list(each.seconds),
        "median_s": each.median_s,
        "prepare_s": each.prepare_s,
        "step_seconds": list(each.step_seconds),
        "tflops_per_s": each.flops_per_s / 1e12,
        "rows_per_s": each.rows_per_s,
    }
    return {
        **(times if agrees else dict.fromkeys(times)),
        "agrees": agrees,
        "compared_with": each.compared_with,
        "logprob_max_abs": each.logprob_max_abs,
        "bitwise_equal": each.bitwise_equal,
        "same_again": each.same_again,
        "digest": each.digest,
        "rows": each.counts.rows,
        "trained_rows": each.counts.trained_rows,
        "tflops": each.flops / 1e12,
        "microbatches": each.microbatches,
        "recomputed_rows": each.recomputed_rows,
        "replayed_rows": each.replayed_rows,
        "peak_gib": None if each.peak_bytes is None else each.peak_bytes / 2**30,
        **({} if each.chosen is None else {"chosen": dataclasses.asdict(each.chosen)}),
    }


def render(console: Console, document: Mapping[str, Any]) -> None:
    """Prints the document for people."""
    timed = [each for each in document["workloads"] if "arms" in each]
    for title in dict.fromkeys(map(_title, timed)):
        group = [each for each in timed if _title(each) == title]
        console.print(_arms_table(title, group))
        console.print(_ratios_table(group))
    _render_gradients(console, [each for each in document["workloads"] if "gradients" in each])
    for each in timed:
        for arm, found in each["arms"].items():
            if not found["agrees"]:
                why = (
                    f"{each['workload']}, {arm}: its log-probs differ by {output.number(found['logprob_max_abs'])} "
                    f"from those of {found['compared_with']}; no speed is shown. Run harts check with this model."
                )
                console.print(output.marked("fails", "bold red", why))
        for arm, why in each["left_out"].items():
            console.print(f"{each['workload']}, {arm}: left out for want of {why}")


def _title(each: Mapping[str, Any]) -> str:
    machine = "CPU" if each["device"].startswith("cpu") else each["machine"]["gpu"]
    setting = f"at most {each['token_budget']:,} rows a microbatch, activations {_recomputed(each)}"
    if each.get("memory") is not None:
        setting = f"each arm at its best within {each['memory']}, in pieces"
    return (
        f"{each['model']}, {each['layers']} layers, {each['dtype']} on {machine}, lengths x "
        f"{each['scale']:g}, {setting}, medians of up to {each['turns']} alternating turns, "
        f"{each['clock']} time"
    )


def _recomputed(each: Mapping[str, Any]) -> str:
    if not each["recompute"]:
        return "kept"
    return "recomputed but for attention's outputs" if each.get("keep_attention") else "recomputed"


def _name(each: Mapping[str, Any]) -> str:
    return ":".join([each["workload"], *(f"{size}={value}" for size, value in each["sizes"].items())])


def _runs_twice(found: Mapping[str, Any]) -> int:
    """Rows whose forward runs twice: of cut trees, of pieces that are not kept, of layers that recompute."""
    chosen = found.get("chosen")
    if chosen is None:
        return int(found["recomputed_rows"])
    return int(chosen["rows_again"] + chosen["recompute"] * found["rows"])


def _arms_table(title: str, group: list[Mapping[str, Any]]) -> Any:
    columns = ("s", "TFLOP/s", "rows/s", "peak GiB", "rows", "replayed", "recomputed", "microbatches")
    made = output.table(title, "workload", "arm", *columns, "log-prob", "same bits", left=2)
    for each in group:
        for arm, found in each["arms"].items():
            made.add_row(
                _name(each),
                arm,
                output.number(found["median_s"]),
                output.number(found["tflops_per_s"], 3),
                output.number(None if found["rows_per_s"] is None else round(found["rows_per_s"])),
                output.number(found["peak_gib"], 1),
                *(output.number(found[key]) for key in ("rows", "replayed_rows")),
                output.number(_runs_twice(found)),
                output.number(found["microbatches"]),
                output.number(found["logprob_max_abs"]),
                f"{found['bitwise_equal']:.2%}",
            )
    return made


def _ratios_table(group: list[Mapping[str, Any]]) -> Any:
    made = output.table(
        "\nThe tree over other arms",
        *("workload", "over", "speed-up", "FLOP limit", "efficiency", "step alone", "head"),
        left=2,
    )
    for each in group:
        for arm, speedup in each["speedup"].items():
            made.add_row(
                _name(each),
                arm,
                output.number(speedup),
                output.number(each["flop_limit"].get(arm)),
                output.number(each["efficiency"].get(arm), 3),
                output.number(each.get("step_efficiency", {}).get(arm), 3),
                f"{each['head_share']:.1%}",
            )
    return made


def _render_gradients(console: Console, group: list[Mapping[str, Any]]) -> None:
    if not group:
        return
    made = output.table(
        "Relative errors of gradients against fp32, and the tree's over that of packed rows",
        "workload",
        *("rows", "tree", "ratio: median", "worst", "worst matrix", "whole", "tree - rows", "rerun"),
        "worst parameter",
    )
    for each in group:
        found = each["gradients"]
        keys = ("ratio_median", "ratio_worst", "ratio_worst_matrix", "ratio_whole", "tree_from_rows", "rerun_from_rows")
        made.add_row(
            _name(each),
            *(output.number(found[key], 4) for key in ("rows_median", "tree_median", *keys)),
            f"{found['worst']} ({found['worst_size']:,})",
        )
    console.print(made)
