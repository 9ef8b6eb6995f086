"""What every result needs beside its numbers: machine, versions, commit and command."""

import platform
import shlex
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import numpy as np

__all__ = ["provenance"]


def provenance() -> dict[str, str]:
    """Machine, versions, commit and command of the running script, without any path of this machine."""
    cpu = [line.split(":", 1)[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    command = [
        f"benchmarks/{Path(sys.argv[0]).name}",
        *(Path(word).name if "/" in word else word for word in sys.argv[1:]),
    ]
    return {
        "machine": f"{cpu[0] if cpu else platform.processor()}, one core",
        "versions": f"python {platform.python_version()}, numpy {np.__version__}, harts {version('harts')}",
        "commit": head.stdout.strip() or "unknown",
        "command": "python " + shlex.join(command),
    }


def _lines(path: str) -> list[str]:
    file = Path(path)
    return file.read_text().splitlines() if file.exists() else []
