"""Fixtures for all tests.

Kernels run on a GPU where there is one, else in Triton's interpreter, which has to be chosen before they load.
"""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def without_state_of_accelerate() -> Iterator[None]:
    """Accelerate has one state a process, and refuses another precision than that of the test before."""
    yield
    if "accelerate.state" in sys.modules:
        sys.modules["accelerate.state"].AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The folder of real trajectories that are not in this repository: HARTS_DATA, else shared/data beside it."""
    folder = Path(os.environ.get("HARTS_DATA", ROOT.parent / "shared" / "data"))
    if not (folder / "README.md").is_file():
        pytest.skip(f"no real trajectories in {folder}: set HARTS_DATA")
    return folder


@pytest.fixture(scope="session")
def tau_file() -> Path:
    """The bundled real trajectories: 24 tau-bench conversations."""
    return ROOT / "examples" / "data" / "tau-airline.jsonl.gz"
