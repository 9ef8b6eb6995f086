"""Copies to a GPU go through pinned memory and wait for nothing."""

import pytest
import torch

from harts.layout import pack
from harts.ops.attention.pages import key_pages
from harts.testing.trees import AWKWARD
from harts.transfer import send
from harts.tree import PrefixTree


def test_what_is_there_already_stays() -> None:
    x = torch.arange(3)
    assert send(x, "cpu") is x


def test_only_copies_from_the_host_to_a_gpu_are_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []
    x = torch.arange(3)

    class Host(torch.Tensor):
        def pin_memory(self) -> torch.Tensor:  # type: ignore[override]
            calls.append("pinned")
            return self

        def to(self, *where: object, **how: object) -> torch.Tensor:  # type: ignore[override]
            calls.append((where, how))
            return self

    send(x.as_subclass(Host), "cuda:0")
    assert calls == ["pinned", (("cuda:0",), {"non_blocking": True})]
    calls.clear()
    send(x[:0].as_subclass(Host), "cuda:0")
    send(x.as_subclass(Host), "meta")
    assert calls == [(("cuda:0",), {}), (("meta",), {})]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_layout_arrives_whole_behind_a_busy_gpu() -> None:
    here = pack(PrefixTree.build(AWKWARD["comb"]))
    here.to("cuda")  # the first pinned memory waits
    torch.cuda.synchronize()
    square = torch.randn(8192, 8192, device="cuda")
    for _ in range(50):
        square = square @ square
    start, stop = (torch.cuda.Event() for _ in range(2))
    start.record()
    there = here.to("cuda")
    pages = there.layout(key_pages, 80)
    assert not start.query()  # nobody has waited
    stop.record()
    stop.synchronize()
    for name in ("token_ids_T", "position_T", "target_of_N", "temperature_U"):
        assert torch.equal(getattr(there, name).cpu(), getattr(here, name))
    for a, b in zip(pages, here.layout(key_pages, 80), strict=True):
        for field in ("copied_X", "first_row_CP", "cu_queries_C1", "key_length_C"):
            assert torch.equal(getattr(a, field).cpu(), getattr(b, field))
