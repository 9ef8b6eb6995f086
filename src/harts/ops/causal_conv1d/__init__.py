"""Short causal convolution on a tree: a row reads its ancestors, whichever segments they lie in."""

from torch import Tensor

from harts.layout import PackedTree
from harts.ops.causal_conv1d.layout import ConvLayout, conv_layout
from harts.ops.causal_conv1d.reference import causal_conv1d_reference
from harts.ops.dispatch import check_context, choose
from harts.ops.requirements import require_triton

__all__ = ["causal_conv1d"]


def _triton(
    x_TD: Tensor,
    context_AD: Tensor | None,
    weight_DW: Tensor,
    bias_D: Tensor | None,
    layout: ConvLayout,
    activate: bool,
) -> Tensor:
    require_triton("causal_conv1d", x_TD.device)
    from harts.ops.causal_conv1d.triton import causal_conv1d_triton

    return causal_conv1d_triton(x_TD, context_AD, weight_DW, bias_D, layout, activate)


MOST_TAPS = 4

_IMPLEMENTATIONS = {"reference": causal_conv1d_reference, "triton": _triton}


def causal_conv1d(
    x_TD: Tensor,
    weight_DW: Tensor,
    bias_D: Tensor | None,
    packed: PackedTree,
    *,
    activation: str | None = "silu",
    impl: str = "reference",
    context_AD: Tensor | None = None,
) -> Tensor:
    """Depthwise convolution over each row and its ancestors: y_t = act(bias + sum_w weight[:, W-1-w] x_(w above t)).

    Args:
        x_TD: [T, D].
        weight_DW: [D, W], W <= 4 taps, the last one for the row itself.
        bias_D: [D] or None.
        packed: the tree, or a piece of one.
        activation: `"silu"`, `"swish"` (the same) or None.
        impl: `"reference"`: plain PyTorch on any device and dtype. `"triton"`: CUDA; computes in fp32, rounds once,
            and adds in a fixed order, so that equal runs give equal bits.
        context_AD: of a piece: the rows of x outside that are read, [A, D], in the order of
            `harts.ops.causal_conv1d.layout.outside_rows(packed, W)`; differentiable.

    Returns:
        y_TD: [T, D], in the dtype of x.

    Raises:
        ValueError: shapes do not fit, more than 4 taps, an unknown activation or `impl`, or, for `"triton"`, mixed
            dtypes or another device than CUDA.
        ImportError: `"triton"` without Triton.
    """
    if x_TD.shape[0] != packed.num_rows or weight_DW.shape[0] != x_TD.shape[1]:
        raise ValueError(
            f"causal_conv1d: expected x of {packed.num_rows} rows and one weight row per channel, got "
            f"x {list(x_TD.shape)}, weight {list(weight_DW.shape)}"
        )
    taps = weight_DW.shape[1]
    if not 1 <= taps <= MOST_TAPS:
        raise ValueError(f"causal_conv1d: expected 1 to {MOST_TAPS} taps, got {taps}")
    if activation not in ("silu", "swish", None):
        raise ValueError(f"causal_conv1d: expected activation 'silu', 'swish' or None, got {activation!r}")
    run = choose("causal_conv1d", impl, _IMPLEMENTATIONS)
    layout = packed.layout(conv_layout, taps)
    check_context("causal_conv1d", {} if context_AD is None else {"rows": context_AD}, layout.num_outside)
    return run(x_TD, context_AD, weight_DW, bias_D, layout, activation is not None)
