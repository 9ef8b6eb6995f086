"""Log-probabilities and entropies of trained tokens, from the hidden rows that predict them."""

import torch
from torch import Tensor

from harts.layout import PackedTree
from harts.ops.dispatch import choose
from harts.ops.logprobs.chunked import row_logprobs_chunked
from harts.ops.logprobs.reference import row_logprobs_reference

__all__ = ["row_logprobs"]

_IMPLEMENTATIONS = {"chunked": row_logprobs_chunked, "reference": row_logprobs_reference}


def row_logprobs(
    hidden_TD: Tensor,
    weight_VD: Tensor,
    packed: PackedTree,
    *,
    bias_V: Tensor | None = None,
    entropy: bool = False,
    chunk_rows: int = 1024,
    impl: str = "chunked",
) -> tuple[Tensor, Tensor | None]:
    """Scores every target of the tree; a token's log-probability comes from its parent's hidden row.

    logprob = logit[token] / temperature - logsumexp(logits / temperature), logits = hidden weight^T + bias.

    Args:
        hidden_TD: final hidden states, [T, D].
        weight_VD: weight of the head, [V, D].
        packed: the tree. Only its `head_row_U` reach the head, each once per temperature.
        bias_V: [V] or None.
        entropy: whether to return entropies, differentiable too.
        chunk_rows: logit rows that exist at once, >= 1.
        impl: `"chunked"`: any device, in the dtype of hidden but at least fp32 behind the product. `"reference"`: the
            same with all logits at once.

    Returns:
        logprobs_M: [M], nats, fp32 or fp64.
        entropy_M: [M], entropy (nats) of the distribution each target was drawn from, or None.

    Raises:
        ValueError: shapes do not fit, a target outside the vocabulary, `chunk_rows` < 1, or an unknown `impl`.
    """
    if hidden_TD.shape[0] != packed.num_rows or hidden_TD.shape[1] != weight_VD.shape[1]:
        raise ValueError(
            f"row_logprobs: expected hidden of {packed.num_rows} rows and the weight's {weight_VD.shape[1]} channels, "
            f"came {list(hidden_TD.shape)}"
        )
    if chunk_rows < 1:
        raise ValueError(f"row_logprobs: expected chunk_rows >= 1, came {chunk_rows}")
    run = choose("row_logprobs", impl, _IMPLEMENTATIONS)
    logprobs_M, entropy_U = run(hidden_TD, weight_VD, bias_V, packed, entropy, chunk_rows)
    return logprobs_M, None if entropy_U is None else torch.index_select(entropy_U, 0, packed.head_of_M)
