"""Mixture-of-experts models on the tree, with all that counts tokens, equal separate rows through untouched code."""

import copy
import dataclasses
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from moe_families import FAMILIES, SIGMOIDS, hooked, probabilities, routers_of
from torch import Tensor, nn
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

import harts
from harts.losses import LossConfig, LossInputs, StepDenominators, make_loss
from harts.models import RouterConfig, RouterOutput, tiny_model
from harts.models import routing as routing_module
from harts.models.attach import find_backbone
from harts.models.router_hooks import _announce, _route
from harts.models.router_losses import RouterStep
from harts.models.routing import Routing
from harts.testing.fp64 import all_fp64
from harts.testing.judging import gradient_sizes
from harts.testing.trees import AWKWARD, random_trajectories, trajectories_strategy
from harts.trajectory import Trajectory
from harts.tree import PrefixTree

FAST = "tiny-qwen3-moe"
SHAPES = [name for name in AWKWARD if name != "caterpillar"]
CASES = [("tiny-qwen3.5-moe", name) for name in SHAPES]
CASES += [(family, "small") for family in FAMILIES if family != "tiny-qwen3.5-moe"]
TREES = {**AWKWARD, "small": random_trajectories(np.random.default_rng(9), max_length=80)}
FP64: dict[str, Any] = {"dtype": torch.float64}

Grads = dict[str, Tensor]
Routed = tuple[Tensor, Tensor]
SeparateRows = Callable[[nn.Module, list[Trajectory]], tuple[Tensor, Tensor]]


def run_alone(model: Any, trajectories: Sequence[Trajectory]) -> tuple[Tensor, list[list[Routed]]]:
    """Log-probs of all tokens, and each trajectory's router logits and experts per layer, by transformers' own code."""
    logprobs, routers = [], []
    for trajectory in trajectories:
        ids = torch.tensor(trajectory.token_ids, dtype=torch.int64).unsqueeze(0)
        layers: list[Routed] = []
        with hooked(model, lambda router, args, found, layers=layers: layers.append((found[0], found[2]))):
            output = model(input_ids=ids, use_cache=False)
        logp = output.logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None]).squeeze(1)
        logprobs.append(torch.cat([logp.new_zeros(1), logp]) * torch.tensor(trajectory.loss_mask))
        routers.append(layers)
    return torch.cat(logprobs), routers


def join(routers: Sequence[Sequence[Routed]]) -> list[Routed]:
    """Logits and experts of the whole batch, per layer."""
    return [
        (torch.cat([logits for logits, _ in layer]), torch.cat([chosen for _, chosen in layer]))
        for layer in zip(*routers, strict=True)
    ]


def balance_of(routers: Sequence[Sequence[Routed]], name: str = FAST) -> Tensor:
    """The balancing loss of a batch: transformers' own, where the router takes the largest softmaxes and no others."""
    layers = join(routers)
    experts, per_token = layers[0][0].shape[1], layers[0][1].shape[1]
    mean = torch.stack([probabilities(name, logits).mean(0) for logits, _ in layers]).mean(0)
    tokens = sum(len(logits) for logits, _ in layers)
    loss = experts * (loads_of(routers).sum(0) / tokens * mean).sum()
    if name not in (*SIGMOIDS, "tiny-ernie4.5-moe", "tiny-deepseek-v2", "tiny-mistral4"):
        theirs = load_balancing_loss_func(tuple(logits for logits, _ in layers), experts, per_token)
        assert abs(float((loss - theirs).detach())) < 1e-10
    return loss


def z_of(routers: Sequence[Sequence[Routed]]) -> Tensor:
    return torch.stack([logits.logsumexp(-1).square().mean() for logits, _ in join(routers)]).mean()


def loads_of(routers: Sequence[Sequence[Routed]]) -> Tensor:
    return torch.stack(
        [torch.bincount(chosen.flatten(), minlength=logits.shape[1]) for logits, chosen in join(routers)]
    )


