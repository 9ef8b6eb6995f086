"""The Triton convolution against the reference op in fp64."""

import pytest
import torch
from hypothesis import given, settings
from kernel_law import DEVICE, assert_kernel_law, assert_same_bits, draw, run

from harts.layout import PackedTree, pack
from harts.ops import causal_conv1d
from harts.testing.trees import AWKWARD, tree_strategy
from harts.tree import PrefixTree


def check(packed: PackedTree, channels: int = 5, taps: int = 4, bias: bool = True, activation: str | None = "silu"):
    inputs = [
        draw(packed.num_rows, channels, seed=1),
        draw(channels, taps, seed=2),
        draw(channels, seed=3) if bias else None,
    ]

    def op(impl: str):
        return lambda x, weight, b: causal_conv1d(x, weight, b, packed, activation=activation, impl=impl)

    assert_kernel_law(op("triton"), op("reference"), inputs)


@pytest.mark.parametrize("shape", AWKWARD)
def test_awkward_trees(shape: str) -> None:
    check(pack(PrefixTree.build(AWKWARD[shape]), device=DEVICE))


@given(tree=tree_strategy(max_trajectories=8, max_length=70))
@settings(max_examples=8, deadline=None)
def test_random_trees(tree: PrefixTree) -> None:
    check(pack(tree, device=DEVICE))


@pytest.mark.parametrize("taps", [1, 2, 3, 4])
@pytest.mark.parametrize("activation", ["silu", None])
def test_taps_bias_and_activation(taps: int, activation: str | None) -> None:
    packed = pack(PrefixTree.build(AWKWARD["one-token branches"]), device=DEVICE)
    for bias in (True, False):
        check(packed, channels=130, taps=taps, bias=bias, activation=activation)


def test_rows_of_a_wider_tensor() -> None:
    packed = pack(PrefixTree.build(AWKWARD["star"]), device=DEVICE)
    weight = draw(6, 4, seed=2)
    assert_kernel_law(
        lambda x: causal_conv1d(x[:, 3:9], weight.to(x), None, packed, impl="triton"),
        lambda x: causal_conv1d(x[:, 3:9], weight.to(x), None, packed),
        [draw(packed.num_rows, 12, seed=1)],
    )


def test_bits_equal_those_of_separate_rows_and_of_another_run() -> None:
    trajectories = AWKWARD["branches at 63/64/65 inside branches"]
    outputs = []
    weight, bias, table = draw(8, 4, seed=2), draw(8, seed=3), draw(1 << 16, 8, seed=1)
    for share in ("tree", "none"):
        packed = pack(PrefixTree.build(trajectories, share=share), device=DEVICE)
        x = table[packed.position_T * 64 + packed.token_ids_T]  # a function of the token and its depth
        op = lambda *inputs, packed=packed: causal_conv1d(*inputs, packed, impl="triton")  # noqa: E731
        outputs.append(run(op, [x, weight, bias], torch.bfloat16)[0][packed.row_of_N])
        assert_same_bits(op, [x, weight, bias], torch.bfloat16)
    assert torch.equal(outputs[0], outputs[1])


def test_mixed_dtypes_are_refused() -> None:
    packed = pack(PrefixTree.build(AWKWARD["single token"]), device=DEVICE)
    x = draw(1, 3, seed=1)
    with pytest.raises(ValueError, match="expected weight of one dtype"):
        causal_conv1d(x, draw(3, 4, seed=2).bfloat16(), None, packed, impl="triton")
