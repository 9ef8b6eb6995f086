"""What each token mixer costs: the FLOPs of one forward of one layer, its projections included, for one of each of
`Counts`.

A multiply-add counts 2. Per layer and row unless said otherwise:

- full attention: 2 x hidden x (queries + keys + values + output), queries doubled where an output gate is part of
  their projection; per visible pair 4 x heads x head_dim (scores and weighted values). With a sliding window of W, a
  row at depth d sees min(d + 1, W) rows.
- latent attention (MLA): 2 x hidden x (queries' latent + keys' latent + rotated key + output), the expansion of both
  latents, and per visible pair 2 x heads x (key_dim + value_dim).
- gated delta rule: 2 x hidden x (2 keys + 2 values + 2 value_heads) in and 2 x values x hidden out, the short
  convolution's taps, and the chunked recurrence of Yang et al., "Gated Delta Networks" (2024): with chunks of C = 64,
  per value head 2C x (3 key_dim + 2 value_dim) for K K^T, Q K^T and the triangular systems' products, and
  6 x key_dim x value_dim for reading and updating the state. Replayed rows repeat only the recurrence.
- Kimi delta attention: the same recurrence; projections of q, k, v, strengths, decays and output gate, the last two of
  low rank in Kimi Linear.
- Mamba2: 2 x hidden x (2 inner + 2 groups x state + heads) in and 2 x inner x hidden out, the short convolution's taps,
  and the chunked recurrence of Dao and Gu, "Transformers are SSMs" (2024): with chunks of C = 64, per head
  2C x (state + head_dim) for C B^T and its product with x, and 4 x state x head_dim for reading and updating the state.
- lightning attention: 2 x hidden x 5 heads x head_dim for q, k, v, the output gate and the output; the same recurrence
  with state = head_dim.
- short convolution with two gates (LFM2): 2 x hidden x 4 hidden for its projections, and the taps.
"""

from collections.abc import Callable, Iterator

from harts.blocks import BLOCK
from harts.cost.counts import Coefficients
from harts.cost.recurrent import mamba2_sizes
from harts.cost.sizes import Sizes

__all__ = ["mixers_of"]

Price = Callable[[Sizes, int, str], Coefficients]
"""(sizes, number of the layer, its type) -> its mixer's cost."""

_TWICE_THE_KEYS = ("mimo_v2_flash",)
"""Model types whose layers with a sliding window have twice the key and value heads of the config."""
_GATED_HEADS = ("laguna",)
"""Model types with a gate on attention's output, of each head or of each channel, as `gating` says."""
_GATED_LATENTS = ("bailing_hybrid",)
"""Model types with a gate on each head of latent attention's output."""
_LIGHTNING = ("minimax",)
"""Model types whose linear attention is lightning attention."""


def mixers_of(sizes: Sizes, kind: str) -> Iterator[Price]:
    """The mixers of a decoder layer of a type; none in one that is an MLP or experts alone."""
    if kind in ("full_attention", "sliding_attention", "hybrid"):
        yield _latent_attention if sizes.get("kv_lora_rank", 0) else _softmax_attention
    if kind == "conv":
        yield _short_conv
    if kind in ("linear_attention", "hybrid"):
        if mamba2_sizes(sizes) is not None:
            yield _mamba2
        elif sizes.get("model_type", "") in _LIGHTNING:
            yield _lightning
        else:
            yield _kimi_delta_attention if sizes.get("linear_num_heads", 0) else _gated_delta_rule


def _pairs_of(sizes: Sizes, kind: str, *, rows: float, per_pair: float) -> Coefficients:
    if kind == "sliding_attention":
        return Coefficients(rows=rows, window_pairs=per_pair, window=sizes.window())
    return Coefficients(rows=rows, pairs=per_pair)


def _softmax_attention(sizes: Sizes, layer: int, kind: str) -> Coefficients:
    hidden = sizes.need("hidden_size")
    heads, head_dim = sizes.need("num_attention_heads"), sizes.head_dim()
    value_dim = sizes.get("v_head_dim", head_dim)
    groups = sizes.get("num_key_value_heads", heads)
    of_layer = sizes.get("num_attention_heads_per_layer", None)
    if of_layer is not None:
        heads = of_layer[layer]
    model_type = sizes.get("model_type", "")
    if model_type in _TWICE_THE_KEYS and kind == "sliding_attention":
        groups *= 2
    columns = heads * (head_dim + value_dim) + groups * (head_dim + value_dim)
    if sizes.has_query_gate():
        columns += heads * head_dim
    if model_type in _GATED_HEADS:
        columns += heads if sizes.get("gating", True) in (True, "per-head") else heads * head_dim
    return _pairs_of(sizes, kind, rows=2.0 * hidden * columns, per_pair=2.0 * heads * (head_dim + value_dim))


