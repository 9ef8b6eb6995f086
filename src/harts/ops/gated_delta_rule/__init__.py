"""Gated delta rule on a tree: a branch starts from its parent's state, and gradients flow back through it."""

from torch import Tensor

from harts.layout import PackedTree
from harts.ops.dispatch import choose
from harts.ops.gated_delta_rule.reference import gated_delta_rule_reference
from harts.ops.linear_attention.context import LinearContext, check
from harts.ops.requirements import require_triton

__all__ = ["gated_delta_rule", "gated_delta_rule_and_states"]


def _triton(
    q_THK: Tensor,
    k_THK: Tensor,
    v_TGV: Tensor,
    g_TG: Tensor,
    beta_TG: Tensor,
    packed: PackedTree,
    context: LinearContext | None,
    wanted: tuple[int, ...],
) -> tuple[Tensor, Tensor]:
    require_triton("gated_delta_rule", q_THK.device)
    from harts.ops.gated_delta_rule.triton import gated_delta_rule_triton  # only here: a CPU needs no Triton

    return gated_delta_rule_triton(q_THK, k_THK, v_TGV, g_TG, beta_TG, packed, context, wanted)


_IMPLEMENTATIONS = {"reference": gated_delta_rule_reference, "triton": _triton}


def gated_delta_rule(
    q_THK: Tensor,
    k_THK: Tensor,
    v_TGV: Tensor,
    g_TG: Tensor,
    beta_TG: Tensor,
    packed: PackedTree,
    *,
    impl: str = "reference",
    context: LinearContext | None = None,
) -> Tensor:
    """Gated delta rule along every path of the tree.

    Along a path, with q and k normalised to unit length and q scaled by K**-0.5 (Gated Delta Networks,
    arXiv:2412.06464, eq. 10):

        S_t = exp(g_t) S_parent (I - beta_t k_t k_t^T) + beta_t v_t k_t^T,    o_t = S_t q_t

    Args:
        q_THK, k_THK: queries and keys, [T, H, K], not yet normalised.
        v_TGV: values, [T, G, V]; G is a multiple of H, and head h of q and k serves G // H consecutive value heads.
        g_TG: logarithm of the decay, [T, G], <= 0.
        beta_TG: writing strength, [T, G], in [0, 1].
        packed: the tree, or a piece of one.
        impl: `"reference"`: plain PyTorch on any device, in the inputs' dtype but at least fp32. `"triton"`: kernels
            for a CUDA GPU; q, k and v in bfloat16, g in float32, K = V = 128. Outputs are then bit
            for bit those of separate rows, and everything is the same in every run.
        context: of a piece: what it reads from outside; see
            `harts.ops.linear_attention.linear_reads`.

    Returns:
        o_TGV: [T, G, V], in the dtype of q.

    Raises:
        ValueError: shapes do not fit each other or the tree, `impl` is unknown, or it does not support the inputs or
            the machine.
        ImportError: `impl="triton"` without Triton.
    """
    return gated_delta_rule_and_states(q_THK, k_THK, v_TGV, g_TG, beta_TG, packed, impl=impl, context=context)[0]


def gated_delta_rule_and_states(
    q_THK: Tensor,
    k_THK: Tensor,
    v_TGV: Tensor,
    g_TG: Tensor,
    beta_TG: Tensor,
    packed: PackedTree,
    *,
    impl: str = "reference",
    context: LinearContext | None = None,
    wanted: tuple[int, ...] = (),
) -> tuple[Tensor, Tensor]:
    """`gated_delta_rule`, and states that other pieces start from.

    Args:
        wanted: own rows, from 0, each the last one of a full block (depth 63, 127, ...), whose states are given.

    Returns:
        o_TGV: [T, G, V], in the dtype of q.
        states_WGVK: [W, G, V, K], fp32 (fp64 for fp64), behind the wanted rows; differentiable.
    """
    rows, heads, _ = q_THK.shape
    groups = v_TGV.shape[1]
    if rows != packed.num_rows or k_THK.shape != q_THK.shape or v_TGV.shape[0] != rows:
        raise ValueError(
            f"gated_delta_rule: expected q and k of one shape and {packed.num_rows} rows in all inputs, got "
            f"q {list(q_THK.shape)}, k {list(k_THK.shape)}, v {list(v_TGV.shape)}"
        )
    if groups % heads or g_TG.shape != (rows, groups) or beta_TG.shape != (rows, groups):
        raise ValueError(
            f"gated_delta_rule: expected value heads to be a multiple of the {heads} key heads, and g and beta of "
            f"shape [{rows}, {groups}], got {groups} value heads, g {list(g_TG.shape)}, beta {list(beta_TG.shape)}"
        )
    check("gated_delta_rule", context, packed)
    run = choose("gated_delta_rule", impl, _IMPLEMENTATIONS)
    return run(q_THK, k_THK, v_TGV, g_TG, beta_TG, packed, context, wanted)