def gradients(model: nn.Module, loss: Tensor) -> Grads:
    names, parameters = zip(*((name, p) for name, p in model.named_parameters() if p.requires_grad), strict=True)
    found = torch.autograd.grad(loss, parameters, allow_unused=True, retain_graph=True)
    return {name: torch.zeros_like(p) if g is None else g for name, p, g in zip(names, parameters, found, strict=True)}


def difference(ours: Grads, theirs: Grads) -> float:
    """Largest difference, per parameter relative to the size of its gradient; 0 where all are zero."""
    sizes = gradient_sizes(theirs)
    return max(float((ours[name] - theirs[name]).norm()) / max(size, 1e-300) for name, size in sizes.items())


def pack(trajectories: Sequence[Trajectory]) -> harts.PackedTree:
    return harts.pack(PrefixTree.build(trajectories))


def routed(model: nn.Module, packed: harts.PackedTree, config: RouterConfig) -> tuple[Tensor, RouterOutput]:
    scores = harts.logprobs(model, packed, router=config)
    assert scores.router is not None
    return scores.logprobs_N, scores.router


def both_losses(scope: Any = "microbatch", **changes: Any) -> RouterConfig:
    return RouterConfig(scope=scope, balance_coefficient=0.5, z_coefficient=0.1, **changes)


# -- the law -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "shape"), CASES)
def test_log_probs_gradients_and_statistics_in_fp64(family: str, shape: str) -> None:
    trajectories = TREES[shape]
    weight = torch.randn(sum(map(len, trajectories)), generator=torch.Generator().manual_seed(3), **FP64)
    with all_fp64():
        model = tiny_model(family, **FP64)
        expected, routers = run_alone(model, trajectories)
        auxiliary = 0.5 * balance_of(routers, family) + 0.1 * z_of(routers)
        grads, aux_grads = gradients(model, (expected * weight).sum()), gradients(model, auxiliary)
        ours, router = routed(harts.attach(model), pack(trajectories), both_losses())
        our_grads, our_aux = gradients(model, (ours * weight).sum()), gradients(model, router.aux_loss())
    assert float((ours - expected).detach().abs().max()) < 1e-10
    assert difference(our_grads, grads) < 1e-8
    assert torch.equal(router.statistics.load_YE, loads_of(routers))
    assert abs(float((router.aux_loss() - auxiliary).detach())) < 1e-10
    assert difference(our_aux, aux_grads) < 1e-10


@pytest.mark.parametrize("family", FAMILIES)
def test_grouped_experts_against_eager_separate_rows(family: str, separate_rows: SeparateRows) -> None:
    trajectories = random_trajectories(np.random.default_rng(6), max_length=150)
    with torch.no_grad():
        expected, _ = separate_rows(tiny_model(family), trajectories)
        model = harts.attach(tiny_model(family, experts_implementation="grouped_mm"))
        assert find_backbone(model).config._experts_implementation == "grouped_mm"
        assert float((harts.logprobs(model, pack(trajectories)) - expected).abs().max()) < 1e-5


def test_dense_layers_between() -> None:
    """Only the layers with experts have a router, and are told apart by their place."""
    trajectories = AWKWARD["star"]
    with all_fp64():
        model = tiny_model("tiny-qwen3-next", mlp_only_layers=[1], **FP64)
        _, routers = run_alone(model, trajectories)
        _, router = routed(harts.attach(model), pack(trajectories), both_losses())
    assert router.statistics.load_YE.shape == (3, 8)
    assert torch.equal(router.statistics.load_YE, loads_of(routers))


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_declared_of_a_router_is_what_the_model_does(family: str) -> None:
    """An exact router chooses and weighs by the declaration alone; in fp64 that is the model's own choice."""
    packed = pack(random_trajectories(np.random.default_rng(8), max_length=60))
    with all_fp64(), torch.no_grad():
        model = harts.attach(tiny_model(family, **FP64))
        plain, own = routed(model, packed, RouterConfig(scope="microbatch", routes=True))
        exact, ours = routed(model, packed, RouterConfig(scope="microbatch", routes=True, exact=True))
    assert own.routes_YTK is not None
    assert torch.equal(own.routes_YTK, ours.routes_YTK)
    assert float((plain - exact).abs().max()) < 1e-12


