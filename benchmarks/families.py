"""The README's table of model families, from what `harts check --json` said of each preset.

    python benchmarks/families.py check              # every preset, with the installed transformers
    python benchmarks/families.py check tiny-glm4    # some
    python benchmarks/families.py table              # writes the table into README.md

`check` puts one line a preset and transformers version into results/families.jsonl, in place of an older one.
"""

import json
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from harts.models import PRESETS
from record import provenance

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "families.jsonl"
BEGIN, END = "<!-- families: python benchmarks/families.py table -->", "<!-- end of families -->"
HEADER = """| token mixers | router | families, and their `model_type` | log-prob, gradient | transformers | on a GPU |
| --- | --- | --- | --- | --- | --- |
"""

NAMES = {
    "afmoe": "AFMoE (Trinity)",
    "arcee": "Arcee",
    "axk1": "A.X K1",
    "bamba": "Bamba",
    "bailing_hybrid": "Ling and Ring hybrids",
    "cohere": "Command R",
    "cohere2": "Command R7B",
    "cwm": "CWM",
    "deepseek_v2": "DeepSeek V2",
    "deepseek_v3": "DeepSeek V3",
    "dots1": "dots.llm1",
    "ernie4_5": "ERNIE 4.5",
    "ernie4_5_moe": "ERNIE 4.5 MoE",
    "exaone4": "EXAONE 4",
    "exaone_moe": "K-EXAONE",
    "falcon_h1": "Falcon-H1",
    "flex_olmo": "FlexOLMo",
    "gemma": "Gemma",
    "gemma2": "Gemma 2",
    "gemma3_text": "Gemma 3",
    "glm": "GLM",
    "glm4": "GLM-4",
    "glm4_moe": "GLM-4.5 and 4.6",
    "glm4_moe_lite": "GLM-4.7-Flash",
    "gpt_oss": "gpt-oss",
    "granite": "Granite",
    "granite_swa": "Granite SWA",
    "granitemoe": "Granite MoE",
    "granitemoe_swa": "Granite MoE SWA",
    "granitemoehybrid": "Granite 4 hybrid",
    "granitemoeshared": "Granite MoE, shared",
    "helium": "Helium",
    "hunyuan_v1_dense": "Hunyuan",
    "hunyuan_v1_moe": "Hunyuan MoE",
    "hy_v3": "Hunyuan 3",
    "kimi_linear": "Kimi Linear",
    "laguna": "Laguna",
    "lfm2": "LFM2",
    "lfm2_moe": "LFM2-MoE",
    "llama": "Llama",
    "mellum": "Mellum",
    "mimo_v2_flash": "MiMo V2 Flash",
    "minicpm3": "MiniCPM 3",
    "minimax_m2": "MiniMax-M2",
    "ministral": "Ministral",
    "ministral3": "Ministral 3",
    "mistral": "Mistral",
    "mistral4": "Mistral 4",
    "mixtral": "Mixtral",
    "nanochat": "nanochat",
    "nemotron_h": "Nemotron-H",
    "olmo": "OLMo",
    "olmo2": "OLMo 2",
    "olmo3": "OLMo 3",
    "olmo_hybrid": "OLMo hybrid",
    "olmoe": "OLMoE",
    "phi": "Phi-1 and 2",
    "phi3": "Phi-3 and 4",
    "qwen2": "Qwen2",
    "qwen2_moe": "Qwen2-MoE",
    "qwen3": "Qwen3",
    "qwen3_5_moe_text": "Qwen3.5-MoE",
    "qwen3_5_text": "Qwen3.5",
    "qwen3_moe": "Qwen3-MoE",
    "qwen3_next": "Qwen3-Next",
    "seed_oss": "Seed-OSS",
    "smollm3": "SmolLM3",
    "solar_open": "Solar Open",
    "starcoder2": "StarCoder2",
    "vaultgemma": "VaultGemma",
    "youtu": "Youtu",
}
"""By `model_type`; others are named by it."""

Line = dict[str, Any]


def read() -> list[Line]:
    """All lines."""
    return [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []


def check(models: Iterable[str]) -> None:
    """Runs `harts check` in fp64 on awkward and random trees, one model after the other."""
    for model in models:
        command = ["check", "--model", model, "--dtype", "float64", "--workloads", "", "--json"]
        code = "from harts.cli import main; main()"
        done = subprocess.run([sys.executable, "-c", code, *command], capture_output=True, text=True, check=False)
        if not done.stdout:
            raise SystemExit(f"{model}: {done.stderr[-2000:]}")
        document = json.loads(done.stdout)
        line = {key: document[key] for key in ("model", "dtype", "family", "logprob_max_abs", "grad_max_rel", "ok")}
        line |= {"batches": len(document["batches"]), "provenance": provenance()}
        others = [each for each in read() if key_of(each) != key_of(line)]
        ordered = sorted([*others, line], key=key_of)
        RESULTS.write_text("".join(json.dumps(each) + "\n" for each in ordered))
        print(model, line["ok"], line["logprob_max_abs"], line["grad_max_rel"], flush=True)


def key_of(line: Line) -> tuple[str, list[int]]:
    return line["model"], version_of(line)


def version_of(line: Line) -> list[int]:
    return [int(part) for part in line["family"]["transformers"].split(".")[:3]]


def table(lines: Sequence[Line]) -> str:
    """One row for families that are alike; a model that failed is no part of it."""
    rows: dict[tuple[str, str, str], list[Line]] = {}
    for line in lines:
        family = line["family"]
        key = (", ".join(family["mixers"]), family["router"] or "", _on_gpu(family))
        rows.setdefault(key, []).append(line)
    text = ""
    for (mixers, router, gpu), members in sorted(rows.items(), key=lambda row: (row[0][0], row[0][1], row[0][2])):
        passed = [line for line in members if line["ok"]]
        if not passed:
            continue
        types = ", ".join(sorted({_named(line["family"]["model_type"]) for line in passed}, key=str.lower))
        errors = [f"{max(line[name] for line in passed):.0e}" for name in ("logprob_max_abs", "grad_max_rel")]
        versions = sorted({tuple(version_of(line)) for line in passed})
        tested = ", ".join(".".join(map(str, version)) for version in versions)
        text += f"| {mixers} | {router} | {types} | {', '.join(errors)} | {tested} | {gpu} |\n"
    return HEADER + text


def _named(model_type: str) -> str:
    name = NAMES.get(model_type, "")
    return f"{name} `{model_type}`".strip()


def _on_gpu(family: dict[str, Any]) -> str:
    plain = [mixer for mixer in family["mixers"] if mixer not in family["kernels"]]
    if not plain:
        return "kernels"
    return "reference path" if not family["kernels"] else f"kernels; {', '.join(plain)}: reference path"


def readme_with(text: str) -> str:
    """The README with another table."""
    before, rest = (ROOT / "README.md").read_text(encoding="utf-8").split(BEGIN)
    return f"{before}{BEGIN}\n{text}{END}{rest.split(END)[1]}"


def main(arguments: Sequence[str]) -> None:
    if arguments[:1] == ["check"]:
        check(arguments[1:] or list(PRESETS))
    elif arguments == ["table"]:
        (ROOT / "README.md").write_text(readme_with(table(read())), encoding="utf-8")
    else:
        raise SystemExit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
