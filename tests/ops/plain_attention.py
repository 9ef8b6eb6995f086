"""A varlen kernel from the definition of attention, for the calls, pages and sums around the flash kernels."""

from collections.abc import Callable

import pytest
import torch
from kernel_law import assert_kernel_law, draw
from torch import Tensor

from harts.layout import PackedTree
from harts.ops import attention
from harts.ops.attention import branches
from harts.ops.attention.calls import Call
from harts.ops.attention.pages import KeyPages
from harts.ops.attention.paths import attend_paths


class PlainPaged:
    """A forward over pages, from the definition: whole pages of a path one after the other, masked behind its end."""

    def __init__(self, page_rows: int) -> None:
        self.page_rows = page_rows

    def __call__(self, q, k_pages, v_pages, pages: KeyPages, scale: float) -> tuple[Tensor, Tensor]:
        chains = zip(q.split(list(pages.query_lengths)), pages.first_row_CP.long(), pages.key_lengths, strict=True)
        parts = []
        for q_path, first_row, length in chains:
            used = first_row[: -(-length // self.page_rows)]
            keys, values = (x[used].flatten(0, 1) for x in (k_pages, v_pages))
            parts.append(attend(q_path, keys, values, scale, length, window=pages.window))
        return torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts], 1)


class PlainKernel:
    """What a flash kernel computes, from the definition; its backward takes sums over all keys from the forward."""

    def __init__(self, page_rows: int | None = None, *, leaves_gaps: bool = False, key_tile: int = 1) -> None:
        self.paged = None if page_rows is None else PlainPaged(page_rows)
        self.leaves_gaps = leaves_gaps
        self.key_tile = key_tile

    def forward(self, q, k, v, call: Call, scale: float) -> tuple[Tensor, Tensor]:
        parts = [attend(*path, scale, window=call.window) for path in paths(q, k, v, call)]
        return torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts], 1)

    def backward(self, grad, q, k, v, out, lse, call: Call, scale: float, deterministic: bool, into) -> None:
        grads = [into[0].fill_(torch.nan), *(x.zero_() for x in into[1:])]
        repeats = q.shape[1] // k.shape[1]
        parts = zip(
            paths(q, k, v, call),
            queries_of(grad, call),
            queries_of(out, call),
            queries_of(lse.T, call),
            paths(*grads, call),
            strict=True,
        )
        for (qs, ks, vs), do, o, row_lse, (dq, dk, dv) in parts:
            ks, vs = ks.repeat_interleave(repeats, 1), vs.repeat_interleave(repeats, 1)
            p = (torch.einsum("qhd,khd->hqk", qs, ks) * scale - row_lse.T.unsqueeze(-1)).exp()
            if call.causal:
                p = p.tril(len(ks) - len(qs)).triu(len(ks) - len(qs) + 1 - (call.window or len(ks)))
            ds = p * (torch.einsum("qhv,khv->hqk", do, vs) - (do * o).sum(-1).T.unsqueeze(-1)) * scale
            dq.copy_(torch.einsum("hqk,khd->qhd", ds, ks))
            dk += torch.einsum("hqk,qhd->khd", ds, qs).unflatten(1, (-1, repeats)).sum(2)
            dv += torch.einsum("hqk,qhv->khv", p, do).unflatten(1, (-1, repeats)).sum(2)


def attend(
    q_path, k_path, v_path, scale: float, length: int | None = None, *, window: int | None = None
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of the last rows of a path, which may be followed by rows that nobody sees."""
    above = (len(k_path) if length is None else length) - len(q_path)
    repeats = q_path.shape[1] // k_path.shape[1]
    scores = torch.einsum("qhd,khd->hqk", q_path, k_path.repeat_interleave(repeats, 1)) * scale
    hidden = torch.ones(scores.shape[1:], dtype=torch.bool, device=scores.device).triu(1 + above)
    if window is not None:
        hidden |= torch.ones_like(hidden).tril(above - window)
    scores = scores.masked_fill(hidden, -torch.inf)
    out = torch.einsum("hqk,khv->qhv", scores.softmax(-1), v_path.repeat_interleave(repeats, 1))
    return out, scores.logsumexp(-1)


def paths(q: Tensor, k: Tensor, v: Tensor, call: Call):
    """Views of the sequences of a call."""
    keys = list(call.key_lengths)
    return zip(queries_of(q, call), k.split(keys), v.split(keys), strict=True)


def queries_of(x: Tensor, call: Call) -> list[Tensor]:
    """Views of the queries of each sequence."""
    starts = call.cu_queries_C1[:-1].tolist()
    return [x[start : start + length] for start, length in zip(starts, call.query_lengths, strict=True)]


def inputs_of(packed: PackedTree, size: int = 8, heads: int = 4) -> list[Tensor]:
    rows = packed.num_rows
    return [draw(rows, heads, size, seed=1), draw(rows, 2, size, seed=2), draw(rows, 2, size, seed=3)]


def check_paths(packed: PackedTree, page_rows: int | None = None, *, truth: PackedTree | None = None) -> None:
    """Outputs and gradients, by branches or by paths, whichever the layout takes."""
    for leaves_gaps in (False, True):
        kernel = PlainKernel(page_rows, leaves_gaps=leaves_gaps)
        assert_kernel_law(
            lambda *x, kernel=kernel: attend_paths(*x, packed, 0.3, kernel, False),
            lambda *x: attention(*x, truth or packed, scale=0.3),
            inputs_of(packed),
        )


def share_much(patch: pytest.MonkeyPatch, query_cost: float = 0.0) -> None:
    """Small trees share keys in the backward."""
    patch.setattr(branches, "QUERY_COST", query_cost)
    patch.setattr(branches, "GATHERED_QUERY_COST", query_cost)
    patch.setattr(branches, "PART_COST", 0)


def check_what_lies_behind(packed: PackedTree, inputs: list[Tensor], op: Callable[..., Tensor]) -> None:
    q, k, v = inputs
    first = int(packed.chains.length_C[0])
    assert first < packed.num_rows
    before = op(q, k, v)[:first]
    k[first:], v[first:] = 1e6, -1e6
    assert torch.equal(op(q, k, v)[:first], before)


QUERY_COSTS = [0.0, 0.3, 1.0, 1e9]
"""All keys that two chains have in common are shared, most are, some, none."""
