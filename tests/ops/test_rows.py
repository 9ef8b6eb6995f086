"""Duplicated rows and their sums."""

import pytest
import torch
from kernel_law import DEVICE, assert_kernel_law, assert_same_bits, draw

from harts.ops.rows import RowIndex, gather_rows, group_rows, segment_sum

IMPLS = ["reference", "triton"]


def index_of(length: int, rows: int, seed: int) -> torch.Tensor:
    return torch.randint(0, rows, (length,), generator=torch.Generator().manual_seed(seed)).to(DEVICE)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(("rows", "length", "shape"), [(7, 40, (3, 5)), (50, 20, ()), (1, 9, (130,)), (30, 300, (2,))])
def test_gather_equals_index_select(rows: int, length: int, shape: tuple[int, ...], impl: str) -> None:
    index = index_of(length, rows, seed=rows)
    assert_kernel_law(
        lambda x: gather_rows(x, RowIndex(index, rows), impl=impl),
        lambda x: x.index_select(0, index),
        [draw(rows, *shape, seed=1)],
    )


@pytest.mark.parametrize("impl", IMPLS)
def test_missing_rows_read_zeros_and_receive_nothing(impl: str) -> None:
    index = torch.tensor([2, 3, 0, 3, 2], device=DEVICE)
    x = draw(3, 4, seed=1).requires_grad_()
    out = gather_rows(x, RowIndex(index, 3), missing=True, impl=impl)
    assert torch.equal(out[[1, 3]], torch.zeros(2, 4, device=DEVICE))
    (grad,) = torch.autograd.grad(out.sum(), x)
    assert grad[:, 0].tolist() == [1, 0, 2]


@pytest.mark.parametrize("impl", IMPLS)
def test_sum_adds_to_what_is_there(impl: str) -> None:
    index, values = index_of(60, 9, seed=3), draw(60, 6, seed=4, dtype=torch.bfloat16)
    start = draw(9, 6, seed=5)
    total = segment_sum(values, group_rows(index, 9), out=start.clone(), impl=impl)
    assert torch.allclose(total, start.index_add(0, index, values.float()), atol=1e-4)


def test_entries_add_in_their_order() -> None:
    """1e8 - 1e8 + 1 is 1 only if the additions run from left to right."""
    values = torch.tensor([1e8, -1e8, 1.0, 1.0, 1e8, -1e8], device=DEVICE)
    index = torch.tensor([0, 0, 0, 1, 1, 1], device=DEVICE)
    for impl in IMPLS:
        assert segment_sum(values, group_rows(index, 2), impl=impl).tolist() == [1.0, 0.0]


def test_groups_are_sorted_once() -> None:
    index = RowIndex(index_of(20, 5, seed=1), 5)
    assert index.groups is index.groups
    assert index.groups.num_rows == 5
    assert torch.equal(index.groups.order_K, group_rows(index.index_K, 5).order_K)


def test_equal_runs_give_equal_bits() -> None:
    index = RowIndex(index_of(500, 11, seed=2), 11)
    assert_same_bits(lambda x: gather_rows(x, index, impl="triton"), [draw(11, 33, seed=1)], torch.bfloat16)


def test_bad_input_is_refused() -> None:
    x = draw(3, 2, seed=1)
    rows = torch.zeros(2, dtype=torch.int64, device=DEVICE)
    with pytest.raises(ValueError, match="int64 index"):
        gather_rows(x, RowIndex(rows.int(), 3))
    with pytest.raises(ValueError, match="into 3 rows"):
        gather_rows(x, RowIndex(rows, 4))
    with pytest.raises(ValueError, match="expected one of 'reference', 'triton'"):
        gather_rows(x, RowIndex(rows, 3), impl="cuda")
    with pytest.raises(ValueError, match="expected 2 values"):
        segment_sum(x, group_rows(torch.zeros(2, dtype=torch.int64, device=DEVICE), 3))
