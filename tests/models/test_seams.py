"""What people put around and into a model: it works as in the model's own forward, or is refused by name."""

import functools
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import Qwen3ForCausalLM

import harts
from harts.models import recompute_activations, tiny_model
from harts.ops.kernels import Kernels
from harts.testing.fp64 import all_fp64
from harts.testing.trees import AWKWARD
from harts.trajectory import Trajectory
from harts.tree import PrefixTree

Put = Callable[[Any], Any]

ROWS = AWKWARD["star"]
PACKED = harts.pack(PrefixTree.build(ROWS))


def run_rows(model: Any, trajectories: list[Trajectory] = ROWS) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies [N] from the logits of the model's own forward, one row at a time."""
    parts = []
    for trajectory in trajectories:
        ids = torch.tensor(trajectory.token_ids, dtype=torch.int64)[None]
        logits_LV = model(input_ids=ids, use_cache=False).logits[0, :-1]
        logp_LV = logits_LV.to(torch.promote_types(logits_LV.dtype, torch.float32)).log_softmax(-1)
        values = torch.stack([logp_LV.gather(-1, ids[0, 1:, None])[:, 0], -(logp_LV.exp() * logp_LV).sum(-1)])
        parts.append(torch.cat([values.new_zeros(2, 1), values * torch.tensor(trajectory.loss_mask)[1:]], 1))
    logprobs_N, entropy_N = torch.cat(parts, 1)
    return logprobs_N, entropy_N


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    names, parameters = zip(*model.named_parameters(), strict=True)
    found = torch.autograd.grad(loss, parameters, allow_unused=True)
    return {name: grad for name, grad in zip(names, found, strict=True) if grad is not None}


# -- honoured --------------------------------------------------------------------------------------------------------


def head_hook(model: Any) -> None:
    model.lm_head.register_forward_hook(lambda module, args, output: 0.25 * output)


def head_pre_hook(model: Any) -> None:
    model.lm_head.register_forward_pre_hook(lambda module, args: (2 * args[0].tanh(),))


def head_forward(model: Any) -> None:
    head = model.lm_head
    head.forward = lambda hidden: 3 * nn.functional.linear(hidden, head.weight)


def decoder_hook(model: Any) -> None:
    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        output.last_hidden_state = 1.5 * output.last_hidden_state
        return output

    model.model.register_forward_hook(hook)


def decoder_pre_hook(model: Any) -> None:
    def swap_tokens(module: nn.Module, args: Any, kwargs: Any) -> Any:
        return args, {**kwargs, "input_ids": 511 - kwargs["input_ids"]}

    model.model.register_forward_pre_hook(swap_tokens, with_kwargs=True)


