"""What a measurement on a GPU was taken on, and which kernels it spent its time in."""

import contextlib
import importlib.metadata
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from harts.files import write_text

__all__ = ["environment", "profiled"]


def environment(commit: str | None = None) -> dict[str, str]:
    """Names the device, versions, commit and command of a measurement, without any path of this machine.

    Args:
        commit: of the code; None takes the environment variable HARTS_COMMIT, for a copy of the code, or asks git:
            "unknown" for an installed package. With changes that are not committed it ends in "+changes".
    """
    found = {"gpu": torch.cuda.get_device_name()} if torch.cuda.is_available() else {}
    found["threads"] = str(torch.get_num_threads())
    for package in ("harts", "torch", "transformers", "triton", "fla-core", "flash-attn-4"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    found["torch"] = torch.__version__  # with what it was built for
    allocator = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF")
    found.update({"allocator": allocator} if allocator else {})
    commit = commit or os.environ.get("HARTS_COMMIT") or _git_commit()
    command = [Path(word).name if "/" in word else word for word in sys.argv]
    return {**found, "commit": commit, "command": " ".join(command)}


def _git_commit() -> str:
    code = Path(__file__)

    def git(*words: str) -> str:
        with contextlib.suppress(OSError):
            done = subprocess.run(["git", *words], cwd=code.parent, capture_output=True, text=True, check=False)
            return done.stdout.strip()
        return ""

    if not git("ls-files", code.name):  # an environment inside of somebody's repository is no part of it
        return "unknown"
    commit = git("rev-parse", "--short=12", "HEAD") or "unknown"
    return commit + "+changes" * bool(git("status", "--porcelain", "--untracked-files=no"))


@contextlib.contextmanager
def profiled(path: Path, title: str) -> Iterator[None]:
    """Writes which kernels a region spends its time on a GPU in: a title, the environment as JSON, a table."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, acc_events=True) as profile:
        yield
    events = [event for event in profile.key_averages() if event.device_type.name == "CUDA"]
    total = sum(event.self_device_time_total for event in events) or 1
    lines = [f"{title}: {total / 1e3:.1f} ms of kernels", json.dumps(environment())]
    lines += [
        f"{100 * event.self_device_time_total / total:6.2f} %  {event.self_device_time_total / 1e3:10.2f} ms  "
        f"{event.count:6d} x  {event.key[:140]}"
        for event in sorted(events, key=lambda event: -event.self_device_time_total)[:80]
    ]
    write_text(path, "\n".join(lines) + "\n")
