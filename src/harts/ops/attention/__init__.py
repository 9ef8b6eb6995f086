"""Full attention on a tree: a row sees its path."""

from torch import Tensor

from harts.layout import PackedTree
from harts.ops.attention.reference import attention_reference
from harts.ops.dispatch import choose

__all__ = ["attention"]

_IMPLEMENTATIONS = {"reference": attention_reference}


def attention(
    q_THD: Tensor, k_TGD: Tensor, v_TGV: Tensor, packed: PackedTree, *, scale: float, impl: str = "reference"
) -> Tensor:
    """Softmax attention of every row over the rows of its path, itself included.

    Args:
        q_THD: queries, [T, H, D], positions already applied.
        k_TGD, v_TGV: keys and values, [T, G, D] and [T, G, V]; H is a multiple of G.
        packed: the tree.
        scale: factor on q k^T.
        impl: `"reference"`: PyTorch's scaled_dot_product_attention per chain on path-gathered keys and values.

    Returns:
        o_THV: [T, H, V].

    Raises:
        ValueError: shapes do not fit each other or the tree, or `impl` is unknown.
    """
    rows, heads, size = q_THD.shape
    groups = k_TGD.shape[1]
    if rows != packed.num_rows or k_TGD.shape != (rows, groups, size) or v_TGV.shape[:2] != (rows, groups):
        raise ValueError(
            f"attention: expected {packed.num_rows} rows in q, k and v and one head size in q and k, came "
            f"q {list(q_THD.shape)}, k {list(k_TGD.shape)}, v {list(v_TGV.shape)}"
        )
    if heads % groups:
        raise ValueError(f"attention: expected query heads to be a multiple of key heads, came {heads} and {groups}")
    return choose("attention", impl, _IMPLEMENTATIONS)(q_THD, k_TGD, v_TGV, packed, scale)
