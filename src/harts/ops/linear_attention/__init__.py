"""Linear attention on a tree, with the decays and writing rules of the published kinds.

| kind | decay | delta |
| --- | --- | --- |
| gated delta rule (`harts.ops.gated_delta_rule`, with kernels of its own) | [T, G] | yes |
| Kimi delta attention (KDA) | [T, G, K] | yes |
| state-space duality (SSD, Mamba2) | [T, G] | no |
| lightning attention | [G] | no |
"""

from torch import Tensor

from harts.layout import PackedTree
from harts.ops.dispatch import choose
from harts.ops.linear_attention.context import LinearContext, check, linear_reads
from harts.ops.linear_attention.reference import linear_attention_reference, unit

__all__ = ["LinearContext", "linear_attention", "linear_attention_and_states", "linear_reads", "unit"]

_IMPLEMENTATIONS = {"reference": linear_attention_reference}


def linear_attention(
    q_THK: Tensor,
    k_THK: Tensor,
    v_TGV: Tensor,
    g_TG: Tensor,
    beta_TG: Tensor | None,
    packed: PackedTree,
    *,
    delta: bool,
    impl: str = "reference",
    context: LinearContext | None = None,
) -> Tensor:
    """Linear attention along every path of the tree.

    Along a path, first the state decays, then a row writes, then it reads:

        S_t = D_t S_parent,    S_t <- S_t + beta_t k_t (v_t - S_t^T k_t)^T  with delta,
                               S_t <- S_t + beta_t k_t v_t^T                without;    o_t = S_t^T q_t

    Args:
        q_THK, k_THK: queries and keys, [T, H, K], as they are to be used: neither normalised nor scaled here.
        v_TGV: values, [T, G, V]; G is a multiple of H, and head h of q and k serves G // H consecutive value heads.
        g_TG: logarithm of the decay, <= 0: [T, G] for D_t = exp(g), [T, G, K] for D_t = diag(exp(g)), or [G], the same
            for all rows.
        beta_TG: writing strength, [T, G]; None: 1.
        packed: the tree, or a piece of one.
        delta: whether a row writes only what the state does not hold yet.
        impl: `"reference"`: plain PyTorch on any device, in the inputs' dtype but at least fp32. There is no kernel
            yet, so it is what runs on a GPU too: exact, slow.
        context: of a piece: what it reads from outside; see `linear_reads`.

    Returns:
        o_TGV: [T, G, V], in the dtype of q.

    Raises:
        ValueError: shapes do not fit each other or the tree, or `impl` is unknown.
    """
    return linear_attention_and_states(
        q_THK, k_THK, v_TGV, g_TG, beta_TG, packed, delta=delta, impl=impl, context=context
    )[0]


def linear_attention_and_states(
    q_THK: Tensor,
    k_THK: Tensor,
    v_TGV: Tensor,
    g_TG: Tensor,
    beta_TG: Tensor | None,
    packed: PackedTree,
    *,
    delta: bool,
    impl: str = "reference",
    context: LinearContext | None = None,
    wanted: tuple[int, ...] = (),
) -> tuple[Tensor, Tensor]:
    """`linear_attention`, and states that other pieces start from.

    Args:
        wanted: own rows, from 0, each the last one of a full block (depth 63, 127, ...), whose states are given.

    Returns:
        o_TGV: [T, G, V], in the dtype of q.
        states_WGVK: [W, G, V, K], fp32 (fp64 for fp64), behind the wanted rows; differentiable.
    """
    rows, heads, size = q_THK.shape
    groups = v_TGV.shape[1]
    if rows != packed.num_rows or k_THK.shape != q_THK.shape or v_TGV.shape[0] != rows:
        raise ValueError(
            f"linear_attention: expected q and k of one shape and {packed.num_rows} rows in all inputs, got "
            f"q {list(q_THK.shape)}, k {list(k_THK.shape)}, v {list(v_TGV.shape)}"
        )
    if groups % heads or (beta_TG is not None and beta_TG.shape != (rows, groups)):
        got = "none" if beta_TG is None else list(beta_TG.shape)
        raise ValueError(
            f"linear_attention: expected value heads to be a multiple of the {heads} key heads, and beta of shape "
            f"[{rows}, {groups}], got {groups} value heads, beta {got}"
        )
    if tuple(g_TG.shape) not in ((groups,), (rows, groups), (rows, groups, size)):
        raise ValueError(
            f"linear_attention: expected g of shape [{groups}], [{rows}, {groups}] or [{rows}, {groups}, {size}], got "
            f"{list(g_TG.shape)}"
        )
    check("linear_attention", context, packed)
    run = choose("linear_attention", impl, _IMPLEMENTATIONS)
    return run(q_THK, k_THK, v_TGV, g_TG, beta_TG, packed, delta, context, wanted)