def test_a_bias_and_groups_decide_on_experts() -> None:
    """Twins: without them the presets would take other experts, so the tests above would see them missing."""
    packed = pack(AWKWARD["star"])
    config = RouterConfig(scope="microbatch", routes=True)
    for family, change in (
        ("tiny-glm4-moe", "bias"),
        ("tiny-minimax-m2", "bias"),
        ("tiny-ernie4.5-moe", "bias"),
        ("tiny-solar", "groups"),
        ("tiny-deepseek-v2", "groups"),
        ("tiny-mistral4", "groups"),
    ):
        model = harts.attach(tiny_model(family))
        before = routed(model, packed, config)[1].routes_YTK
        if change == "groups":
            for router in routers_of(model):
                router.topk_group = router.num_group
        else:
            for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
                if name.endswith("e_score_correction_bias"):
                    tensor.data.zero_()
        after = routed(model, packed, config)[1].routes_YTK
        assert before is not None
        assert not torch.equal(before, after), family


# -- token weights -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["tiny-qwen3", FAST])
def test_token_weights_that_differ_between_the_trajectories_through_a_row(name: str) -> None:
    """Advantages, old log-probs, masks, and normalisers of a sequence's own length: gradients of the unmerged batch."""
    loss = make_loss(LossConfig(algorithm="grpo", normalization="sequence"))

    def gradients_of(model: nn.Module, trajectories: Sequence[Trajectory], logprobs: Tensor) -> Grads:
        inputs = LossInputs.from_trajectories(
            trajectories, logprobs, sequences=range(len(trajectories)), requires=loss.requires
        )
        return gradients(model, loss(inputs, StepDenominators.from_trajectories(trajectories)).loss)

    with all_fp64():
        plain, model = tiny_model(name, **FP64), harts.attach(tiny_model(name, **FP64))

        @settings(deadline=None, max_examples=8)
        @given(trajectories_strategy(max_length=70, max_trajectories=6))
        def check(trajectories: list[Trajectory]) -> None:
            if not any(each.loss_mask.any() for each in trajectories):
                return
            alone = torch.cat([score_alone(plain, each) for each in trajectories])
            noise = np.random.default_rng(0)
            trajectories = [  # ratios on both sides of the clip, other advantages at every token
                dataclasses.replace(
                    each,
                    logprobs=values.detach().numpy() + noise.normal(0, 0.2, len(each)),
                    advantages=noise.normal(size=len(each)),
                )
                for each, values in zip(trajectories, alone.split([len(each) for each in trajectories]), strict=True)
            ]
            ours = gradients_of(model, trajectories, harts.logprobs(model, pack(trajectories)))
            assert difference(ours, gradients_of(plain, trajectories, alone)) < 1e-8

        check()


def score_alone(model: Any, trajectory: Trajectory) -> Tensor:
    ids = torch.tensor(trajectory.token_ids, dtype=torch.int64)
    logp = model(input_ids=ids.unsqueeze(0), use_cache=False).logits[0].log_softmax(-1)
    logp = logp[:-1].gather(1, ids[1:, None]).squeeze(1)
    return torch.cat([logp.new_zeros(1), logp]) * torch.tensor(trajectory.loss_mask)


# -- plans ---------------------------------------------------------------------------------------------------------

SPLITS = [[0, 0, 0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 1, 1, 1, 1], [0, 1, 0, 1, 2, 1, 2, 0], [0, 1, 2, 3, 4, 5, 6, 7]]


