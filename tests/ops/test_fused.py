"""Fused row ops against their references in fp64, and the references against transformers' own modules."""

import pytest
import torch
from kernel_law import assert_kernel_law, assert_same_bits, draw
from torch import Tensor

from harts.ops import fused

EPS = 1e-6
ROWS = 37


def wide(x: Tensor) -> Tensor:
    """Rows as halves of a projection's output, head by head: a view with three strides."""
    return x.view(ROWS, 3, -1).chunk(2, -1)[1]


CASES = {
    "rms_norm": (
        lambda x, w, impl: fused.rms_norm(x, w, eps=EPS, impl=impl),
        [draw(ROWS, 50, seed=1), draw(50, seed=2)],
    ),
    "zero-centred rms_norm": (
        lambda x, w, impl: fused.rms_norm(x, w, eps=EPS, zero_centred=True, impl=impl),
        [draw(2, ROWS, 64, seed=1), draw(64, seed=2)],
    ),
    "rms_norm of a view": (
        lambda x, w, impl: fused.rms_norm(wide(x), w, eps=EPS, zero_centred=True, impl=impl),
        [draw(ROWS, 3 * 32, seed=1), draw(16, seed=2)],
    ),
    "gated_rms_norm": (
        lambda x, g, w, impl: fused.gated_rms_norm(x, g, w, eps=EPS, impl=impl),
        [draw(ROWS, 3, 16, seed=1), draw(ROWS, 3, 16, seed=3), draw(16, seed=2)],
    ),
    "gated_rms_norm of views": (
        lambda x, g, w, impl: fused.gated_rms_norm(wide(x), wide(g), w, eps=EPS, impl=impl),
        [draw(ROWS, 3 * 32, seed=1), draw(ROWS, 3 * 32, seed=3), draw(16, seed=2)],
    ),
    "swiglu": (lambda g, u, impl: fused.swiglu(g, u, impl=impl), [draw(ROWS, 1100, seed=1), draw(ROWS, 1100, seed=2)]),
    "sigmoid_gate": (
        lambda x, g, impl: fused.sigmoid_gate(x, wide(g), impl=impl),
        [draw(ROWS, 3, 16, seed=1), draw(ROWS, 3 * 32, seed=2)],
    ),
    "rotary": (
        lambda x, impl: fused.rotary(x, *angles(12, x), impl=impl),
        [draw(ROWS, 3, 30, seed=1)],
    ),
    "rotary of a whole transposed head": (
        lambda x, impl: fused.rotary(x.transpose(0, 1), *angles(16, x), impl=impl),
        [draw(3, ROWS, 16, seed=1)],
    ),
}


def angles(rotated: int, x: Tensor) -> tuple[Tensor, Tensor]:
    """Any numbers: the halves need not agree."""
    return draw(ROWS, rotated, seed=8).to(x), draw(ROWS, rotated, seed=9).to(x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CASES)
def test_kernels_keep_to_the_reference(name: str, dtype: torch.dtype) -> None:
    op, inputs = CASES[name]
    assert_kernel_law(lambda *x: op(*x, impl="triton"), lambda *x: op(*x, impl="reference"), inputs, dtype)


@pytest.mark.parametrize("name", CASES)
def test_equal_runs_give_equal_bits(name: str) -> None:
    op, inputs = CASES[name]
    assert_same_bits(lambda *x: op(*x, impl="triton"), inputs, torch.bfloat16)


def test_a_row_does_not_depend_on_the_others() -> None:
    x, weight = draw(ROWS, 64, seed=1, dtype=torch.bfloat16), draw(64, seed=2, dtype=torch.bfloat16)
    whole = fused.rms_norm(x, weight, eps=EPS, impl="triton")
    assert torch.equal(whole[5:6], fused.rms_norm(x[5:6], weight, eps=EPS, impl="triton"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_references_equal_transformers(dtype: torch.dtype) -> None:
    from transformers.models.qwen3_5 import modeling_qwen3_5 as theirs

    x, gate = draw(ROWS, 16, seed=1, dtype=dtype), draw(ROWS, 16, seed=2, dtype=dtype)
    weight = draw(16, seed=3, dtype=dtype)
    norm, gated = theirs.Qwen3_5RMSNorm(16, EPS), theirs.Qwen3_5RMSNormGated(16, EPS)
    norm.weight.data = gated.weight.data = weight
    assert torch.equal(norm(x), fused.rms_norm(x, weight, eps=EPS, zero_centred=True, impl="reference"))
    assert torch.equal(gated(x, gate), fused.gated_rms_norm(x, gate, weight, eps=EPS, impl="reference"))
    q = draw(ROWS, 3, 16, seed=4, dtype=dtype)
    cos, sin = angles(8, q)
    turned, _ = theirs.apply_rotary_pos_emb(q[None], q[None], cos[None], sin[None], unsqueeze_dim=2)
    assert torch.equal(turned[0], fused.rotary(q, cos, sin, impl="reference"))


def test_bad_input_is_refused() -> None:
    x, weight = draw(3, 4, seed=1), draw(4, seed=2)
    with pytest.raises(ValueError, match=r"expected weight of shape \[4\], got \[3\]"):
        fused.rms_norm(x, weight[:3], eps=EPS, impl="triton")
    with pytest.raises(ValueError, match="expected weight of one dtype"):
        fused.rms_norm(x, weight.bfloat16(), eps=EPS, impl="triton")
    with pytest.raises(ValueError, match="expected one of 'reference', 'triton'"):
        fused.swiglu(x, x, impl="cuda")
    with pytest.raises(ValueError, match="R even and at most 4"):
        fused.rotary(x[:, None], draw(3, 6, seed=1), draw(3, 6, seed=1), impl="triton")
    assert fused.rms_norm(x[:0], weight, eps=EPS, impl="triton").shape == (0, 4)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_rows_behind_the_first_2_to_31_elements() -> None:
    rows = 2**31 // 1024 + 5
    x = torch.randn(rows, 1024, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(1024, device="cuda", dtype=torch.bfloat16)
    for op in (
        lambda x: fused.swiglu(x, x, impl="triton"),
        lambda x: fused.rms_norm(x, weight, eps=EPS, impl="triton"),
        lambda x: fused.sigmoid_gate(x, x, impl="triton"),
    ):
        assert torch.equal(op(x)[-5:], op(x[-5:]))
