"""Log-probabilities in plain PyTorch, all logits at once: what the others are compared with.

Shape suffixes: T rows, U head rows, M targets, D channels, V vocabulary.
"""

import torch
from torch import Tensor

from harts.layout import PackedTree

__all__ = ["row_logprobs_reference"]


def row_logprobs_reference(
    hidden_TD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, packed: PackedTree, entropy: bool, chunk_rows: int
) -> tuple[Tensor, Tensor | None]:
    """See `harts.ops.row_logprobs`; entropies are per head row here, [U]. `chunk_rows` has nothing to bound."""
    dtype = torch.promote_types(hidden_TD.dtype, torch.float32)
    logits_UV = torch.nn.functional.linear(hidden_TD[packed.head_row_U], weight_VD, bias_V).to(dtype)
    logp_UV = (logits_UV / packed.temperature_U.to(dtype)[:, None]).log_softmax(-1)
    logprobs_M = logp_UV[packed.head_of_M, packed.token_M]
    return logprobs_M, -(logp_UV.exp() * logp_UV).sum(-1) if entropy else None
