"""What a kernel is held to: the fp64 reference, at most twice as far from it as the reference in the kernel's dtype."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def draw(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Standard normal, rounded to bf16 so that every dtype holds it exactly."""
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()
    return values.to(DEVICE, dtype)


def run(op: Callable[..., object], inputs: Sequence[Tensor | None], dtype: torch.dtype) -> list[Tensor]:
    """Outputs and the gradients of all inputs, in fp64; the outputs' gradients are random and the same for all."""
    leaves = [None if x is None else x.detach().to(dtype).requires_grad_() for x in inputs]
    result = op(*leaves)
    outputs = [x for x in (result if isinstance(result, tuple) else (result,)) if x is not None]
    weights = [draw(*x.shape, seed=100 + i, dtype=x.dtype) for i, x in enumerate(outputs)]
    grads = torch.autograd.grad(outputs, [x for x in leaves if x is not None], weights)
    return [x.detach().double() for x in (*outputs, *grads)]


def assert_kernel_law(
    kernel: Callable[..., object],
    reference: Callable[..., object],
    inputs: Sequence[Tensor | None],
    dtype: torch.dtype = torch.float32,
    factor: float = 2.0,
) -> None:
    """Compares norms of errors, output by output and gradient by gradient."""
    truth = run(reference, inputs, torch.float64)
    ours, plain = run(kernel, inputs, dtype), run(reference, inputs, dtype)
    floor = 16 * torch.finfo(dtype).eps
    for index, (a, b, c) in enumerate(zip(ours, plain, truth, strict=True)):
        size = c.norm().clamp_min(1e-30)
        error, allowed = float((a - c).norm() / size), max(floor, factor * float((b - c).norm() / size))
        assert error <= allowed, f"tensor {index}: error {error:.2e}, allowed {allowed:.2e}"  # NaN fails too


def assert_same_bits(op: Callable[..., object], inputs: Sequence[Tensor | None], dtype: torch.dtype) -> None:
    """Two runs agree in every bit, outputs and gradients."""
    for first, second in zip(run(op, inputs, dtype), run(op, inputs, dtype), strict=True):
        assert torch.equal(first, second)
