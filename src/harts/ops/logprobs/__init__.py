"""Log-probabilities and entropies of trained tokens, from the hidden rows that predict them."""

from torch import Tensor

from harts.layout import PackedTree
from harts.ops.dispatch import choose
from harts.ops.logprobs.chunked import row_logprobs_chunked
from harts.ops.logprobs.indices import heads_of_targets
from harts.ops.logprobs.reference import row_logprobs_reference
from harts.ops.logprobs.top import top_tokens
from harts.ops.requirements import require_triton
from harts.ops.rows import gather_rows

__all__ = ["row_logprobs", "top_tokens"]


def _run_triton(
    hidden_TD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, packed: PackedTree, entropy: bool, chunk_rows: int
) -> tuple[Tensor, Tensor | None]:
    require_triton("row_logprobs", hidden_TD.device, other="chunked")
    from harts.ops.logprobs.triton import row_logprobs_triton

    return row_logprobs_triton(hidden_TD, weight_VD, bias_V, packed, entropy, chunk_rows)


_IMPLEMENTATIONS = {"chunked": row_logprobs_chunked, "triton": _run_triton, "reference": row_logprobs_reference}


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
        impl: `"chunked"`: any device, in the dtype of hidden but at least fp32 behind the product. `"triton"`: CUDA,
            the same in one kernel each way, adding in a fixed order; a row's bits do not depend on the rows beside it.
            Its chunks are best a few thousand rows. `"reference"`: all logits at once.

    Returns:
        logprobs_M: [M], nats, fp32 or fp64.
        entropy_M: [M], entropy (nats) of the distribution each target was drawn from, or None.

    Raises:
        ValueError: shapes do not fit, a target outside the vocabulary, `chunk_rows` < 1, an unknown `impl`, or, for
            `"triton"`, mixed dtypes, fp64, or another device than CUDA.
        ImportError: `"triton"` without Triton.
    """
    if hidden_TD.shape[0] != packed.num_rows or hidden_TD.shape[1] != weight_VD.shape[1]:
        raise ValueError(
            f"row_logprobs: expected hidden of {packed.num_rows} rows and the weight's {weight_VD.shape[1]} channels, "
            f"got {list(hidden_TD.shape)}"
        )
    if chunk_rows < 1:
        raise ValueError(f"row_logprobs: expected chunk_rows >= 1, got {chunk_rows}")
    run = choose("row_logprobs", impl, _IMPLEMENTATIONS)
    some_outside = len(packed.token_M) and packed.tree.token_ids_T.max() >= len(weight_VD)  # seldom: costs no wait
    if some_outside and packed.token_M.max() >= len(weight_VD):
        raise ValueError(
            f"row_logprobs: expected targets below {len(weight_VD)}, the rows of weight, got "
            f"{int(packed.token_M.max())}; is the tree of another tokenizer?"
        )
    logprobs_M, entropy_U = run(hidden_TD, weight_VD, bias_V, packed, entropy, chunk_rows)
    return logprobs_M, None if entropy_U is None else gather_rows(entropy_U, packed.layout(heads_of_targets))
