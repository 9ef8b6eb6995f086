"""Experts: the kernels against the reference in fp64, and the reference against transformers' eager experts."""

import pytest
import torch
from kernel_law import DEVICE, assert_kernel_law, assert_same_bits, draw, run
from torch import Tensor

from harts.ops import fused
from harts.ops.moe import run_experts
from harts.testing.fp64 import all_fp64

SIZE, INSIDE, EXPERTS = 24, 16, 5

# name -> (rows, experts per row)
SHAPES = {"usual": (37, 3), "one row": (1, 3), "one expert a row": (19, 1), "all experts": (11, 5)}


def choices(rows: int, per_row: int, *, without: int | None = None, seed: int = 0) -> Tensor:
    """Different experts for each row, in no order; never the one that is left out."""
    generator = torch.Generator().manual_seed(seed)
    experts = torch.tensor([e for e in range(EXPERTS) if e != without])
    rows_TK = [experts[torch.randperm(len(experts), generator=generator)[:per_row]] for _ in range(rows)]
    return torch.stack(rows_TK).to(DEVICE)


def inputs_of(chosen_TK: Tensor, *, shared: bool = True, size: int = SIZE, inside: int = INSIDE) -> list[Tensor | None]:
    rows, per_row = chosen_TK.shape
    return [
        draw(rows, size, seed=1),
        draw(rows, per_row, seed=2),
        draw(EXPERTS, 2 * inside, size, seed=3) / 4,
        draw(EXPERTS, size, inside, seed=4) / 4,
        draw(rows, size, seed=5) if shared else None,
        draw(size, seed=6) / 4 if shared else None,
    ]


def op(chosen_TK: Tensor, impl: str):
    def call(x, weight, gate_up, down, shared, gate):
        return run_experts(x, chosen_TK, weight, gate_up, down, shared_TD=shared, shared_gate_D=gate, impl=impl)

    return call


def assert_law(chosen_TK: Tensor, dtype: torch.dtype = torch.float32, **options: object) -> None:
    assert_kernel_law(op(chosen_TK, "triton"), op(chosen_TK, "reference"), inputs_of(chosen_TK, **options), dtype)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("name", SHAPES)
def test_kernels_keep_to_the_reference(name: str, shared: bool) -> None:
    assert_law(choices(*SHAPES[name]), shared=shared)


def test_kernels_keep_to_the_reference_in_bf16() -> None:
    assert_law(choices(37, 3), torch.bfloat16)


def test_an_expert_without_rows_gets_a_gradient_of_zero() -> None:
    for without in (0, 2, EXPERTS - 1):
        chosen_TK = choices(23, 3, without=without)
        assert_law(chosen_TK)
        gate_up, down = run(op(chosen_TK, "triton"), inputs_of(chosen_TK), torch.float32)[3:5]
        assert not gate_up[without].any()
        assert not down[without].any()
        assert all(gate_up[e].any() for e in range(EXPERTS) if e != without)


def test_gradients_of_empty_experts_are_cleared_whatever_was_there() -> None:
    """What the product leaves there differs between GPUs."""
    from harts.ops.moe.experts_triton import _clear_empty

    grad = torch.full((5, 40, 30), torch.nan, device=DEVICE)
    _clear_empty(grad, torch.tensor([0, 4, 4, 9, 9], dtype=torch.int32, device=DEVICE))
    assert [bool(each.isnan().all()) for each in grad] == [False, True, False, True, False]
    assert not grad[[0, 2, 4]].any()


def test_all_rows_on_one_expert() -> None:
    assert_law(torch.full((21, 1), 3, device=DEVICE))


def test_rows_of_many_strips_and_wide_channels(monkeypatch: pytest.MonkeyPatch) -> None:
    import harts.ops.moe.experts_triton as kernels

    monkeypatch.setattr(kernels, "_STRIPS", 3)
    assert_law(choices(101, 2), size=300, inside=20)


