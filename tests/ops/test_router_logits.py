"""Router logits: the plain product, rounded once, and the same bits whatever rows come along."""

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear
from torch.utils._python_dispatch import TorchDispatchMode

from harts.ops.moe import router_logits, router_logits_reference

EXPERTS, SIZE, CHUNK = 6, 24, 16


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harts.ops.moe.router._CHUNK_ROWS", CHUNK)


def draw(rows: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    hidden = torch.randn(rows, SIZE, dtype=torch.float64, generator=generator)
    weight = torch.randn(EXPERTS, SIZE, dtype=torch.float64, generator=generator)
    return hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_()


class Products(TorchDispatchMode):
    """Notes the shapes and dtypes of every matrix product."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[tuple[int, ...], torch.dtype]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        if func is torch.ops.aten.mm.default:
            self.seen.append((tuple(args[0].shape), args[0].dtype))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("rows", [1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 5])
def test_values_and_gradients_of_the_plain_product(rows: int) -> None:
    hidden, weight = draw(rows)
    grad = torch.randn(rows, EXPERTS, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    ours, plain = router_logits(hidden, weight), router_logits_reference(hidden, weight)
    assert float((ours - plain).detach().abs().max()) < 1e-12
    ours_grads = torch.autograd.grad(ours, (hidden, weight), grad)
    for mine, theirs in zip(ours_grads, torch.autograd.grad(plain, (hidden, weight), grad), strict=True):
        assert float((mine - theirs).abs().max()) < 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision_is_rounded_once(dtype: torch.dtype) -> None:
    hidden, weight = draw(3 * CHUNK + 5, dtype)
    ours = router_logits(hidden, weight)
    assert ours.dtype == torch.float32
    exact = hidden.detach().double() @ weight.detach().double().T
    assert ((ours.detach().double() - exact).abs() <= exact.abs() * 2**-24 + 1e-12).all()
    grads = torch.autograd.grad(ours, (hidden, weight), torch.ones_like(ours))
    assert [grad.dtype for grad in grads] == [dtype, dtype]
    expected = weight.detach().double().sum(0).to(dtype)
    assert torch.allclose(grads[0], expected.expand_as(grads[0]), rtol=2 * torch.finfo(dtype).eps)
    mixed = router_logits(hidden.detach(), weight.detach().float())
    assert torch.equal(mixed, ours)


def test_all_products_of_a_forward_are_of_one_shape_in_fp64() -> None:
    for rows in (1, CHUNK, 2 * CHUNK + 3):
        with Products() as products:
            router_logits(*draw(rows, torch.bfloat16))
        assert products.seen == [((CHUNK, SIZE), torch.float64)] * -(-rows // CHUNK)


def test_bits_do_not_depend_on_the_rows_beside() -> None:
    hidden, weight = draw(3 * CHUNK + 5, torch.float32)
    whole = router_logits(hidden, weight)
    for start, stop in ((0, 1), (0, CHUNK), (5, 2 * CHUNK), (CHUNK + 1, 3 * CHUNK + 5)):
        assert torch.equal(router_logits(hidden[start:stop], weight), whole[start:stop])


@pytest.fixture
def _fast_settings() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    with torch.autocast("cpu", torch.bfloat16):
        yield
    torch.set_float32_matmul_precision(before)


def test_settings_change_nothing_and_are_not_changed(request: pytest.FixtureRequest) -> None:
    hidden, weight = draw(2 * CHUNK, torch.float32)
    expected = router_logits(hidden, weight)
    grads = torch.autograd.grad(expected.square().sum(), (hidden, weight))
    request.getfixturevalue("_fast_settings")
    ours = router_logits(hidden, weight)
    assert torch.equal(ours, expected)
    assert not torch.equal(linear(hidden, weight).float(), expected)  # the settings do change products in fp32
    for mine, theirs in zip(torch.autograd.grad(ours.square().sum(), (hidden, weight)), grads, strict=True):
        assert torch.equal(mine, theirs)
    assert torch.get_float32_matmul_precision() == "medium"
    assert torch.is_autocast_enabled("cpu")


def test_gradients_that_are_not_needed_are_not_computed() -> None:
    hidden, weight = draw(CHUNK)
    with Products() as products:
        router_logits(hidden.detach(), weight).sum().backward()
    assert hidden.grad is None
    assert weight.grad is not None
    assert len(products.seen) == 2


def test_bad_input_is_refused() -> None:
    hidden, weight = draw(4)
    with pytest.raises(ValueError, match=r"got \[4, 23\] and \[6, 24\]"):
        router_logits(hidden[:, 1:], weight)
    with pytest.raises(ValueError, match=r"on one device, got cpu and meta"):
        router_logits(hidden, weight.to("meta"))
    with pytest.raises(ValueError, match=r"floating-point hidden and weight, got torch.int64"):
        router_logits(hidden.detach().long(), weight)
