"""Fused log-probs against the reference in fp64."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from kernel_law import DEVICE, assert_kernel_law, assert_same_bits, draw, run

from harts.layout import PackedTree, pack
from harts.ops import row_logprobs
from harts.testing.trees import AWKWARD, tree_strategy
from harts.trajectory import Trajectory
from harts.tree import PrefixTree

VOCABULARY = 70


def packed_of(name: str, share: str = "tree") -> PackedTree:
    trajectories = [
        dataclasses.replace(trajectory, temperature=(0.7, 1.0)[index % 2])
        for index, trajectory in enumerate(AWKWARD[name][:20])
    ]
    return pack(PrefixTree.build(trajectories, share=share), device=DEVICE)


def op(packed: PackedTree, impl: str, chunk_rows: int = 16, entropy: bool = True):
    return lambda hidden, weight, bias: row_logprobs(
        hidden, weight, packed, bias_V=bias, entropy=entropy, chunk_rows=chunk_rows, impl=impl
    )


def inputs_of(packed: PackedTree, bias: bool = True) -> list[torch.Tensor | None]:
    return [
        draw(packed.num_rows, 8, seed=1),
        draw(VOCABULARY, 8, seed=2),
        draw(VOCABULARY, seed=3) if bias else None,
    ]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("entropy", [True, False])
@pytest.mark.parametrize("shape", ["one-token branches", "empty response"])
def test_awkward_trees(shape: str, entropy: bool, bias: bool) -> None:
    packed = packed_of(shape)
    inputs = inputs_of(packed, bias)
    assert_kernel_law(op(packed, "triton", entropy=entropy), op(packed, "reference", entropy=entropy), inputs)


@given(tree=tree_strategy(max_trajectories=4, max_length=20))
@settings(max_examples=5, deadline=None)
def test_random_trees(tree: PrefixTree) -> None:
    packed = pack(tree, device=DEVICE)
    if len(packed.token_M):
        assert_kernel_law(op(packed, "triton"), op(packed, "reference"), inputs_of(packed))


def test_vocabulary_of_several_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    import harts.ops.logprobs.triton as fused

    monkeypatch.setattr(fused, "_BLOCK_V", 16)
    packed = packed_of("one-token branches")
    assert_kernel_law(op(packed, "triton"), op(packed, "reference"), inputs_of(packed))


def test_siblings_of_one_token_add_up() -> None:
    """Rows that may not merge (other merge keys) are two targets with one token of one head row."""
    trajectories = [Trajectory(token_ids=[1, 2], loss_mask=[0, 1], merge_keys=[0, key]) for key in (0, 1)]
    packed = pack(PrefixTree.build(trajectories), device=DEVICE)
    assert len(packed.token_M) == 2
    assert len(packed.head_row_U) == 1
    assert_kernel_law(op(packed, "triton"), op(packed, "reference"), inputs_of(packed))


def test_bits_equal_those_of_separate_rows_and_of_another_run() -> None:
    table, weight = draw(1 << 15, 8, seed=1), draw(VOCABULARY, 8, seed=2)
    outputs = []
    for share in ("tree", "none"):
        packed = packed_of("one-token branches", share)
        hidden = table[packed.position_T * 64 + packed.token_ids_T]
        fused = op(packed, "triton", chunk_rows=32)
        logprobs_M, entropy_M = run(fused, [hidden, weight, None], torch.bfloat16)[:2]
        values = torch.cat([torch.stack([logprobs_M, entropy_M], 1), torch.zeros(1, 2, device=DEVICE)])
        outputs.append(values[packed.target_of_N])
        assert_same_bits(fused, [hidden, weight, None], torch.bfloat16)
    assert torch.equal(outputs[0], outputs[1])


def test_never_more_logit_rows_than_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    import harts.ops.logprobs.triton as fused

    packed = packed_of("prefix of another")
    chunks = fused._Chunks(draw(100, 8, seed=1), draw(VOCABULARY, 8, seed=2), 30)
    assert chunks.logits_RV.shape == (30, VOCABULARY)
    assert [stop - start for start, stop in chunks.ranges] == [30, 30, 30, 10]
    assert len(chunks.hidden(90, 100)) == 30  # filled up
    assert len(packed.head_row_U) > 16


def test_bad_input_is_refused() -> None:
    packed = packed_of("star")
    hidden, weight, _ = inputs_of(packed)
    with pytest.raises(ValueError, match="expected weight of one dtype"):
        row_logprobs(hidden, weight.double(), packed, impl="triton")
    with pytest.raises(ValueError, match="choose impl='chunked'"):
        row_logprobs(hidden.double(), weight.double(), packed, impl="triton")
    with pytest.raises(ValueError, match="expected targets below 9"):
        row_logprobs(hidden, weight[:9], packed, impl="chunked")