def test_no_rows() -> None:
    chosen_TK = torch.empty(0, 3, dtype=torch.int64, device=DEVICE)
    for shared in (True, False):
        for impl in ("reference", "triton"):
            out, *grads = run(op(chosen_TK, impl), inputs_of(chosen_TK, shared=shared), torch.float32)
            assert out.shape == (0, SIZE)
            assert not any(each.any() for each in grads)


def test_equal_runs_give_equal_bits() -> None:
    chosen_TK = choices(37, 3)
    assert_same_bits(op(chosen_TK, "triton"), inputs_of(chosen_TK), torch.bfloat16)


def test_a_row_does_not_depend_on_the_others() -> None:
    """The kernels alone: which bits a product gives is up to the library, and tested on a GPU."""
    from harts.ops.moe.experts_triton import _Combine

    y, weight, slots = draw(74, SIZE, seed=1), draw(37, 2, seed=2), torch.randperm(74).view(37, 2).to(DEVICE)
    shared, x, gate = draw(37, SIZE, seed=3), draw(37, SIZE, seed=4), draw(SIZE, seed=5)
    whole = _Combine.apply(y, weight, slots, shared, x, gate)
    part = _Combine.apply(y, weight[5:6], slots[5:6], shared[5:6], x[5:6], gate)
    assert torch.equal(whole[5:6], part)


def test_experts_of_a_row_count_in_any_order() -> None:
    chosen_TK = choices(13, 3)
    inputs = inputs_of(chosen_TK)
    turned = [x.flip(1) if i == 1 and x is not None else x for i, x in enumerate(inputs)]
    first, second = (
        run(op(c, "reference"), x, torch.float64)[0] for c, x in ((chosen_TK, inputs), (chosen_TK.flip(1), turned))
    )
    assert float((first - second).abs().max()) < 1e-12


@pytest.mark.parametrize("family", ["qwen3_5_moe", "qwen3_next", "qwen3_moe"])
def test_reference_equals_transformers(family: str) -> None:
    import importlib

    from harts.models import tiny_model

    model = tiny_model(f"tiny-{family.replace('_', '-').replace('3-5', '3.5')}", dtype=torch.float64)
    block = model.model.layers[0].mlp.to(DEVICE)
    stem = {"qwen3_5_moe": "Qwen3_5Moe", "qwen3_next": "Qwen3Next", "qwen3_moe": "Qwen3Moe"}[family]
    theirs = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    assert type(block) is getattr(theirs, f"{stem}SparseMoeBlock")
    x = draw(1, 29, 64, seed=1, dtype=torch.float64).requires_grad_()
    direction = draw(1, 29, 64, seed=2, dtype=torch.float64)
    leaves = [x, *block.parameters()]
    with all_fp64():
        expected = block(x)
        grads = torch.autograd.grad((expected * direction).sum(), leaves)
        _, weight_TK, chosen_TK = block.gate(x[0])
        has_shared = hasattr(block, "shared_expert")
        out = run_experts(
            x[0],
            chosen_TK,
            weight_TK,
            block.experts.gate_up_proj,
            block.experts.down_proj,
            shared_TD=block.shared_expert(x[0]) if has_shared else None,
            shared_gate_D=block.shared_expert_gate.weight[0] if has_shared else None,
            impl="reference",
        )
        ours = torch.autograd.grad((out * direction[0]).sum(), leaves)
    assert float((out - expected[0]).detach().abs().max()) < 1e-10
    for a, b in zip(ours, grads, strict=True):
        assert float((a - b).norm() / b.norm()) < 1e-10


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_halves_keep_to_the_reference(dtype: torch.dtype) -> None:
    for shape in ((37, 50), (2, 5, 2200), (8,)):
        inputs = [draw(*shape, seed=1)]
        assert_kernel_law(
            lambda x: fused.swiglu_halves(x, impl="triton"),
            lambda x: fused.swiglu_halves(x, impl="reference"),
            inputs,
            dtype,
        )
    gate, up = draw(9, 6, seed=1).chunk(2, -1)
    assert torch.equal(
        fused.swiglu_halves(torch.cat([gate, up], -1), impl="triton"), fused.swiglu(gate, up, impl="triton")
    )