@pytest.mark.parametrize("scope", ["step", "trajectory"])
def test_every_plan_gives_the_gradients_of_the_step(scope: Any) -> None:
    trajectories = random_trajectories(np.random.default_rng(2), max_length=90)
    config = both_losses(scope, load_per="assignment", layers="sum")
    with all_fp64():
        model = harts.attach(tiny_model(FAST, **FP64))
        found = []
        for slots in SPLITS:
            batches = [
                [t for t, s in zip(trajectories, slots, strict=True) if s == slot] for slot in sorted(set(slots))
            ]
            with torch.no_grad():
                first = [routed(model, pack(batch), config)[1].statistics for batch in batches]
            step = RouterStep.from_statistics(first)
            losses = [routed(model, pack(batch), config)[1].aux_loss(step) for batch in batches]
            total = torch.stack(losses).sum()
            found.append((total, gradients(model, total), step.load_YE))
    for total, grads, load in found[1:]:
        assert abs(float((total - found[0][0]).detach())) < 1e-10
        assert difference(grads, found[0][1]) < 1e-10
        assert load is not None
        assert torch.equal(load, found[0][2])


def test_scope_step_is_the_balancing_loss_of_the_whole_batch() -> None:
    trajectories = random_trajectories(np.random.default_rng(2), max_length=90)
    config = RouterConfig(scope="step", balance_coefficient=1.0)
    with all_fp64():
        model = tiny_model(FAST, **FP64)
        theirs = balance_of(run_alone(model, trajectories)[1])
        _, router = routed(harts.attach(model), pack(trajectories), config)
        ours = router.aux_loss(RouterStep.from_statistics([router.statistics]))
    assert abs(float((ours - theirs).detach())) < 1e-10


def test_physical_load_counts_rows_and_logical_load_tokens() -> None:
    packed = pack(AWKWARD["duplicates"])
    model = harts.attach(tiny_model(FAST))
    statistics = routed(model, packed, RouterConfig(scope="microbatch"))[1].statistics
    assert statistics.physical_YE.sum(1).tolist() == [3 * packed.num_rows] * 2
    assert statistics.load_YE.sum(1).tolist() == [3 * packed.num_tokens] * 2
    assert statistics.tokens == packed.num_tokens
    trained = routed(model, packed, RouterConfig(scope="trajectory", tokens="trained"))[1].statistics
    assert trained.load_YE.sum(1).tolist() == [3 * int(packed.loss_mask_N.sum())] * 2
    assert trained.tokens_U.tolist() == [each.num_trained for each in AWKWARD["duplicates"]]


# -- recomputation -------------------------------------------------------------------------------------------------


def recompute(model: Any, *, reentrant: bool = False) -> nn.Module:
    enable = getattr(model, "activation_checkpointing_enable", None)
    options = {"use_reentrant": reentrant}
    if enable is not None:
        enable(options)
    else:  # before 5.2x
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
    return harts.attach(model).train()


@pytest.mark.parametrize("family", FAMILIES)
def test_recomputation_counts_once_and_gives_the_same_gradients(family: str, monkeypatch: Any) -> None:
    packed = pack(TREES["small"])
    model = harts.attach(tiny_model(family, **FP64))
    values, plain = routed(model, packed, both_losses())
    expected = gradients(model, values.sum() + plain.aux_loss())
    kept: list[Routing] = []
    runs: list[int] = []
    start, sums = routing_module.start_routing, routing_module.router_sums

    def counted(*args: Any, **kwargs: Any) -> Any:
        runs.append(threading.get_ident())
        return sums(*args, **kwargs)

    def started(*args: Any, **kwargs: Any) -> Routing | None:
        routing = start(*args, **kwargs)
        assert routing is not None
        kept.append(routing)
        return routing

    monkeypatch.setattr(routing_module, "router_sums", counted)
    monkeypatch.setattr("harts.models.scorer.start_routing", started)
    recompute(model)
    values, router = routed(model, packed, both_losses())
    loss = values.sum() + router.aux_loss()
    layers = len(router.statistics.load_YE)
    assert len(runs) == layers
    in_another_thread(lambda: loss.backward())  # as autograd does on a GPU
    assert len(runs) == 2 * layers
    assert len(set(runs)) == 2
    again = {name: model.get_parameter(name).grad for name in expected}
    again = {name: torch.zeros_like(expected[name]) if grad is None else grad for name, grad in again.items()}
    assert difference(again, expected) < 1e-12
    assert torch.equal(kept[0].output(3).statistics.load_YE, plain.statistics.load_YE)


