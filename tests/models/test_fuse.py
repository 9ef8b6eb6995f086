"""A fused model is the same model up to rounding, and can be taken apart again."""

import os

import pytest
import torch
from torch import Tensor, nn

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from harts.layout import PackedTree, pack
from harts.models import attach, detach, logprobs, tiny_model
from harts.models.fuse import fuse, unfuse
from harts.testing.trees import AWKWARD
from harts.tree import PrefixTree

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def packed_tree() -> PackedTree:
    return pack(PrefixTree.build(AWKWARD["one-token branches"]), device=DEVICE)


def run(model: nn.Module, packed: PackedTree) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    values = logprobs(model, packed)
    values.sum().backward()
    return values.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_fused_model_equals_the_plain_one(impl: str) -> None:
    packed, model = packed_tree(), attach(tiny_model("tiny-qwen3.5")).to(DEVICE)
    values, grads = run(model, packed)
    fuse(model, impl=impl)
    fused_values, fused_grads = run(model, packed)
    assert torch.allclose(values, fused_values, atol=1e-5)
    assert list(grads) == list(fused_grads)
    for name, grad in grads.items():
        assert torch.allclose(grad, fused_grads[name], rtol=1e-4, atol=1e-4 * float(grad.abs().max())), name


def test_every_norm_mlp_and_attention_is_swapped_and_swapped_back() -> None:
    model = attach(tiny_model("tiny-qwen3.5"))
    before = [type(module).__name__ for module in model.modules()]
    names = list(model.state_dict())
    fuse(model, impl="reference")
    kinds = [type(module).__name__ for module in model.modules()]
    for kind in ("RMSNorm", "RMSNormGated", "MLP", "Attention"):
        assert before.count(f"Qwen3_5{kind}") == kinds.count(f"FusedQwen3_5{kind}") > 0
    assert list(model.state_dict()) == names
    unfuse(model)
    assert [type(module).__name__ for module in model.modules()] == before


def test_plain_batches_still_run() -> None:
    model = attach(tiny_model("tiny-qwen3.5")).to(DEVICE)
    tokens = torch.arange(12, device=DEVICE)[None]
    expected = model(tokens, use_cache=False).logits
    fuse(model, impl="reference")
    assert torch.allclose(model(tokens, use_cache=False).logits, expected, atol=1e-5)
    detach(unfuse(model))
    assert torch.equal(model(tokens, use_cache=False).logits, expected)


def test_bad_input_is_refused() -> None:
    with pytest.raises(ValueError, match=r"call harts\.attach"):
        fuse(tiny_model("tiny-qwen3.5"))
    with pytest.raises(ValueError, match="expected one of qwen3_5_text"):
        fuse(attach(tiny_model("tiny-llama")))
    with pytest.raises(ValueError, match="expected one of 'reference', 'triton'"):
        fuse(attach(tiny_model("tiny-qwen3.5")), impl="cuda")


def test_a_fused_model_runs_plain_batches_eagerly_and_detaches_whole() -> None:
    model = tiny_model("tiny-qwen3.5")
    model.set_attn_implementation("eager")
    before = [type(module) for module in model.modules()]
    ids = torch.arange(1, 30).unsqueeze(0)
    expected = model(input_ids=ids).logits
    fuse(attach(model), impl="reference")
    assert torch.allclose(model(input_ids=ids).logits, expected, atol=1e-5)
    detach(model)
    assert [type(module) for module in model.modules()] == before
    assert torch.equal(model(input_ids=ids).logits, expected)
    logprobs(attach(model), pack(PrefixTree.build(AWKWARD["star"])))