def _latent_attention(sizes: Sizes, layer: int, kind: str) -> Coefficients:
    hidden = sizes.need("hidden_size")
    heads, latent, of_queries = (
        sizes.need("num_attention_heads"),
        sizes.need("kv_lora_rank"),
        sizes.get("q_lora_rank", 0),
    )
    rotated, plain, values = (sizes.need(name) for name in ("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"))
    keys = heads * (plain + rotated)
    queries = of_queries * (hidden + keys) if of_queries else hidden * keys
    expanded = hidden * (latent + rotated) + latent * heads * (plain + values)
    gate = heads * hidden if sizes.get("model_type", "") in _GATED_LATENTS else 0
    rows = 2.0 * (queries + expanded + gate + heads * values * hidden)
    return _pairs_of(sizes, kind, rows=rows, per_pair=2.0 * (keys + heads * values))


def _gated_delta_rule(sizes: Sizes, layer: int, kind: str) -> Coefficients:
    hidden = sizes.need("hidden_size")
    key_dim, value_dim = sizes.need("linear_key_head_dim"), sizes.need("linear_value_head_dim")
    key_heads, value_heads = sizes.need("linear_num_key_heads"), sizes.need("linear_num_value_heads")
    keys, values = key_heads * key_dim, value_heads * value_dim
    convolution = 2 * sizes.need("linear_conv_kernel_dim") * (2 * keys + values)
    projections = 2 * hidden * (2 * keys + 2 * values + 2 * value_heads) + 2 * values * hidden
    return Coefficients(rows=projections + convolution, linear_rows=value_heads * _delta_chunk(key_dim, value_dim))


def _kimi_delta_attention(sizes: Sizes, layer: int, kind: str) -> Coefficients:
    hidden = sizes.need("hidden_size")
    heads, size = sizes.need("linear_num_heads"), sizes.need("linear_head_dim")
    inner = heads * size
    low_rank = sizes.get("model_type", "") == "kimi_linear"  # the projections of decay and output gate
    gates = 2 * (hidden + inner) * size if low_rank else 2 * hidden * inner
    projections = 2 * (hidden * (3 * inner + heads) + gates + inner * hidden)
    rows = projections + 6 * sizes.need("linear_conv_kernel_dim") * inner
    return Coefficients(rows=rows, linear_rows=heads * _delta_chunk(size, size))


def _delta_chunk(key_dim: int, value_dim: int) -> int:
    return 2 * BLOCK * (3 * key_dim + 2 * value_dim) + 6 * key_dim * value_dim


def _mamba2(sizes: Sizes, layer: int, kind: str) -> Coefficients:
    hidden, mamba2 = sizes.need("hidden_size"), mamba2_sizes(sizes)
    assert mamba2 is not None, "the config has its sizes"
    projections = 2 * hidden * (mamba2.inner + mamba2.channels + mamba2.heads) + 2 * mamba2.inner * hidden
    state, size = mamba2.state_size, mamba2.head_size
    chunk = 2 * BLOCK * (state + size) + 4 * state * size
    rows = projections + 2 * mamba2.taps * mamba2.channels
    return Coefficients(rows=rows, linear_rows=mamba2.heads * chunk)


def _lightning(sizes: Sizes, layer: int, kind: str) -> Coefficients:
    hidden = sizes.need("hidden_size")
    heads, size = sizes.need("num_attention_heads"), sizes.head_dim()
    return Coefficients(rows=10 * hidden * heads * size, linear_rows=heads * (4 * BLOCK * size + 4 * size * size))


def _short_conv(sizes: Sizes, layer: int, kind: str) -> Coefficients:
    hidden = sizes.need("hidden_size")
    return Coefficients(rows=2 * hidden * (4 * hidden + sizes.need("conv_L_cache")))