def decoder_forward(model: Any) -> None:
    forward = model.model.forward

    def scaled(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        output.last_hidden_state = 0.5 * output.last_hidden_state
        return output

    model.model.forward = scaled


def layer_hook(model: Any) -> None:
    model.model.layers[1].register_forward_hook(lambda module, args, output: output + 0.5)


def embedding_hook(model: Any) -> None:
    model.model.embed_tokens.register_forward_hook(lambda module, args, output: output + 0.5)


class Scaled(Qwen3ForCausalLM):  # type: ignore[misc]
    """Does to logits what its config says, as Granite and Gemma do."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        output.logits = output.logits / self.config.logits_scaling
        if (cap := self.config.final_logit_softcapping) is not None:
            output.logits = cap * torch.tanh(output.logits / cap)
        return output


def scaled(model: Any, cap: float | None = None) -> None:
    model.config.logits_scaling, model.config.final_logit_softcapping = 4.0, cap
    model.__class__ = Scaled


HONOURED: dict[str, Put] = {
    "head hook": head_hook,
    "head pre-hook": head_pre_hook,
    "head forward": head_forward,
    "decoder hook": decoder_hook,
    "decoder pre-hook": decoder_pre_hook,
    "decoder forward": decoder_forward,
    "layer hook": layer_hook,
    "embedding hook": embedding_hook,
    "logits scaling": scaled,
    "soft-capping": functools.partial(scaled, cap=2.0),
}


@pytest.mark.parametrize("name", HONOURED)
@pytest.mark.parametrize("when", ["before attach", "after attach"])
def test_what_changes_values_does_so_on_the_tree_too(name: str, when: str) -> None:
    with all_fp64():
        model = tiny_model("tiny-qwen3", dtype=torch.float64)
        plain = torch.stack(run_rows(model)).detach()
        if when == "after attach":
            harts.attach(model)
        HONOURED[name](model)
        weight = torch.randn(2, PACKED.num_tokens, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        expected = torch.stack(run_rows(model))  # an attached model runs plain batches as before
        expected_grads = gradients(model, (expected * weight).sum())
        assert float((expected.detach() - plain).abs().max()) > 1e-3, "what was put in does something"
        kernels = Kernels(chunk_rows=7)
        scores = harts.logprobs(harts.attach(model), PACKED, entropy=True, top_k=1, kernels=kernels)
        assert scores.entropy_N is not None
        assert scores.top_logprobs_NK is not None
        ours = torch.stack([scores.logprobs_N, scores.entropy_N])
        grads = gradients(model, (ours * weight).sum())
        assert torch.equal(scores.logprobs_N, harts.logprobs(model, PACKED, kernels=kernels))
    assert float((ours - expected).detach().abs().max()) < 1e-10
    assert (scores.top_logprobs_NK[:, 0] >= scores.logprobs_N - 1e-12).all()
    assert grads.keys() == expected_grads.keys()
    for parameter, grad in expected_grads.items():
        assert float((grads[parameter] - grad).norm()) <= 1e-8 * float(grad.norm()), parameter


def test_a_head_in_fp32_behind_a_cast_runs_in_fp32() -> None:
    model: Any = tiny_model("tiny-qwen3.5", dtype=torch.bfloat16)
    model.lm_head.weight.data = model.lm_head.weight.data.float()
    model.lm_head.register_forward_pre_hook(lambda module, args: (args[0].float(),))
    scores = harts.logprobs(harts.attach(model), PACKED, hidden=True)
    assert scores.hidden_N is not None
    assert scores.hidden_N.dtype == torch.bfloat16
    logp_NV = nn.functional.linear(scores.hidden_N.float(), model.lm_head.weight).log_softmax(-1)
    expected = logp_NV.gather(1, PACKED.token_ids_T[PACKED.row_of_N][:, None])[:, 0] * PACKED.loss_mask_N
    assert float((scores.logprobs_N - expected).detach().abs().max()) < 1e-5


def test_a_head_in_another_dtype_without_a_cast_is_refused() -> None:
    model: Any = tiny_model("tiny-qwen3", dtype=torch.bfloat16)
    model.lm_head.float()
    with pytest.raises(ValueError, match=r"expected hidden states in the head's dtype torch.float32, got torch.bf"):
        harts.logprobs(harts.attach(model), PACKED)


def test_recomputation_and_a_head_that_is_called_give_the_same_gradients() -> None:
    with all_fp64():
        model: Any = harts.attach(tiny_model("tiny-qwen3", dtype=torch.float64))
        head_hook(model)
        expected = gradients(model, harts.logprobs(model, PACKED).sum())
        found = gradients(model, harts.logprobs(recompute_activations(model), PACKED).sum())
    assert all(torch.allclose(found[name], grad, rtol=0, atol=1e-12) for name, grad in expected.items())


def test_a_hook_may_forbid_tokens() -> None:
    """Logits of -inf: such a token adds nothing to the entropy, and gradients stay finite."""
    forbidden = next(i for i in range(512) if i not in PACKED.token_M.tolist())
    bias = torch.zeros(512).index_fill(0, torch.tensor([forbidden]), float("-inf"))
    model: Any = harts.attach(tiny_model("tiny-qwen3"))
    model.lm_head.register_forward_hook(lambda module, args, output: output + bias)
    scores = harts.logprobs(model, PACKED, entropy=True)
    assert scores.entropy_N is not None
    assert (scores.entropy_N[PACKED.loss_mask_N] > 0).all()
    grads = gradients(model, (scores.logprobs_N + scores.entropy_N).sum())
    assert all(bool(grad.isfinite().all()) for grad in grads.values())


def test_options_that_the_forward_does_not_read_change_nothing() -> None:
    model = tiny_model("tiny-qwen3", logits_scaling=4.0, final_logit_softcapping=1.0)
    expected, _ = run_rows(model)
    assert float((harts.logprobs(harts.attach(model), PACKED) - expected).detach().abs().max()) < 1e-5


@pytest.mark.parametrize("value", [0, -1.0, float("inf"), "4", True])
def test_options_that_are_no_numbers_above_zero_are_refused(value: Any) -> None:
    model: Any = tiny_model("tiny-qwen3")
    scaled(model)
    model.config.logits_scaling = value
    with pytest.raises(ValueError, match=r"config\.logits_scaling: expected a number above 0 or None, got "):
        harts.logprobs(harts.attach(model), PACKED)


@pytest.mark.parametrize("preset", ["tiny-qwen3", "tiny-qwen3.5"])
def test_autocast_runs_as_in_the_models_own_forward(preset: str) -> None:
    model = tiny_model(preset)
    with torch.autocast("cpu", torch.bfloat16):
        expected, _ = run_rows(model)
        harts.attach(model)
        ours = harts.logprobs(model, PACKED)
    full = harts.logprobs(model, PACKED)
    assert float((ours - expected).detach().abs().max()) < 0.01
    assert float((ours - full).detach().abs().max()) > 1e-4
    grads, expected_grads = gradients(model, ours.sum()), gradients(model, full.sum())
    for name, grad in expected_grads.items():
        assert float((grads[name] - grad).norm()) <= 0.1 * float(grad.norm()), name


# -- refused ---------------------------------------------------------------------------------------------------------


class Shifted(Qwen3ForCausalLM):  # type: ignore[misc]
    """A forward of one's own, whose logits nothing says how to get."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        output.logits = output.logits - 1
        return output


class Calling(Qwen3ForCausalLM):  # type: ignore[misc]
    """The same one step further out."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return super().__call__(*args, **kwargs)


def become(kind: type[nn.Module]) -> Put:
    return lambda model: setattr(model, "__class__", kind)


def own_forward(model: Any) -> None:
    forward = model.forward
    model.forward = lambda *args, **kwargs: forward(*args, **kwargs)


def method_with_wraps(model: Any) -> None:
    """Looks like the class's own, as far as names go."""
    forward = type(model).forward

    @functools.wraps(forward)
    def shifted(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = forward(self, *args, **kwargs)
        output.logits = output.logits - 1
        return output

    model.forward = types.MethodType(shifted, model)


class Wrapped(Qwen3ForCausalLM):  # type: ignore[misc]
    """The same as a class."""

    @functools.wraps(Qwen3ForCausalLM.forward)
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        output.logits = output.logits - 1
        return output


def prepared(model: Any) -> None:
    accelerate = pytest.importorskip("accelerate")
    accelerate.Accelerator(mixed_precision="bf16", cpu=True).prepare(model)


def wrong_shape(model: Any) -> None:
    model.lm_head.register_forward_hook(lambda module, args, output: output[..., :100])


def wrong_rows(model: Any) -> None:
    model.model.register_forward_hook(lambda module, args, output: (output[0][:, 1:],))


def loses_arguments(model: Any) -> None:
    forward = model.model.layers[1].forward
    model.model.layers[1].forward = lambda hidden, **kwargs: forward(
        hidden, **{name: value for name, value in kwargs.items() if name not in ("packed", "kernels")}
    )


AROUND: dict[str, tuple[Put, str]] = {
    "forward hook": (
        lambda model: model.register_forward_hook(lambda module, args, output: None),
        r"forward hook '.*<lambda>' of model \(Qwen3ForCausalLM\) would not run",
    ),
    "forward pre-hook": (
        lambda model: model.register_forward_pre_hook(lambda module, args: None),
        r"forward pre-hook '.*<lambda>' of model \(Qwen3ForCausalLM\) would not run",
    ),
    "backward hook": (
        lambda model: model.register_full_backward_hook(lambda module, inputs, outputs: None),
        r"backward hook '.*' of model \(Qwen3ForCausalLM\) would not run",
    ),
    "backward pre-hook": (
        lambda model: model.register_full_backward_pre_hook(lambda module, outputs: None),
        r"backward pre-hook '.*' of model \(Qwen3ForCausalLM\) would not run",
    ),
    "instance forward": (own_forward, r"the forward that was set on model \(Qwen3ForCausalLM\) itself, 'own_forward"),
    "method": (method_with_wraps, r"the forward that was set on model \(Qwen3ForCausalLM\) itself"),
    "wrapped subclass": (become(Wrapped), r"Wrapped\.forward, which model \(Wrapped\) has in place of transformers'"),
    "subclass": (become(Shifted), r"Shifted\.forward, which model \(Shifted\) has in place of transformers' own"),
    "subclass call": (become(Calling), r"Calling\.__call__, which model \(Calling\) has in place of"),
    "in-place compile": (
        lambda model: model.compile(),
        r"compile\(\) of model \(Qwen3ForCausalLM\) would be passed by",
    ),
    "compiled decoder": (lambda model: model.model.compile(), r"compile\(\) of the decoder \(Qwen3Model\)"),
    "compiled head": (lambda model: model.lm_head.compile(), r"compile\(\) of the head \(Linear\)"),
    "accelerate": (prepared, r"accelerate's autocast wrapper of model \(Qwen3ForCausalLM\) would be passed by"),
}
"""What is refused when attaching, and at every later call where it came afterwards."""


@pytest.mark.parametrize("name", AROUND)
def test_what_would_be_passed_by_is_refused_at_attach_and_at_logprobs(name: str) -> None:
    put, message = AROUND[name]
    before, after = tiny_model("tiny-qwen3"), harts.attach(tiny_model("tiny-qwen3"))
    harts.logprobs(after, PACKED)
    for model in (before, after):
        put(model)
    with pytest.raises(ValueError, match=message):
        harts.attach(before)
    with pytest.raises(ValueError, match=message):
        harts.logprobs(after, PACKED)


def test_a_compiled_model_is_refused() -> None:
    model = tiny_model("tiny-qwen3")
    compiled: Any = torch.compile(model)
    with pytest.raises(ValueError, match=r"torch\.compile of model would be passed by; give .* \(model\._orig_mod\)"):
        harts.attach(compiled)
    harts.attach(model)
    with pytest.raises(ValueError, match=r"torch\.compile of model would be passed by"):
        harts.logprobs(compiled, PACKED)


@pytest.mark.parametrize(
    ("put", "message"),
    [
        (wrong_shape, r"expected logits \[1, \d+, 512\] of the head, got \[1, \d+, 100\]"),
        (wrong_rows, r"expected hidden states \[1, \d+, channels\] of the decoder, got \[1, \d+, 64\]"),
        (loses_arguments, r"expected its 2 mixers to run on the tree, 1 did; a hook or a forward .* packed="),
    ],
)
def test_hooks_that_change_shapes_or_lose_the_tree_are_refused(put: Put, message: str) -> None:
    model = harts.attach(tiny_model("tiny-qwen3"))
    put(model)
    with pytest.raises(ValueError, match=message):
        harts.logprobs(model, PACKED)


@pytest.mark.parametrize("outside", ["peft", "wrapper of the head"])
def test_hooks_on_wrappers_of_peft_are_refused_where_they_lie(outside: str) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"])
    lora = peft.get_peft_model(tiny_model("tiny-qwen3"), config)
    harts.logprobs(harts.attach(lora), PACKED)
    where = lora.base_model if outside == "peft" else lora.base_model.model.lm_head
    handle = where.register_forward_hook(lambda module, args, output: output)
    message = (
        r"of model\.base_model \(LoraModel\)" if outside == "peft" else r"peft's ModulesToSaveWrapper around the head"
    )
    with pytest.raises(ValueError, match=message):
        harts.logprobs(lora, PACKED)
    handle.remove()
    harts.logprobs(lora, PACKED)


def test_what_lies_inside_a_wrapper_of_peft_counts() -> None:
    """The wrapper passes on what it lacks, and is not the model in it."""
    peft = pytest.importorskip("peft")
    model = tiny_model("tiny-qwen3")
    scaled(model)
    lora = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"])).eval()
    expected, _ = run_rows(lora)
    assert float((harts.logprobs(harts.attach(lora), PACKED) - expected).detach().abs().max()) < 1e-5
    own_forward(lora.base_model.model)
    with pytest.raises(ValueError, match=r"was set on model\.base_model\.model \(Scaled\) itself"):
        harts.logprobs(lora, PACKED)


def test_adapters_that_replace_attention_run() -> None:
    """peft's wrapper of this kind sets the forward of the model inside on itself."""
    peft = pytest.importorskip("peft")
    config = peft.AdaptionPromptConfig(adapter_len=4, adapter_layers=1, task_type="CAUSAL_LM")
    model = peft.get_peft_model(tiny_model("tiny-llama"), config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "adaption_gate" in name:
                parameter.fill_(0.5)
        expected, _ = run_rows(model)
        assert float((harts.logprobs(harts.attach(model), PACKED) - expected).abs().max()) < 1e-5


# -- seams -----------------------------------------------------------------------------------------------------------


def test_forwards_and_hooks_that_carry_the_mark_are_accepted() -> None:
    model: Any = tiny_model("tiny-qwen3")
    expected = harts.logprobs(harts.attach(model), PACKED)
    forward = model.forward

    def seam(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    def hook(module: nn.Module, args: Any, output: Any) -> None:
        return None

    for function in (seam, hook):
        function.__harts_seam__ = True  # type: ignore[attr-defined]
    model.forward = seam
    model.register_forward_hook(hook)
    assert torch.equal(harts.logprobs(harts.attach(model), PACKED), expected)
    model.config.logits_scaling = 2.0  # a seam stands for a forward that does what the config says
    scores = harts.logprobs(model, PACKED, hidden=True)
    assert scores.hidden_N is not None
    logp_NV = (model.lm_head(scores.hidden_N) / 2).log_softmax(-1)
    halved = logp_NV.gather(1, PACKED.token_ids_T[PACKED.row_of_N][:, None])[:, 0] * PACKED.loss_mask_N
    assert float((scores.logprobs_N - halved).detach().abs().max()) < 1e-5


def test_accelerates_wrapper_is_accepted_where_its_autocast_is_on_and_after_it_is_taken_off() -> None:
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(mixed_precision="bf16", cpu=True)
    model = tiny_model("tiny-qwen3")
    plain = harts.logprobs(harts.attach(model), PACKED)
    prepared = accelerator.prepare(model)
    expected, _ = run_rows(prepared)
    with accelerator.autocast():
        ours = harts.logprobs(harts.attach(prepared), PACKED)
    assert float((ours - expected).detach().abs().max()) < 1e-4
    assert float((ours - plain).detach().abs().max()) > 1e-4
    unwrapped = accelerator.unwrap_model(prepared, keep_fp32_wrapper=False)
    assert torch.equal(harts.logprobs(harts.attach(unwrapped), PACKED), plain)
