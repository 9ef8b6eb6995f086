"""Which implementation each op uses, named in one place."""

from dataclasses import dataclass

import torch

from harts.ops.attention import default_impl

__all__ = ["Kernels"]

_ROW_FLOOR = 512
"""Twice the rows up to which a bf16 product was found to have other bits; see `Kernels.fastest`."""


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """The `impl=` of every op in a model's forward pass.

    Attributes:
        gated_delta_rule, linear_attention, causal_conv1d, attention, row_logprobs: names that the ops know; see their
            docstrings.
        chunk_rows: logit rows that exist at once in `row_logprobs`.
        deterministic: gradients of attention are equal in every bit from run to run (all else is anyway); the flash
            kernels take longer for it.
        min_rows: a microbatch of fewer rows runs with as many dummy rows behind them as are missing, so that no matrix
            product of the model has fewer and a row's forward bits do not depend on the number of rows that come with
            it. It costs the time of that many rows, and nothing from there on. 1: no dummy rows.

    Raises:
        ValueError: `min_rows` is no integer of at least 1.
    """

    gated_delta_rule: str = "reference"
    linear_attention: str = "reference"
    causal_conv1d: str = "reference"
    attention: str = "reference"
    row_logprobs: str = "chunked"
    chunk_rows: int = 1024
    deterministic: bool = False
    min_rows: int = 1

    def __post_init__(self) -> None:
        if not isinstance(self.min_rows, int) or isinstance(self.min_rows, bool) or self.min_rows < 1:
            raise ValueError(
                f"Kernels, field min_rows: expected an integer of at least 1, got {self.min_rows!r}; 1 runs no dummy "
                "rows"
            )

    @staticmethod
    def fastest(*, deterministic: bool = False) -> "Kernels":
        """The fastest of this installation: our Triton kernels and a flash kernel on a CUDA GPU, else the defaults.

        On a GPU `min_rows` is 512: on an H200 (PyTorch 2.11, cuBLAS, bf16) the products of Qwen3.5-4B and of
        Qwen3.5-35B-A3B gave a row other bits with up to 256 rows than with 65,536, and the same from there on. One
        product is left: the gate of a shared expert, of one column, differed with 2,100 and 2,500 rows. `fuse` computes
        it without the BLAS; see docs/numerics.md for unfused models.
        """
        if not torch.cuda.is_available():
            return Kernels(deterministic=deterministic)
        return Kernels(
            gated_delta_rule="triton",
            causal_conv1d="triton",
            attention=default_impl(),
            row_logprobs="triton",
            chunk_rows=4096,
            deterministic=deterministic,
            min_rows=_ROW_FLOOR,
        )
