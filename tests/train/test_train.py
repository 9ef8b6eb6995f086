"""The training step and the trainer: any plan the same gradients, exact resume, drift, bad input."""

import dataclasses
import json
import os
import re
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import harts
from harts.cost import Coefficients, CostModel
from harts.losses import LossConfig, make_loss
from harts.models import RouterConfig, recompute_activations, tiny_model
from harts.testing.fp64 import all_fp64
from harts.testing.trees import random_trajectories
from harts.train import Interrupted, TrainConfig, Trainer
from harts.train.checkpoint import latest_checkpoint
from harts.train.data import read_trajectories
from harts.train.firstlook import first_look
from harts.train.parallel import Replicas
from harts.train.step import accumulate, count_routes, plan_step, score, update
from harts.trajectory import Trajectory

LOSSES = {
    "supervised": LossConfig(algorithm="supervised"),
    "grpo": LossConfig(algorithm="grpo", normalization="sequence", kl_coef=0.1, entropy_coef=0.01),
    "gspo": LossConfig(algorithm="gspo", clip_low=0.2, clip_high=0.2),
}


def rollouts(seed: int = 0, **changes: Any) -> list[Trajectory]:
    rng = np.random.default_rng(seed)
    found = random_trajectories(rng, num_trajectories=9, min_length=20, max_length=120, vocab_size=40, **changes)
    return [dataclasses.replace(one, ref_logprobs=one.logprobs, group=f"g{i // 3}") for i, one in enumerate(found)]


def write(path: Path, trajectories: Sequence[Trajectory]) -> str:
    harts.write(path, trajectories)
    return str(path)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


@pytest.mark.parametrize("name", LOSSES)
def test_any_plan_gives_the_same_gradients(name: str) -> None:
    trajectories, loss = rollouts(), make_loss(LOSSES[name])
    with all_fp64():
        model = harts.attach(tiny_model("tiny-qwen3.5", dtype=torch.float64))
        results = []
        for budget, share in ((100_000, "tree"), (260, "tree"), (200, "tree"), (300, "none")):
            step = plan_step(trajectories, token_budget=budget, share=share)
            old = score(model, step)
            metrics = accumulate(model, step, loss, old=old).metrics
            results.append((len(step.microbatches), metrics.values()["loss"], gradients(model)))
    assert results[0][0] == 1
    assert all(count > 1 for count, *_ in results[1:])
    for _, value, grads in results[1:]:
        assert value == pytest.approx(results[0][1], rel=1e-12)
        for key, expected in results[0][2].items():
            assert float((grads[key] - expected).norm()) <= 1e-8 * float(expected.norm()), key


