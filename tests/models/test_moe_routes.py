"""Recorded routes are forced, tokens merge where they agree, and route stability is measured."""

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from moe_families import FAMILIES, hooked, routers_of, weights_of_forced
from torch import Tensor, nn

import harts
from harts.models import RouterConfig, tiny_model
from harts.testing import routes as routes_module
from harts.testing.fp64 import all_fp64
from harts.testing.judging import gradient_sizes
from harts.testing.routes import has_routers, route_difference, route_stability
from harts.testing.trees import AWKWARD, random_trajectories
from harts.trajectory import Trajectory
from harts.tree import PrefixTree, count_rows_without_routes

FAST = "tiny-qwen3-moe"
EXPERTS, PER_TOKEN = 8, 3


def record(trajectories: list[Trajectory], layers: int, *, same: bool = False, seed: int = 0) -> list[Trajectory]:
    """Random routes, the same for all tokens of one id and position or drawn anew; the last token has none."""
    done = []
    for index, trajectory in enumerate(trajectories):
        rows = [
            np.random.default_rng([seed, at, token, 0 if same else index]).permuted(
                np.tile(np.arange(EXPERTS), (layers, 1)), axis=1
            )[:, :PER_TOKEN]
            for at, token in enumerate(trajectory.token_ids.tolist())
        ]
        routes = np.stack(rows)
        routes[-1] = -1
        done.append(dataclasses.replace(trajectory, routes=routes))
    return done


def score_forced(name: str, model: Any, trajectory: Trajectory) -> Tensor:
    """Untouched code, in which a hook replays the routes with the weights that the router has for them (R3)."""
    assert trajectory.routes is not None
    routes = torch.tensor(trajectory.routes, dtype=torch.int64)
    place = iter(range(routes.shape[1]))

    def replay(router: nn.Module, args: Any, output: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        logits, weights, chosen = output
        forced = routes[:, next(place)]
        recorded = forced[:, :1] >= 0
        replayed = weights_of_forced(name, router, logits, forced.clamp(min=0))
        return logits, torch.where(recorded, replayed, weights), torch.where(recorded, forced, chosen)

    ids = torch.tensor(trajectory.token_ids, dtype=torch.int64)
    with hooked(model, replay):
        logp = model(input_ids=ids.unsqueeze(0), use_cache=False).logits[0].log_softmax(-1)
    logp = logp[:-1].gather(1, ids[1:, None]).squeeze(1)
    return torch.cat([logp.new_zeros(1), logp]) * torch.tensor(trajectory.loss_mask)


def gradients(model: nn.Module, loss: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad]))


def difference(ours: list[Tensor], theirs: list[Tensor]) -> float:
    sizes = gradient_sizes({str(at): grad for at, grad in enumerate(theirs)}).values()
    return max(float((a - b).norm()) / size for a, b, size in zip(ours, theirs, sizes, strict=True))