def test_bad_input_is_refused() -> None:
    chosen_TK = choices(4, 2)
    x, weight, gate_up, down, shared, gate = inputs_of(chosen_TK)
    good = {"shared_TD": shared, "shared_gate_D": gate, "impl": "triton"}
    with pytest.raises(ValueError, match=r"expected gate_up of shape \[5, 32, 24\], got \[5, 16, 24\]"):
        run_experts(x, chosen_TK, weight, gate_up[:, :16], down, **good)
    with pytest.raises(ValueError, match=r"expected weight of shape \[4, 2\]"):
        run_experts(x, chosen_TK, weight[:, :1], gate_up, down, **good)
    with pytest.raises(ValueError, match="expected shared and shared_gate together"):
        run_experts(x, chosen_TK, weight, gate_up, down, shared_TD=shared, impl="triton")
    with pytest.raises(ValueError, match="expected chosen in int64"):
        run_experts(x, chosen_TK.int(), weight, gate_up, down, **good)
    with pytest.raises(ValueError, match="expected weight of one dtype"):
        run_experts(x, chosen_TK, weight.double(), gate_up, down, **good)
    with pytest.raises(ValueError, match="expected one of 'reference', 'triton'"):
        run_experts(x, chosen_TK, weight, gate_up, down, impl="cuda")
    with pytest.raises(ValueError, match="I of a multiple of 16 bytes"):
        run_experts(x, chosen_TK, weight, gate_up[:, :6], down[..., :3], impl="triton")
    with pytest.raises(ValueError, match=r"K >= 1"):
        run_experts(x, chosen_TK[:, :0], weight[:, :0], gate_up, down, impl="reference")
    if DEVICE.type == "cpu":
        with pytest.raises(ValueError, match=r"expected chosen in \[0, 5\)"):
            run_experts(x, chosen_TK + 3, weight, gate_up, down, **good)
    with pytest.raises(ValueError, match="even number of channels"):
        fused.swiglu_halves(x[:, :3], impl="reference")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_bits_of_rows_at_the_size_of_a_real_model() -> None:
    """Qwen3.5-35B-A3B's experts: a row has its bits beside any others, and two runs have the same gradients."""
    rows, size, inside, experts, per_row = 5000, 2048, 512, 256, 8
    generator = torch.Generator(DEVICE).manual_seed(0)

    def make(*shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(*shape, generator=generator, device=DEVICE, dtype=torch.bfloat16) * scale

    score_TE = torch.rand(rows, experts - 1, generator=generator, device=DEVICE)  # the last expert gets no row
    chosen_TK = score_TE.topk(per_row).indices
    x, weight, shared, gate = make(rows, size), make(rows, per_row), make(rows, size), make(size, scale=0.02)
    gate_up, down = make(experts, 2 * inside, size, scale=0.02), make(experts, size, inside, scale=0.02)
    leaves = [each.requires_grad_() for each in (x, weight, gate_up, down, shared, gate)]

    def call(stop: int) -> Tensor:
        part = {"shared_TD": shared[:stop], "shared_gate_D": gate, "impl": "triton"}
        return run_experts(x[:stop], chosen_TK[:stop], weight[:stop], gate_up, down, **part)

    with torch.no_grad():
        whole = call(rows)
        for stop in (1, 63, 1000, 2100, 2500):
            assert torch.equal(call(stop), whole[:stop]), stop
    direction = make(rows, size)
    runs = [torch.autograd.grad(call(rows), leaves, direction) for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
    assert not runs[0][2][-1].any()