def test_a_config_names_the_fields_of_its_rows(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    rows = [{"ids": [1, 2, 3], "mask": [0, 1, 1], "id": str(index)} for index in range(2)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    loss = make_loss(LossConfig(algorithm="supervised"))
    config = TrainConfig(data=str(path), fields="token_ids=ids,loss_mask=mask", loss=loss.config)
    assert [one.token_ids.tolist() for one in read_trajectories(config, loss)] == [[1, 2, 3]] * 2
    with pytest.raises(ValueError, match="got the fields ids, mask, id"):
        read_trajectories(dataclasses.replace(config, fields=None), loss)


def test_shared_tokens_are_trained_once_where_asked() -> None:
    """Their gradients are those of the same step with the token unset in all trajectories but its first."""
    trajectories = [dataclasses.replace(one, group="search") for one in rollouts()]
    seen: set[tuple[int, ...]] = set()
    alone = []
    for one in trajectories:
        mask = one.loss_mask.copy()
        for at in np.flatnonzero(mask):
            path = tuple(one.token_ids[: at + 1].tolist())
            mask[at] = path not in seen
            seen.add(path)
        alone.append(dataclasses.replace(one, loss_mask=mask))
    assert sum(one.num_trained for one in alone) < 0.9 * sum(one.num_trained for one in trajectories)
    with all_fp64():
        model = harts.attach(tiny_model("tiny-qwen3.5", dtype=torch.float64))
        found = []
        for each, shared, budget in (
            (trajectories, "once", 100_000),
            (trajectories, "once", 200),
            (alone, "each", 300),
        ):
            loss = make_loss(LossConfig(algorithm="supervised", shared_tokens=shared))  # type: ignore[arg-type]
            metrics = accumulate(model, plan_step(each, token_budget=budget), loss).metrics
            found.append((metrics.values()["loss"], gradients(model)))
    for value, grads in found[:2]:
        assert value == pytest.approx(found[2][0], rel=1e-12)
        for key, expected in found[2][1].items():
            assert float((grads[key] - expected).norm()) <= 1e-8 * float(expected.norm()), key


@pytest.mark.parametrize("recorded", [True, False])
@pytest.mark.parametrize("name", LOSSES)
def test_replicas_without_work_run_a_dummy_and_add_nothing(name: str, recorded: bool) -> None:
    trajectories, loss = rollouts()[:2], make_loss(LOSSES[name])
    if not recorded:
        if name == "grpo":
            pytest.skip("its KL term needs recorded values here")
        trajectories = [dataclasses.replace(one, logprobs=None, ref_logprobs=None) for one in trajectories]
    with all_fp64():
        model = harts.attach(tiny_model("tiny-qwen3.5", dtype=torch.float64))
        alone = plan_step(trajectories, token_budget=10_000)
        expected = accumulate(model, alone, loss, old=score(model, alone)).metrics
        expected_grads = gradients(model)
        totals, grads, empty = [], [], 0
        for rank in range(4):
            step = plan_step(trajectories, token_budget=10_000, replicas=Replicas(rank, 4))
            empty += sum(not microbatch.indices for microbatch in step.microbatches)
            totals.append(accumulate(model, step, loss, old=score(model, step)).metrics)
            grads.append(gradients(model))
    assert empty >= 2
    total = totals[0] + totals[1] + totals[2] + totals[3]
    assert total.values() == pytest.approx(expected.values(), rel=1e-9, abs=1e-12)
    for key, grad in expected_grads.items():
        summed = torch.stack([part[key] for part in grads]).sum(0)
        assert float((summed - grad).norm()) <= 1e-8 * float(grad.norm()), key


@pytest.mark.parametrize("scope", ["trajectory", "step"])
def test_any_plan_gives_the_same_router_losses_and_gradients(scope: Any) -> None:
    trajectories, loss = rollouts(), make_loss(LOSSES["supervised"])
    router = RouterConfig(scope=scope, balance_coefficient=0.5, z_coefficient=0.1)
    with all_fp64():
        model = tiny_model("tiny-qwen3.5-moe", dtype=torch.float64, experts_implementation="eager")
        recompute_activations(harts.attach(model))
        results = []
        for budget, size in ((100_000, 1), (260, 1), (100_000, 4)):
            total, grads, load = 0.0, [], 0
            for rank in range(size):  # of several replicas, one after the other; loads of all would be all-reduced
                replicas = Replicas(rank, size)
                step = plan_step(trajectories, token_budget=budget, replicas=replicas)
                counts = results[0][3] if size > 1 else count_routes(model, step, router, replicas)
                done = accumulate(model, step, loss, router=router, router_step=counts)
                assert done.router_counts is not None
                total, load = total + done.router_loss, load + done.router_counts.load_YE
                grads.append(gradients(model))
            summed = {name: torch.stack([part[name] for part in grads]).sum(0) for name in grads[0]}
            results.append((total, load, summed, counts))
    for total, load, grads_of, _ in results[1:]:
        assert total == pytest.approx(results[0][0], rel=1e-10)
        assert torch.equal(load, results[0][1])
        for key, expected in results[0][2].items():
            assert float((grads_of[key] - expected).norm()) <= 1e-8 * float(expected.norm()), key


def test_a_mixture_of_experts_trains_with_its_routers_asked(tmp_path: Path) -> None:
    data = write(tmp_path / "data.jsonl", rollouts())
    router = RouterConfig(scope="step", balance_coefficient=0.01)
    settings = config(data, model="tiny-qwen3.5-moe", router=router, steps=3, dtype="float32")
    records = run(Trainer(settings, tmp_path / "run"))
    assert records[-1]["loss"] < records[0]["loss"]
    assert records[0]["router_loss"] > 0
    assert records[0]["router_max_violation"] > 0
    toml = tmp_path / "run.toml"
    toml.write_text("data = 'data.jsonl'\n[router]\nbalance_coefficient = 0.1\n")
    with pytest.raises(ValueError, match=r"\[router\]: field scope is missing"):
        TrainConfig.load(toml)


def test_update_refuses_a_gradient_that_is_not_finite() -> None:
    model = nn.Linear(2, 2)
    before = model.weight.detach().clone()
    model.weight.grad = torch.full_like(model.weight, torch.nan)
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(ValueError, match="expected a finite number, got nan"):
        update(optimizer, Replicas(), learning_rate=0.1, max_grad_norm=1.0)
    assert torch.equal(model.weight, before)


def test_update_takes_the_steps_learning_rate_and_bounds_the_gradient() -> None:
    model = nn.Linear(2, 1, bias=False)
    before = model.weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=7.0)
    for rate in (0.5, 0.25):
        model.weight.grad = torch.tensor([[3.0, 4.0]])
        assert update(optimizer, Replicas(), learning_rate=rate, max_grad_norm=1.0) == pytest.approx(5.0)
        before -= rate * torch.tensor([[0.6, 0.8]])
        torch.testing.assert_close(model.weight.detach(), before)
        assert model.weight.grad is None


# -- the trainer ---------------------------------------------------------------------------------------------------


def config(data: str, **changes: Any) -> TrainConfig:
    settings: dict[str, Any] = {
        "loss": LossConfig(algorithm="supervised"),
        "groups_per_step": 2,
        "steps": 6,
        "token_budget": 400,
        "learning_rate": 3e-3,
        "checkpoint_every": 2,
        "dtype": "float64",
    }
    return TrainConfig(data=data, **{**settings, **changes})


def run(trainer: Trainer) -> list[dict[str, Any]]:
    return [metrics.to_dict() for metrics in trainer.run()]


def timeless(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    clocks = ("seconds", "plan_seconds", "compute_seconds", "rows_per_s")
    return [{key: value for key, value in record.items() if key not in clocks} for record in records]


def test_supervised_loss_falls_and_everything_is_on_disk(tmp_path: Path) -> None:
    data = write(tmp_path / "data.jsonl", rollouts())
    trainer = Trainer(config(data, steps=8, schedule="cosine", warmup_steps=2), tmp_path / "run")
    records = run(trainer)
    assert records[-1]["loss"] < records[0]["loss"]
    assert [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()] == records
    assert records[0]["unique_rows"] < records[0]["tokens"]
    assert records[0]["learning_rate"] == pytest.approx(1.5e-3)
    assert (tmp_path / "run/checkpoint-000008/model.safetensors").exists()
    assert len(list((tmp_path / "run").glob("checkpoint-*"))) == 2
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "run/checkpoint-000008")
    assert torch.equal(loaded.lm_head.weight, trainer.model.lm_head.weight)


@pytest.mark.parametrize(("model", "dtype"), [("tiny-qwen3.5", "float64"), ("tiny-qwen3.5-moe", "float32")])
def test_resume_is_exact(model: str, dtype: str, tmp_path: Path) -> None:
    data = write(tmp_path / "data.jsonl", rollouts())
    loss = LossConfig(algorithm="grpo", kl_coef=0.05)
    settings = config(data, loss=loss, weight_decay=0.1, model=model, dtype=dtype)
    whole = run(Trainer(settings, tmp_path / "whole"))
    steps = Trainer(settings, tmp_path / "parts").run()
    for _ in range(3):  # dies behind step 3; the newest checkpoint is that of step 2
        next(steps)
    steps.close()
    resumed = Trainer(settings, tmp_path / "parts", resume=True)
    assert resumed.step == 2
    run(resumed)
    parts = [json.loads(line) for line in (tmp_path / "parts/metrics.jsonl").read_text().splitlines()]
    assert timeless(parts) == timeless(whole)
    first, second = (latest_checkpoint(tmp_path / name) for name in ("whole", "parts"))
    assert first is not None
    assert second is not None
    for name in ("model.safetensors", "optimizer.safetensors"):
        assert (first / name).read_bytes() == (second / name).read_bytes()


def test_a_signal_ends_the_step_and_leaves_a_checkpoint(tmp_path: Path) -> None:
    data = write(tmp_path / "data.jsonl", rollouts())
    said: list[str] = []
    trainer = Trainer(config(data), tmp_path / "run", log=said.append)
    steps = trainer.run()
    next(steps)
    os.kill(os.getpid(), signal.SIGTERM)
    assert said[-1] == "finishing step 2, then a checkpoint; again to quit now"
    with pytest.raises(Interrupted, match="--resume"):
        list(steps)
    assert latest_checkpoint(tmp_path / "run") == tmp_path / "run/checkpoint-000002"


def test_missing_behaviour_and_reference_logprobs_are_computed(tmp_path: Path) -> None:
    bare = [dataclasses.replace(one, logprobs=None, ref_logprobs=None) for one in rollouts()]
    data = write(tmp_path / "data.jsonl", bare)
    settings = config(data, loss=LossConfig(algorithm="grpo", kl_coef=0.1), steps=2)
    records = run(Trainer(settings, tmp_path / "run"))
    assert records[0]["ratio_mean"] == pytest.approx(1, abs=1e-9)
    assert records[0]["ref_kl"] == pytest.approx(0, abs=1e-9)
    assert records[1]["ref_kl"] > 1e-6


def test_tree_training_follows_separate_rows(tmp_path: Path) -> None:
    """A short run of what benchmarks/drift.py does at length."""
    data = write(tmp_path / "data.jsonl", rollouts())
    with all_fp64():
        records = {s: run(Trainer(config(data, share=s), tmp_path / s)) for s in ("tree", "none")}
    for ours, theirs in zip(records["tree"], records["none"], strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-9)


def test_a_saved_plan_is_followed(tmp_path: Path) -> None:
    trajectories = rollouts()
    data = write(tmp_path / "data.jsonl", trajectories)
    plan = harts.make_plan(harts.PrefixTree.build(trajectories), token_budget=250)
    saved = tmp_path / "plan.json"
    saved.write_text(json.dumps(plan.to_json()))
    settings = config(data, plan=str(saved), groups_per_step=9, token_budget=2000, steps=2)
    trainer = Trainer(settings, tmp_path / "run")
    assert trainer.plan(0).plan == plan
    records = run(trainer)
    assert records[0]["microbatches"] == plan.slots > 1
    with pytest.raises(ValueError, match="expected all 3 groups"):
        Trainer(dataclasses.replace(settings, groups_per_step=2), tmp_path / "few")
    other = write(tmp_path / "other.jsonl", rollouts(seed=1))
    with pytest.raises(ValueError, match="got other trajectories"):
        Trainer(dataclasses.replace(settings, data=other), tmp_path / "other")


def test_group_advantages_come_from_rewards_alone(tmp_path: Path) -> None:
    given = [dataclasses.replace(one, advantages=100.0, reward=float(i % 3)) for i, one in enumerate(rollouts())]
    data = write(tmp_path / "data.jsonl", given)
    settings = config(data, loss=LossConfig(algorithm="reinforce"), advantage_scale="none", leave_one_out=True)
    trainer = Trainer(settings, tmp_path / "run")
    assert [one.advantages[0] for one in trainer.trajectories[:3]] == pytest.approx([-1.5, 0, 1.5])


def test_checkpoints_of_others_are_left_alone(tmp_path: Path) -> None:
    data = write(tmp_path / "data.jsonl", rollouts())
    for name in ("checkpoint-best", "checkpoint-000001-keep"):
        (tmp_path / "run" / name).mkdir(parents=True)
    run(Trainer(config(data, checkpoint_every=1, steps=4), tmp_path / "run"))
    names = sorted(path.name for path in (tmp_path / "run").glob("checkpoint-*"))
    assert names == ["checkpoint-000001-keep", "checkpoint-000003", "checkpoint-000004", "checkpoint-best"]


def test_a_first_look_stays_within_the_budget(tmp_path: Path) -> None:
    data = write(tmp_path / "data.jsonl", rollouts())
    seen = first_look(Trainer(config(data, token_budget=250, dtype="float32"), tmp_path / "run"))
    assert seen.tokens <= 250
    assert seen.logprob_max_abs < 1e-5


# -- bad input -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"token_budget": 50}, r"trajectory '\w+', field token_ids: .* token budget \(50\)"),
        ({"device": "cuda:99"}, "device: 'cuda:99' is not there"),
        ({"device": "abacus"}, "device: expected cpu, cuda or cuda:NUMBER, got 'abacus'"),
        ({"model": "gpt-17"}, "expected a directory or one of tiny-qwen3.5"),
        ({"seed": -1}, "field seed: expected a number >= 0"),
        ({"groups_per_step": 0}, "field groups_per_step: expected a number >= 1, got 0"),
        ({"steps": True}, "field steps: expected int"),
        ({"dtype": "float8"}, "field dtype: expected one of 'float32'"),
        ({"learning_rate": float("nan")}, "field learning_rate: expected a finite number > 0"),
        ({"warmup_steps": 6}, "field warmup_steps"),
    ],
)
def test_bad_settings(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    data = write(tmp_path / "data.jsonl", rollouts())
    with pytest.raises(ValueError, match=message):
        Trainer(config(data, **changes), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_bad_data_is_refused_before_the_first_step(tmp_path: Path) -> None:
    rows = rollouts()
    rows[4] = dataclasses.replace(rows[4], ref_logprobs=None)
    data = write(tmp_path / "mixed.jsonl", rows)
    with pytest.raises(ValueError, match=r"trajectory '4', field ref_logprobs: expected values, as 8 other"):
        Trainer(config(data), tmp_path / "run")
    silent = [dataclasses.replace(one, loss_mask=np.zeros(len(one), bool)) for one in rollouts()[3:6]]
    data = write(tmp_path / "silent.jsonl", [*rollouts()[:3], *silent])
    with pytest.raises(ValueError, match="group 'g1': expected a trained token"):
        Trainer(config(data), tmp_path / "run")
    tiny_model("tiny-qwen3").save_pretrained(tmp_path / "model")
    late = dataclasses.replace(rollouts()[0], token_ids=[*rollouts()[0].token_ids[:-1], 512], id="late", group="z")
    data = write(tmp_path / "late.jsonl", [*rollouts(), late])
    with pytest.raises(ValueError, match=r"'late'.*512"):
        Trainer(config(data, model=str(tmp_path / "model")), tmp_path / "run")


def test_missing_rewards_are_named(tmp_path: Path) -> None:
    bare = [dataclasses.replace(one, reward=None, advantages=None) for one in rollouts()]
    data = write(tmp_path / "data.jsonl", bare)
    for advantages, field in (("group", "reward"), ("given", "advantages")):
        with pytest.raises(ValueError, match=rf"trajectory '\w+'.*{field}"):
            Trainer(config(data, loss=LossConfig(), advantages=advantages), tmp_path / "run")


def test_unknown_field_in_the_file_names_the_closest(tmp_path: Path) -> None:
    toml = tmp_path / "run.toml"
    toml.write_text('data = "x.jsonl"\nlearning_rte = 1\n')
    with pytest.raises(ValueError, match=r"unknown field learning_rte; did you mean learning_rate\?"):
        TrainConfig.load(toml)
    toml.write_text("data = 'x.jsonl'\n[loss]\nclip = 1\n")
    with pytest.raises(ValueError, match=r"unknown field clip in \[loss\]"):
        TrainConfig.load(toml)
    toml.write_text("data = 'x.jsonl'\nrecompute = false\nkeep_attention = true\n")
    with pytest.raises(ValueError, match="field keep_attention: expected false, as nothing is recomputed"):
        TrainConfig.load(toml)
    toml.write_text("steps = 3\n")
    with pytest.raises(ValueError, match="field data is missing"):
        TrainConfig.load(toml)


def test_the_smallest_budget_that_is_named_works(tmp_path: Path) -> None:
    data = write(tmp_path / "data.jsonl", rollouts())
    with pytest.raises(ValueError, match=r"set token_budget to \d+ or more") as caught:
        Trainer(config(data, token_budget=60), tmp_path / "run")
    smallest = int(re.findall(r"set token_budget to (\d+)", str(caught.value))[0])
    with pytest.raises(ValueError, match="token budget"):
        Trainer(config(data, token_budget=smallest - 1), tmp_path / "run")
    run(Trainer(config(data, token_budget=smallest, steps=1), tmp_path / "run"))


def test_a_run_that_ended_before_its_first_checkpoint_starts_again(tmp_path: Path) -> None:
    data = write(tmp_path / "data.jsonl", rollouts())
    settings = config(data, checkpoint_every=5, steps=2)
    Trainer(settings, tmp_path / "run")  # nothing done: the folder is free
    steps = Trainer(settings, tmp_path / "run").run()
    next(steps)
    steps.close()
    with pytest.raises(ValueError, match="holds a run already; pass --resume"):
        Trainer(settings, tmp_path / "run")
    records = run(Trainer(settings, tmp_path / "run", resume=True))
    assert [record["step"] for record in records] == [1, 2]


def test_predicted_bytes_stand_beside_the_plan(tmp_path: Path) -> None:
    data = write(tmp_path / "data.jsonl", rollouts())
    model = tiny_model("tiny-qwen3.5", vocab_size=40)
    cost = dataclasses.replace(CostModel.from_config(model.config), memory=Coefficients(rows=1000.0))
    cost.save(tmp_path / "cost.json")
    settings = config(data, cost_model=str(tmp_path / "cost.json"), steps=1, token_budget=2000)
    (record,) = run(Trainer(settings, tmp_path / "run"))
    assert record["predicted_bytes"] == 1000 * record["unique_rows"]
    assert record["peak_bytes"] is None


def test_a_folder_in_use_is_not_overwritten(tmp_path: Path) -> None:
    data = write(tmp_path / "data.jsonl", rollouts())
    run(Trainer(config(data, steps=1), tmp_path / "run"))
    with pytest.raises(ValueError, match="holds a run already; pass --resume"):
        Trainer(config(data, steps=1), tmp_path / "run")
    with pytest.raises(ValueError, match="expected a run to resume, found none"):
        Trainer(config(data, steps=1), tmp_path / "other", resume=True)


def test_resuming_with_other_data_settings_or_model_is_refused(tmp_path: Path) -> None:
    data = write(tmp_path / "data.jsonl", rollouts())
    settings = config(data, steps=1)
    run(Trainer(settings, tmp_path / "run"))
    with pytest.raises(ValueError, match=r"field learning_rate was 0\.003 there and is 0\.1 here"):
        Trainer(dataclasses.replace(settings, learning_rate=0.1), tmp_path / "run", resume=True)
    with pytest.raises(ValueError, match=r"a checkpoint of another model: parameter model\.layers\.0"):
        Trainer(dataclasses.replace(settings, model="tiny-llama"), tmp_path / "run", resume=True)
    other = write(tmp_path / "other.jsonl", rollouts(seed=1))
    with pytest.raises(ValueError, match="other data"):
        Trainer(dataclasses.replace(settings, data=other), tmp_path / "run", resume=True)