@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_recorded_experts_are_forced_in_forward_and_recomputation(family: str, recomputed: bool) -> None:
    model: Any = tiny_model(family, dtype=torch.float64)
    trajectories = random_trajectories(np.random.default_rng(3), num_trajectories=5, max_length=80)
    trajectories = record(trajectories, len(routers_of(model)), same=True)
    packed = harts.pack(PrefixTree.build(trajectories))
    weight = torch.randn(packed.num_tokens, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    with all_fp64():
        expected = torch.cat([score_forced(family, model, each) for each in trajectories])
        grads = gradients(model, (expected * weight).sum())
        harts.attach(model)
        free = [dataclasses.replace(each, routes=None) for each in trajectories]
        chosen_freely = harts.logprobs(model, harts.pack(PrefixTree.build(free)))
        if recomputed:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            model.train()
        ours = harts.logprobs(model, packed)
        our_grads = gradients(model, (ours * weight).sum())
    assert packed.num_rows < packed.num_tokens
    assert float((ours - expected).detach().abs().max()) < 1e-10
    assert difference(our_grads, grads) < 1e-8
    assert float((chosen_freely - expected).detach().abs().max()) > 1e-6  # forcing makes a difference


def test_loads_count_the_forced_experts() -> None:
    model = harts.attach(tiny_model(FAST))
    trajectories = record(AWKWARD["star"], 2, same=True)
    packed = harts.pack(PrefixTree.build(trajectories))
    router = harts.logprobs(model, packed, router=RouterConfig(scope="microbatch", routes=True)).router
    assert router.routes_YTK is not None
    recorded = np.concatenate([each.routes[:-1] for each in trajectories if each.routes is not None])
    forced = np.stack([np.bincount(recorded[:, layer].ravel(), minlength=EXPERTS) for layer in range(2)])
    by_choice = router.statistics.load_YE.numpy() - forced
    assert (by_choice >= 0).all()
    assert by_choice.sum(1).tolist() == [len(trajectories) * PER_TOKEN] * 2
    ran = router.routes_YTK[:, packed.row_of_N].transpose(0, 1).numpy()
    for part, each in zip(np.split(ran, packed.tree.offset_B1[1:-1]), trajectories, strict=True):
        assert each.routes is not None
        assert np.array_equal(part[:-1], each.routes[:-1])


def test_tokens_merge_only_where_routes_agree() -> None:
    token_ids, mask = np.arange(100) % 50, np.arange(100) > 50
    (recorded,) = record([Trajectory(token_ids=token_ids, loss_mask=mask)], 2)
    assert recorded.routes is not None
    other = recorded.routes.copy()
    other[60, 1] = (recorded.routes[60, 1] + 1) % EXPERTS
    shuffled = recorded.routes[:, :, ::-1]
    trajectories = [dataclasses.replace(recorded, routes=routes) for routes in (None, other, shuffled, recorded.routes)]
    tree = PrefixTree.build(trajectories)
    assert tree.num_rows == 100 + 100 + 40
    assert count_rows_without_routes(trajectories) == 100
    assert tree.routes_T is not None
    for index, trajectory in enumerate(trajectories):
        kept = np.full((100, 2, 3), -1) if trajectory.routes is None else trajectory.routes
        assert np.array_equal(tree.routes_T[tree.rows_of(index)], kept)
    assert PrefixTree.build(trajectories[:1]).routes_T is None


def test_no_record_at_all_merges_with_no_routes() -> None:
    none = np.full((3, 2, 3), -1)
    trajectories = [
        Trajectory(token_ids=[1, 2, 3], loss_mask=[0, 0, 1], routes=routes, merge_keys=[0, 0, key])
        for routes, key in ((none, 0), (None, 0), (None, 1))
    ]
    assert PrefixTree.build(trajectories).num_rows == 4


# -- bad input -----------------------------------------------------------------------------------------------------


def test_routes_that_do_not_fit_are_refused() -> None:
    model = harts.attach(tiny_model(FAST))
    for layers, top, message in (
        (3, 0, r"expected \[4, 2, 3\] experts below 8, as the model has, got \[4, 3, 3\] up to 2"),
        (2, 6, r"experts below 8, as the model has, got \[4, 2, 3\] up to 8"),
    ):
        routes = np.tile(np.arange(3) + top, (4, layers, 1))
        bad = Trajectory(token_ids=[1, 2, 3, 4], loss_mask=[0, 1, 1, 1], routes=routes, id="bad")
        with pytest.raises(ValueError, match=rf"trajectory 'bad', field routes: .*{message}"):
            harts.logprobs(model, harts.pack(PrefixTree.build([bad])))
    with pytest.raises(ValueError, match="trajectory 'bad', field routes: expected none"):
        harts.logprobs(harts.attach(tiny_model("tiny-qwen3")), harts.pack(PrefixTree.build([bad])))
    fewer = dataclasses.replace(bad, routes=np.zeros((4, 1, 1), int), id="fewer")
    with pytest.raises(ValueError, match="trajectory 'fewer', field routes: expected 2 layers and 3 experts per token"):
        PrefixTree.build([bad, fewer])


# -- stability -----------------------------------------------------------------------------------------------------


def test_route_difference_compares_sets_and_counts_layers_and_tokens() -> None:
    one = torch.tensor([[[0, 1], [2, 3], [4, 5]], [[0, 1], [2, 3], [4, 5]]])
    other = one.clone()
    other[0, 1] = torch.tensor([3, 2])
    assert route_difference(one, other) == 0
    other[1, 2, 0] = 6
    assert route_difference(one, other) == pytest.approx(1 / 6)
    with pytest.raises(ValueError, match=r"got \[2, 3, 2\] and \[2, 2, 2\]"):
        route_difference(one, other[:, :2])


@pytest.mark.parametrize(("dtype", "exact"), [(torch.float32, False), (torch.bfloat16, True)])
def test_tree_and_packed_rows_take_the_same_routes(dtype: torch.dtype, exact: bool) -> None:
    trajectories = random_trajectories(np.random.default_rng(3), num_trajectories=5, max_length=80)
    model = harts.attach(tiny_model("tiny-qwen3.5-moe", dtype=dtype))
    assert has_routers(model)
    assert not has_routers(tiny_model("tiny-qwen3"))
    found = route_stability(model, trajectories, exact=exact)
    assert (found.tokens, found.layers) == (sum(map(len, trajectories)), 4)
    assert (found.dtype, found.exact) == (str(dtype).removeprefix("torch."), exact)
    assert found.repeat_fraction == 0
    assert found.tree_fraction <= (0.001 if dtype == torch.float32 else 0.02)


def test_route_stability_sees_broken_positions(monkeypatch: Any) -> None:
    """The twin: on a tree whose rows sit at wrong positions, routes differ."""
    trajectories = AWKWARD["star"]
    model = harts.attach(tiny_model(FAST))
    pack = routes_module.pack

    def broken(tree: PrefixTree, **options: Any) -> harts.PackedTree:
        return dataclasses.replace(pack(tree, **options), position_T=torch.arange(tree.num_rows))

    monkeypatch.setattr(routes_module, "pack", broken)
    assert route_stability(model, trajectories).tree_fraction > 0.01
