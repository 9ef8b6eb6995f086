"""Tree-trained equals separately trained: whole models, against untouched transformers."""

import copy
import dataclasses
import statistics
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import harts
from harts.models import PRESETS, tiny_model
from harts.models.attach import find_backbone
from harts.ops.attention.calls import forward_calls
from harts.ops.kernels import Kernels
from harts.testing.fp64 import all_fp64
from harts.testing.judging import gradient_sizes
from harts.testing.trees import AWKWARD, random_trajectories
from harts.trajectory import Trajectory
from harts.tree import PrefixTree

SeparateRows = Callable[[nn.Module, list[Trajectory]], tuple[Tensor, Tensor]]

Run = tuple[Tensor, dict[str, Tensor]]

SHAPES = ["star", "comb", "lengths 63/64/65", "duplicates", "prefix of another", "forest", "one-token branches"]
HYBRID = "tiny-qwen3.5"


def weights_for(trajectories: list[Trajectory], dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(2, sum(map(len, trajectories)), dtype=torch.float64, generator=generator).to(dtype)


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    found = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    return {name: grad for name, grad in zip(parameters, found, strict=True) if grad is not None}


def differences(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> list[float]:
    assert ours.keys() == theirs.keys()
    return [float((ours[name] - theirs[name]).norm()) / size for name, size in gradient_sizes(theirs).items()]


def largest_difference(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    return max(differences(ours, theirs))


def run_rows(model: nn.Module, trajectories: list[Trajectory], separate_rows: SeparateRows) -> Run:
    """Log-probs and entropies [2, N] of rows run alone by transformers, and gradients of their weighted sum."""
    expected = torch.stack(separate_rows(model, trajectories))
    weight = weights_for(trajectories, expected.dtype)
    return expected.detach(), gradients(model, (expected * weight).sum())


def run_tree(model: nn.Module, trajectories: list[Trajectory]) -> Run:
    """The same of a tree."""
    harts.attach(model)
    packed = harts.pack(PrefixTree.build(trajectories))
    scores = harts.logprobs(model, packed, entropy=True)
    assert scores.entropy_N is not None
    ours = torch.stack([scores.logprobs_N, scores.entropy_N])
    found = gradients(model, (ours * weights_for(trajectories, ours.dtype)).sum())
    harts.detach(model)
    return ours.detach(), found


def compare(model: nn.Module, trajectories: list[Trajectory], separate_rows: SeparateRows) -> tuple[float, float]:
    """Largest difference of log-probs and entropies, and of gradients relative per parameter."""
    expected, expected_grads = run_rows(model, trajectories, separate_rows)
    ours, grads = run_tree(model, trajectories)
    return float((ours - expected).abs().max()), largest_difference(grads, expected_grads)


@pytest.mark.parametrize("shape", SHAPES)
def test_hybrid_model_in_fp64_on_awkward_trees(shape: str, separate_rows: SeparateRows) -> None:
    with all_fp64():
        model = tiny_model(HYBRID, dtype=torch.float64)
        logprob_error, grad_error = compare(model, AWKWARD[shape], separate_rows)
    assert logprob_error < 1e-10
    assert grad_error < 1e-8


@pytest.mark.parametrize("name", list(PRESETS))
def test_every_family_in_fp64_with_several_temperatures(name: str, separate_rows: SeparateRows) -> None:
    trajectories = [
        dataclasses.replace(trajectory, temperature=(0.7, 1.0, 1.3)[index % 3])
        for index, trajectory in enumerate(random_trajectories(np.random.default_rng(5), max_length=150))
    ]
    with all_fp64():
        logprob_error, grad_error = compare(tiny_model(name, dtype=torch.float64), trajectories, separate_rows)
    assert logprob_error < 1e-10
    assert grad_error < 1e-8


@pytest.mark.parametrize("name", list(PRESETS))
def test_fp32_is_no_further_from_fp64_than_wholly_untouched_code(name: str, separate_rows: SeparateRows) -> None:
    """Each side's error is measured from fp64; a sum of gradients over another order may round a few times worse."""
    trajectories = random_trajectories(np.random.default_rng(6), max_length=150)
    model = tiny_model(name)
    wide = copy.deepcopy(model).double()
    with all_fp64():
        exact, exact_grads = run_rows(wide, trajectories, separate_rows)
    rows, row_grads = run_rows(model, trajectories, separate_rows)
    ours, grads = run_tree(model, trajectories)
    assert float((ours - exact).abs().max()) < 3 * float((rows - exact).abs().max())
    worst = largest_difference(row_grads, exact_grads)
    assert largest_difference(grads, exact_grads) < 10 * worst < 1e-3  # normed queries of near zero round by luck
    usual, theirs = (statistics.median(differences(each, exact_grads)) for each in (grads, row_grads))
    assert usual < 1.5 * theirs


def test_caterpillar_of_a_thousand_branches_runs() -> None:
    """Half a million tokens in 2,000 rows; compared with its own trajectories, of which a few are run alone."""
    trajectories = AWKWARD["caterpillar"]
    with all_fp64(), torch.no_grad():
        model = harts.attach(tiny_model(HYBRID, dtype=torch.float64))
        packed = harts.pack(PrefixTree.build(trajectories), key_cap=20_000)
        assert len(forward_calls(packed)) > 10
        parts = packed.split(harts.logprobs(model, packed))
        for index in (0, 63, 500, 999):
            alone = harts.logprobs(model, harts.pack(PrefixTree.build([trajectories[index]])))
            assert float((parts[index] - alone).abs().max()) < 1e-10


def test_law_fails_with_broken_positions(separate_rows: SeparateRows) -> None:
    trajectories = AWKWARD["star"]
    with all_fp64(), torch.no_grad():
        model = tiny_model(HYBRID, dtype=torch.float64)
        expected, _ = separate_rows(model, trajectories)
        packed = harts.pack(PrefixTree.build(trajectories))
        broken = dataclasses.replace(packed, position_T=torch.arange(packed.num_rows))
        ours = harts.logprobs(harts.attach(model), broken)
    assert float((ours - expected).abs().max()) > 1e-6


def test_law_fails_when_rows_count_once_instead_of_once_per_trajectory(separate_rows: SeparateRows) -> None:
    """The twin for multiplicities: a shared row must collect the gradients of all trajectories through it."""
    trajectories = AWKWARD["duplicates"]
    with all_fp64():
        model = tiny_model(HYBRID, dtype=torch.float64)
        expected, _ = separate_rows(model, trajectories)
        expected_grads = gradients(model, expected.sum())
        packed = harts.pack(PrefixTree.build(trajectories))
        ours = harts.logprobs(harts.attach(model), packed)
        first = torch.zeros(len(packed.token_M) + 1, dtype=torch.bool)
        once = torch.zeros(packed.num_tokens, dtype=torch.bool)
        for token, target in enumerate(packed.target_of_N.tolist()):
            once[token] = not first[target]
            first[target] = True
        grads = gradients(model, ours[once].sum())
    assert largest_difference(grads, expected_grads) > 0.1


# -- what users do to their models ---------------------------------------------------------------------------------


def test_detach_gives_back_the_same_model() -> None:
    model = tiny_model(HYBRID)
    before = {name: type(module) for name, module in model.named_modules()}
    names, implementation = list(model.state_dict()), model.config._attn_implementation
    harts.attach(model)
    assert list(model.state_dict()) == names
    assert harts.attach(model) is model
    assert {name: type(module) for name, module in model.named_modules()} != before
    harts.detach(model)
    assert {name: type(module) for name, module in model.named_modules()} == before
    assert model.config._attn_implementation == implementation
    with pytest.raises(ValueError, match=r"not attached; call harts.attach"):
        harts.logprobs(model, harts.pack(PrefixTree.build(AWKWARD["path"])))


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_an_attached_model_still_runs_and_generates_as_before(implementation: str) -> None:
    model = tiny_model(HYBRID)
    model.set_attn_implementation(implementation)
    ids = torch.arange(1, 40).unsqueeze(0)
    before = model(input_ids=ids).logits
    generated = model.generate(ids, max_new_tokens=5, do_sample=False)
    harts.attach(model)
    assert torch.equal(model(input_ids=ids).logits, before)
    assert torch.equal(model.generate(ids, max_new_tokens=5, do_sample=False), generated)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_gives_the_same_gradients(reentrant: bool) -> None:
    packed = harts.pack(PrefixTree.build(AWKWARD["comb"]))
    model = harts.attach(tiny_model(HYBRID, dtype=torch.float64, attention_dropout=0.0)).train()
    plain = gradients(model, harts.logprobs(model, packed).sum())
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    model.enable_input_require_grads()
    harts.logprobs(model, packed).sum().backward()
    again = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert largest_difference(again, plain) < 1e-12


@pytest.mark.parametrize("order", ["attach first", "lora first"])
def test_lora_before_or_after_attach(order: str) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(
        r=4, target_modules=["in_proj_qkv", "out_proj", "q_proj", "v_proj", "down_proj"], init_lora_weights=False
    )
    trajectories = AWKWARD["star"]
    model = tiny_model(HYBRID, dtype=torch.float64)
    if order == "attach first":
        harts.attach(model)
    torch.manual_seed(0)
    lora = peft.get_peft_model(model, config)
    harts.attach(lora)
    packed = harts.pack(PrefixTree.build(trajectories))
    alone = harts.pack(PrefixTree.build(trajectories, share="none"))
    with all_fp64():
        grads = gradients_of_trained(lora, harts.logprobs(lora, packed).sum())
        expected = gradients_of_trained(lora, harts.logprobs(lora, alone).sum())
    assert grads
    assert all("lora" in name for name in grads)
    assert largest_difference(grads, expected) < 1e-8
    merged = harts.detach(lora).merge_and_unload()
    assert "linear_attention" in find_backbone(merged).family.layers


def gradients_of_trained(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    return dict(zip(trained, torch.autograd.grad(loss, list(trained.values())), strict=True))


def test_untrained_tokens_are_zero_and_a_batch_without_trained_tokens_still_has_a_graph() -> None:
    trajectories = AWKWARD["empty response"]
    model = harts.attach(tiny_model(HYBRID))
    packed = harts.pack(PrefixTree.build(trajectories))
    values = harts.logprobs(model, packed)
    assert values.shape == (packed.num_tokens,)
    assert (values[~packed.loss_mask_N] == 0).all()
    assert (values[packed.loss_mask_N] < 0).all()
    untrained = harts.pack(PrefixTree.build(trajectories[:2]))
    harts.logprobs(model, untrained).sum().backward()
    assert all(float(p.grad.abs().max()) == 0 for p in model.parameters() if p.grad is not None)


def test_multimodal_checkpoints_run_their_text_model() -> None:
    from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

    text = tiny_model(HYBRID)
    config = Qwen3_5Config(
        text_config=text.config.to_dict(),
        vision_config={"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64},
    )
    model = Qwen3_5ForConditionalGeneration(config).eval()
    model.model.language_model.load_state_dict(text.model.state_dict())
    model.lm_head.load_state_dict(text.lm_head.state_dict())
    packed = harts.pack(PrefixTree.build(AWKWARD["star"]))
    with torch.no_grad():
        ours = harts.logprobs(harts.attach(model), packed)
        assert torch.equal(ours, harts.logprobs(harts.attach(text), packed))


def test_models_that_share_a_config_are_attached_one_by_one() -> None:
    packed = harts.pack(PrefixTree.build(AWKWARD["star"]))
    first = tiny_model(HYBRID)
    second = type(first)(first.config).eval()
    second.load_state_dict(first.state_dict())
    expected = harts.logprobs(harts.attach(first), packed)
    with pytest.raises(ValueError, match="not attached"):
        harts.logprobs(second, packed)
    assert torch.equal(harts.logprobs(harts.attach(second), packed), expected)
    harts.detach(first)
    second.set_attn_implementation("sdpa")  # what a user may do at any time
    with pytest.raises(ValueError, match="not attached"):
        harts.logprobs(second, packed)
    assert torch.equal(harts.logprobs(harts.attach(second), packed), expected)


def test_a_disabled_adapter_disables_its_copy_of_the_head_too() -> None:
    peft = pytest.importorskip("peft")
    packed = harts.pack(PrefixTree.build(AWKWARD["star"]))
    model = harts.attach(tiny_model("tiny-qwen3"))
    expected = harts.logprobs(model, packed)
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"], init_lora_weights=False)
    lora = peft.get_peft_model(model, config)
    lora.base_model.model.lm_head.modules_to_save["default"].weight.data.add_(1)
    assert not torch.allclose(harts.logprobs(lora, packed), expected)
    with lora.disable_adapter():
        assert torch.equal(harts.logprobs(lora, packed), expected)


# -- bad input -----------------------------------------------------------------------------------------------------


def test_unsupported_models_are_refused_by_name() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=1, vocab_size=16))
    with pytest.raises(ValueError, match=r"'gpt2' is not supported; HARTS knows qwen3_5_text, arcee, .*, qwen3_moe"):
        harts.attach(model)
    with pytest.raises(ValueError, match="Linear is not supported"):
        harts.attach(nn.Linear(2, 2))


def test_families_that_do_not_fit_are_refused_with_the_reason() -> None:
    from transformers import PhimoeConfig, PhimoeForCausalLM

    config = PhimoeConfig(num_hidden_layers=1, hidden_size=8, intermediate_size=8, num_attention_heads=1, vocab_size=16)
    with pytest.raises(ValueError, match=r"'phimoe' is not supported: its router draws experts in training, .*; HARTS"):
        harts.attach(PhimoeForCausalLM(config))


def test_a_transformers_too_old_for_a_family_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("tiny-lfm2-moe")
    monkeypatch.setattr("harts.models.refused.__version__", "5.17.0")
    with pytest.raises(ValueError, match=r"'lfm2_moe' needs transformers 5.18 or newer, got 5.17.0: .*>=5.18"):
        harts.attach(model)
    monkeypatch.setattr("harts.models.refused.__version__", "5.18.0.dev0")
    harts.attach(model)


@pytest.mark.parametrize(
    ("name", "targets"),
    [
        ("tiny-glm4-moe", ["q_proj", "gate_proj", "up_proj", "down_proj"]),
        ("tiny-minimax-m2", ["q_proj", "o_proj"]),
        ("tiny-hunyuan-moe", ["v_proj", "o_proj"]),
        ("tiny-lfm2-moe", ["in_proj", "out_proj", "q_proj", "w2"]),
        ("tiny-granite", ["q_proj", "down_proj"]),
        ("tiny-bamba", ["in_proj", "q_proj", "down_proj"]),
        ("tiny-kimi-linear", ["k_proj", "b_proj", "f_a_proj", "o_proj"]),
        ("tiny-minimax", ["qkv_proj", "output_gate"]),
        ("tiny-nemotron-h", ["in_proj", "q_proj", "up_proj"]),
        ("tiny-phi3", ["qkv_proj", "gate_up_proj"]),
    ],
)
def test_lora_of_other_families(name: str, targets: list[str], separate_rows: SeparateRows) -> None:
    """Against separate rows through transformers and peft, from the same adapters."""
    peft = pytest.importorskip("peft")
    trajectories = AWKWARD["star"]
    config = peft.LoraConfig(r=2, target_modules=targets, init_lora_weights=False)
    with all_fp64():
        model = tiny_model(name, dtype=torch.float64)
        torch.manual_seed(0)
        lora = peft.get_peft_model(model, config).double()
        expected = separate_rows(lora, trajectories)[0]
        expected_grads = gradients_of_trained(lora, expected.sum())
        harts.attach(lora)
        ours = harts.logprobs(lora, harts.pack(PrefixTree.build(trajectories)))
        grads = gradients_of_trained(lora, ours.sum())
    assert len(grads) >= 2 * len(targets)
    assert all("lora" in key for key in grads)
    assert float((ours - expected).detach().abs().max()) < 1e-10
    assert largest_difference(grads, expected_grads) < 1e-8


def test_options_that_sharing_would_change_are_refused() -> None:
    chunked = tiny_model("tiny-qwen3", layer_types=["full_attention", "chunked_attention"])
    with pytest.raises(ValueError, match=r"layer types \['chunked_attention'\] are not supported for qwen3"):
        harts.attach(chunked)
    windows = tiny_model("tiny-llama")
    windows.config.sliding_window = 8
    with pytest.raises(ValueError, match=r"'sliding_attention'\] \(config\.sliding_window = 8\) are not supported"):
        harts.attach(windows)
    none = tiny_model("tiny-qwen2")
    none.config.sliding_window = None
    with pytest.raises(ValueError, match=r"config\.sliding_window = None: expected a number of rows of at least 1"):
        harts.attach(none)
    dynamic = tiny_model("tiny-llama", rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4})
    with pytest.raises(ValueError, match="rope_type 'dynamic'"):
        harts.attach(dynamic)


def test_active_dropout_is_refused() -> None:
    packed = harts.pack(PrefixTree.build(AWKWARD["path"]))
    model = harts.attach(tiny_model(HYBRID, attention_dropout=0.1))
    harts.logprobs(model, packed)
    with pytest.raises(ValueError, match=r"dropout is active in config\.attention_dropout"):
        harts.logprobs(model.train(), packed)


def test_dropout_of_one_active_module_is_refused() -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], lora_dropout=0.5)
    lora = peft.get_peft_model(harts.attach(tiny_model("tiny-qwen3")), config).eval()
    packed = harts.pack(PrefixTree.build(AWKWARD["path"]))
    harts.logprobs(lora, packed)
    lora.base_model.train()
    with pytest.raises(ValueError, match=r"dropout is active in .*lora_dropout"):
        harts.logprobs(lora, packed)