def test_law_fails_when_the_recomputation_counts_again(monkeypatch: Any) -> None:
    packed = pack(AWKWARD["comb"])
    model = recompute(tiny_model(FAST, **FP64))
    total: dict[int, Tensor] = {}

    def keep(self: Routing, place: int, config: Any, sums: Any, chosen: Any) -> None:
        total[place] = total.get(place, 0) + sums.load_UE
        self.sums[place] = sums

    monkeypatch.setattr(Routing, "_keep", keep)
    values, router = routed(model, packed, both_losses())
    once = router.statistics.load_YE.clone()
    (values.sum() + router.aux_loss()).backward()
    assert all(torch.equal(total[place][0], 2 * once[place]) for place in total)


def test_reentrant_recomputation_hides_the_routers_and_is_refused() -> None:
    packed = pack(AWKWARD["star"])
    model: Any = recompute(tiny_model(FAST), reentrant=True)
    model.enable_input_require_grads()
    with pytest.raises(ValueError, match="use_reentrant=False"):
        harts.logprobs(model, packed, router=both_losses())
    values, router = routed(model, packed, RouterConfig(scope="microbatch"))
    values.sum().backward()
    assert int(router.statistics.load_YE.sum()) == 2 * 3 * packed.num_tokens


def in_another_thread(work: Callable[[], None]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def test_law_fails_when_multiplicities_are_ignored(monkeypatch: Any) -> None:
    trajectories = AWKWARD["duplicates"]
    count = routing_module.count_tokens

    def once(*args: Any, **kwargs: Any) -> Any:
        right = count(*args, **kwargs)
        return dataclasses.replace(right, weight_T=torch.ones_like(right.weight_T))

    monkeypatch.setattr(routing_module, "count_tokens", once)
    with all_fp64():
        model = tiny_model(FAST, **FP64)
        _, routers = run_alone(model, trajectories)
        auxiliary = 0.5 * balance_of(routers) + 0.1 * z_of(routers)
        grads = gradients(model, auxiliary)
        _, router = routed(harts.attach(model), pack(trajectories), both_losses())
        ours = gradients(model, router.aux_loss())
    assert not torch.equal(router.statistics.load_YE, loads_of(routers))
    assert difference(ours, grads) > 1e-2


# -- what users do -------------------------------------------------------------------------------------------------


def test_router_statistics_are_an_extra_and_dense_calls_are_as_before() -> None:
    packed = pack(AWKWARD["star"])
    model = harts.attach(tiny_model(FAST))
    config = RouterConfig(scope="microbatch")
    alone = harts.logprobs(model, packed)
    assert isinstance(alone, Tensor)
    scores = harts.logprobs(model, packed, entropy=True, router=config)
    router = scores.router
    assert torch.equal(scores.logprobs_N, alone)
    assert scores.entropy_N is not None
    assert scores.entropy_N.shape == alone.shape
    assert isinstance(router, RouterOutput)
    assert router.routes_YTK is None
    assert float(router.aux_loss()) == 0
    with pytest.raises(ValueError, match="router: expected None for a model without mixture-of-experts layers"):
        harts.logprobs(harts.attach(tiny_model("tiny-qwen3")), packed, router=config)


@pytest.mark.parametrize("family", FAMILIES)
def test_detach_and_copies_leave_no_hook(family: str) -> None:
    model = harts.attach(tiny_model(family))
    twin = copy.deepcopy(model)
    assert count_hooks(twin) == count_hooks(model) > 0
    harts.detach(twin)
    assert count_hooks(twin) == 0
    assert count_hooks(model) > 0
    harts.logprobs(model, pack(AWKWARD["star"]), router=both_losses())
    assert count_hooks(harts.detach(model)) == 0


def count_hooks(model: nn.Module) -> int:
    hooks = [[*module._forward_hooks.values(), *module._forward_pre_hooks.values()] for module in model.modules()]
    return sum(hook in (_announce, _route) for each in hooks for hook in each)


def test_multimodal_checkpoints_run_their_text_model() -> None:
    from transformers import Qwen3_5MoeConfig, Qwen3_5MoeForConditionalGeneration

    text: Any = tiny_model("tiny-qwen3.5-moe")
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}
    config = Qwen3_5MoeConfig(text_config=text.config.to_dict(), vision_config=vision)
    config._experts_implementation = "eager"
    model = Qwen3_5MoeForConditionalGeneration(config).eval()
    model.model.language_model.load_state_dict(text.model.state_dict())
    model.lm_head.load_state_dict(text.lm_head.state_dict())
    packed = pack(AWKWARD["star"])
    with torch.no_grad():
        ours, router = routed(harts.attach(model), packed, both_losses())
        theirs, expected = routed(harts.attach(text), packed, both_losses())
    assert torch.equal(ours, theirs)
    assert torch.equal(router.statistics.load_YE, expected.statistics.load_YE)


