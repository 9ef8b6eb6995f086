"""Applies each mutation to a copy of the repository, runs the tests that must notice it, and says which did.

    python tests/mutations/run.py --out benchmarks/results/mutations.jsonl

Ends with 1 if a mutation was not caught, or no longer fits the source. One line of JSON a mutation.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from mutations import MUTATIONS, Mutation

ROOT = Path(__file__).parents[2]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=int, nargs="+", metavar="N", help="numbers of mutations, from 1")
    parser.add_argument("--out", type=Path, help="JSON lines to write")
    options = parser.parse_args()
    chosen = [number for number in range(1, len(MUTATIONS) + 1) if not options.only or number in options.only]
    commit = _git("rev-parse", "--short", "HEAD").strip()
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        copy = _copy(Path(folder))
        for number in chosen:
            found = {"number": number, **_try(MUTATIONS[number - 1], copy), "commit": commit}
            print(f"{number:2} {found['result']:8} {found['mutation']}: {found['test']}", flush=True)
            lines.append(json.dumps(found) + "\n")
    if options.out:
        options.out.write_text("".join(lines), encoding="utf-8")
    return int(any(json.loads(line)["result"] != "caught" for line in lines))


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout


def _copy(folder: Path) -> Path:
    """Everything that git tracks."""
    for name in _git("ls-files").splitlines():
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, folder / name)
    return folder


def _try(mutation: Mutation, copy: Path) -> dict[str, Any]:
    """Runs the tests with the mutation in place, and takes it out again."""
    file = copy / "src" / "harts" / mutation.file
    text = file.read_text(encoding="utf-8")
    about = {"mutation": mutation.name, "file": f"src/harts/{mutation.file}", "tests": " ".join(mutation.tests)}
    if text.count(mutation.old) != 1:
        return {**about, "result": "stale", "test": f"the text occurs {text.count(mutation.old)} times", "seconds": 0.0}
    file.write_text(text.replace(mutation.old, mutation.new), encoding="utf-8")
    start = time.monotonic()
    try:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "-p", "no:cacheprovider", *mutation.tests],
            cwd=copy,
            env={**os.environ, "PYTHONPATH": str(copy / "src"), "PYTHONDONTWRITEBYTECODE": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
    finally:
        file.write_text(text, encoding="utf-8")
    failed = re.search(r"^FAILED (\S+)", done.stdout, re.MULTILINE)
    # 1: a test failed. Anything else, such as a file that cannot be imported or no test at all, says nothing.
    result = {0: "missed", 1: "caught"}.get(done.returncode, "broken")
    shown = failed.group(1) if failed else (done.stdout + done.stderr).strip().splitlines()[-1][:200]
    return {**about, "result": result, "test": shown, "seconds": round(time.monotonic() - start, 1)}


if __name__ == "__main__":
    sys.exit(main())