def test_prompt_learning_is_refused() -> None:
    peft = pytest.importorskip("peft")
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    with pytest.raises(ValueError, match="prompt learning puts virtual tokens"):
        harts.attach(peft.get_peft_model(tiny_model("tiny-qwen3"), config))


def test_distributed_data_parallel_is_refused_where_it_would_not_sum_gradients(tmp_path: Path) -> None:
    model = harts.attach(tiny_model("tiny-qwen3"))
    packed = harts.pack(PrefixTree.build(AWKWARD["path"]))
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    try:
        wrapped = nn.parallel.DistributedDataParallel(model)
        with pytest.raises(ValueError, match=r"pass model\.module and sum gradients yourself"):
            harts.logprobs(wrapped, packed)
        with torch.no_grad():
            harts.logprobs(wrapped, packed)
    finally:
        torch.distributed.destroy_process_group()


def test_token_outside_the_vocabulary_names_trajectory_and_position() -> None:
    bad = Trajectory(token_ids=[1, 2, 512], loss_mask=[0, 1, 1], id="late")
    packed = harts.pack(PrefixTree.build([*AWKWARD["path"], bad]))
    with pytest.raises(ValueError, match=r"trajectory 'late', field token_ids: .* size 512, got 512 at position 2"):
        harts.logprobs(harts.attach(tiny_model(HYBRID)), packed)


def test_a_head_that_is_no_linear_layer_is_refused() -> None:
    peft = pytest.importorskip("peft")
    model = tiny_model("tiny-qwen3")
    lora = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj", "lm_head"]))
    with pytest.raises(ValueError, match="leave the head out"):
        harts.logprobs(harts.attach(lora), harts.pack(PrefixTree.build(AWKWARD["path"])))


def test_kernels_are_named_explicitly() -> None:
    packed = harts.pack(PrefixTree.build(AWKWARD["path"]))
    model = harts.attach(tiny_model(HYBRID))
    with pytest.raises(ValueError, match="impl='cudnn' is not available"):
        harts.logprobs(model, packed, kernels=Kernels(attention="cudnn"))
