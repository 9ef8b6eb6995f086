"""The most likely tokens of each head row, with at most `chunk_rows` rows of logits at a time.

Shape suffixes: T rows, U head rows, D channels, V vocabulary, R rows of a chunk, K tokens of a row.
"""

import torch
from torch import Tensor

from harts.layout import PackedTree

__all__ = ["top_tokens"]


@torch.no_grad()
def top_tokens(
    hidden_TD: Tensor, weight_VD: Tensor, packed: PackedTree, k: int, *, bias_V: Tensor | None, chunk_rows: int
) -> Tensor:
    """Ids of the k largest logits of each head row, the largest first; a temperature does not change their order.

    Args:
        hidden_TD: final hidden states, [T, D].
        weight_VD: weight of the head, [V, D].
        packed: the tree.
        k: how many, from 1 to V.
        bias_V: [V] or None.
        chunk_rows: logit rows that exist at once, >= 1.

    Returns:
        int64 [U, K], without gradient. Log-probabilities of them are those of any targets: see `row_logprobs`.

    Raises:
        ValueError: k is below 1 or above V.
    """
    if not 1 <= k <= len(weight_VD):
        raise ValueError(f"top_k: expected a number from 1 to {len(weight_VD)}, the vocabulary, got {k}")
    parts = [
        torch.nn.functional.linear(hidden_TD[row_R], weight_VD, bias_V).topk(k).indices
        for row_R in torch.split(packed.head_row_U, chunk_rows)
    ]
    return torch.cat(parts)
