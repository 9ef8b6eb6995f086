"""Which implementation each op uses, named in one place."""

from dataclasses import dataclass

import torch

from harts.ops.attention import default_impl

__all__ = ["Kernels"]


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """The `impl=` of every op in a model's forward pass.

    Attributes:
        gated_delta_rule, causal_conv1d, attention, row_logprobs: names that the ops know; see their docstrings.
        chunk_rows: logit rows that exist at once in `row_logprobs`.
        deterministic: gradients of attention are equal in every bit from run to run (all else is anyway); the flash
            kernels take longer for it.
    """

    gated_delta_rule: str = "reference"
    causal_conv1d: str = "reference"
    attention: str = "reference"
    row_logprobs: str = "chunked"
    chunk_rows: int = 1024
    deterministic: bool = False

    @staticmethod
    def for_device(device: torch.device | str) -> "Kernels":
        """What `harts.logprobs` and `harts train` take where nothing is named: `fastest` on a CUDA GPU, else plain."""
        return Kernels.fastest() if torch.device(device).type == "cuda" else Kernels()

    @staticmethod
    def fastest(*, deterministic: bool = False) -> "Kernels":
        """The fastest of this installation: our Triton kernels and a flash kernel on a CUDA GPU, else the defaults."""
        if not torch.cuda.is_available():
            return Kernels(deterministic=deterministic)
        return Kernels(
            gated_delta_rule="triton",
            causal_conv1d="triton",
            attention=default_impl(),
            row_logprobs="fused",
            chunk_rows=4096,
            deterministic=deterministic,
        )
