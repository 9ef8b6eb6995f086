"""Which implementation each op uses, named in one place."""

from dataclasses import dataclass

__all__ = ["Kernels"]


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """The `impl=` of every op in a model's forward pass.

    Attributes:
        gated_delta_rule, causal_conv1d, attention, row_logprobs: names that the ops know; see their docstrings.
        chunk_rows: logit rows that exist at once in `row_logprobs`.
    """

    gated_delta_rule: str = "reference"
    causal_conv1d: str = "reference"
    attention: str = "reference"
    row_logprobs: str = "chunked"
    chunk_rows: int = 1024