def test_exact_mode_breaks_ties_by_index_and_routes_in_fp32() -> None:
    """All experts are equal for all tokens: the first ones run. In bf16 the logits are those of fp32."""
    packed = pack(AWKWARD["star"])
    model: Any = harts.attach(tiny_model(FAST, dtype=torch.bfloat16))
    seen: list[Tensor] = []
    for layer in model.model.layers:
        layer.mlp.gate.weight.data[:] = layer.mlp.gate.weight.data[:1]
        layer.mlp.gate.register_forward_hook(lambda module, args, output: seen.append(output[0]))
    config = RouterConfig(scope="microbatch", exact=True, routes=True)
    router = routed(model, packed, config)[1]
    assert router.routes_YTK is not None
    assert (router.routes_YTK == torch.arange(3)).all()
    assert {logits.dtype for logits in seen} == {torch.float32}


# -- bad input -----------------------------------------------------------------------------------------------------

COUPLED: list[tuple[dict[str, Any], str]] = [
    ({"expert_capacity": 64}, "whether an expert drops a token depends on the tokens beside it"),
    ({"moe_capacity_factor": 1.25}, "whether an expert drops a token"),
    ({"router_jitter_noise": 0.01}, "noise is drawn once for a shared row"),
    ({"expert_dropout": 0.1}, "would no longer be dropped alone"),
]


@pytest.mark.parametrize(("option", "reason"), COUPLED)
def test_options_that_couple_rows_are_refused_with_the_reason(option: dict[str, float], reason: str) -> None:
    (name,) = option
    with pytest.raises(ValueError, match=f"config.{name} = .* is not supported: .*{reason}"):
        harts.attach(tiny_model(FAST, **option))
    harts.attach(tiny_model(FAST, **dict.fromkeys(option, 0)))


def test_routers_that_a_kernel_replaces_are_refused() -> None:
    model: Any = tiny_model(FAST)
    model.model.layers[0].mlp.gate.forward = lambda hidden: None
    with pytest.raises(ValueError, match="the forward of a Qwen3MoeTopKRouter was overridden"):
        harts.attach(model)
    model = harts.attach(tiny_model(FAST))
    model.model.layers[0].mlp.forward = lambda hidden: hidden
    with pytest.raises(ValueError, match="expected its 2 routers to run, 1 did"):
        harts.logprobs(model, pack(AWKWARD["star"]), router=both_losses())


def test_bad_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="field scope: expected one of 'trajectory', 'microbatch', 'step'"):
        RouterConfig(scope="batch")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="field balance_coefficient: expected a number >= 0, got -1"):
        RouterConfig(scope="step", balance_coefficient=-1)
