"""Kernels are refused where they cannot run or would be wrong, and the message says what to install."""

import pytest
import torch

from harts.ops import requirements
from harts.ops.requirements import require_triton

triton = pytest.importorskip("triton")

CUDA = torch.device("cuda")


@pytest.fixture(autouse=True)
def _compiled_for_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))


@pytest.mark.parametrize("version", ["3.4.0", "3.6.0", "3.7.0", "3.7.0+git1"])
def test_triton_that_compiles_an_op_wrong_is_refused_for_it_alone(
    monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    monkeypatch.setattr(triton, "__version__", version)
    with pytest.raises(ValueError, match=rf"gated_delta_rule: .* got {version.replace('+', '.')}; .*triton>=3\.7\.1"):
        require_triton("gated_delta_rule", CUDA)
    require_triton("causal_conv1d", CUDA)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    require_triton("gated_delta_rule", CUDA)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # the interpreter compiles nothing
    require_triton("gated_delta_rule", CUDA)


@pytest.mark.parametrize("version", ["3.3.1", "3.7.1", "3.8.0", "4.0.0+git1"])
def test_triton_that_is_right_runs(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(triton, "__version__", version)
    require_triton("gated_delta_rule", CUDA)


def test_missing_triton_and_other_devices_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="expected tensors on a CUDA device, got cpu; move them, or choose impl='x'"):
        require_triton("gated_delta_rule", torch.device("cpu"), other="x")
    monkeypatch.setattr(requirements, "has_triton", lambda: False)
    with pytest.raises(ImportError, match=r"needs Triton; install it with: pip install 'harts\[gpu\]'"):
        require_triton("gated_delta_rule", CUDA)
