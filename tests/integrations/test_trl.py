"""TRL's trainers on the tree: the same losses and gradient norms as stock, fewer rows, refusals by name."""

import runpy
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("trl", reason="TRL is not installed")

from datasets import Dataset
from transformers import AutoModelForCausalLM
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
from trl_arms import PROMPTS, assert_same, calls_of, play, prompts, reward, run, saved, settings, tiny, word_tokenizer

from harts.integrations.regroup import regroup
from harts.integrations.trl import HartsGRPOTrainer, HartsRLOOTrainer, share

GROUPS = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "num_generations": 4}


def group_trainer(kind: Callable[..., Any], out: Path, model: str = "tiny-qwen3.5", **changes: Any) -> Any:
    config = RLOOConfig if issubclass(kind, RLOOTrainer) else GRPOConfig
    given = {**GROUPS, "max_completion_length": 12, "beta": 0.0, **changes}
    trainer = kind(
        model=tiny(model) if given["beta"] == 0 or "peft_config" in given else saved(out, model),
        reward_funcs=reward,
        args=config(**settings(out, **{name: value for name, value in given.items() if name != "peft_config"})),
        train_dataset=Dataset.from_dict({"prompt": prompts(PROMPTS)}),
        processing_class=word_tokenizer(),
        **({"peft_config": given["peft_config"]} if "peft_config" in given else {}),
    )
    play(trainer)
    return trainer


@pytest.mark.parametrize(
    "changes",
    [
        {"loss_type": "grpo", "num_iterations": 2, "temperature": 0.7},
        {"loss_type": "dapo", "mask_truncated_completions": True, "gradient_checkpointing": True},
        {"loss_type": "bnpo"},
        {"loss_type": "dr_grpo", "beta": 0.1},
        {"loss_type": "cispo", "steps_per_generation": 4},
        {"loss_type": "sapo", "top_entropy_quantile": 0.5},
        {"loss_type": "luspo", "importance_sampling_level": "sequence", "num_iterations": 2},
        {"loss_type": "vespo", "entropy_coef": 0.01},
        {"loss_type": "grpo", "cast_lm_head_to_fp32": True, "importance_sampling_level": "sequence"},
    ],
    ids=lambda changes: "-".join(f"{name}={value}" for name, value in changes.items()),
)
def test_grpo_trains_as_stock(tmp_path: Path, changes: dict[str, Any]) -> None:
    stock = group_trainer(GRPOTrainer, tmp_path, **changes)
    assert_same(stock, group_trainer(HartsGRPOTrainer, tmp_path, **changes))


@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_rloo_trains_as_stock(tmp_path: Path, beta: float) -> None:
    stock = group_trainer(RLOOTrainer, tmp_path, beta=beta, num_iterations=2)
    assert_same(stock, group_trainer(HartsRLOOTrainer, tmp_path, beta=beta, num_iterations=2))


def test_mixed_precision_and_a_reference_model(tmp_path: Path) -> None:
    """TRL's default: autocast to bf16, in which two ways of computing agree to some digits."""
    changes, model = {"bf16": True, "beta": 0.1, "num_iterations": 2}, "tiny-qwen3.5"
    losses, norms = run(group_trainer(GRPOTrainer, tmp_path, model, **changes))
    found, found_norms = run(group_trainer(HartsGRPOTrainer, tmp_path, model, **changes))
    np.testing.assert_allclose(found, losses, rtol=0, atol=2e-3)
    np.testing.assert_allclose(found_norms, norms, rtol=2e-2)
    full, _ = run(group_trainer(HartsGRPOTrainer, tmp_path, model, **{**changes, "bf16": False}))
    assert np.abs(full - found).max() > 1e-6  # it did run in bf16


def test_full_attention_and_share_of_a_stock_trainer(tmp_path: Path) -> None:
    stock, ours = (group_trainer(GRPOTrainer, tmp_path, "tiny-qwen3") for _ in range(2))
    assert share(share(ours)) is ours
    assert_same(stock, ours)


def test_regrouping_runs_fewer_rows_and_keeps_the_step(tmp_path: Path) -> None:
    """bnpo is not regrouped: the same rows, the microbatches of TRL's shuffle."""
    rows = {}
    for loss_type in ("grpo", "bnpo"):
        trainer = group_trainer(HartsGRPOTrainer, tmp_path, "tiny-qwen3", loss_type=loss_type)
        calls = calls_of(trainer.model)
        trainer.train()
        rows[loss_type] = sum(calls)
    stock = group_trainer(GRPOTrainer, tmp_path, "tiny-qwen3")
    calls = calls_of(stock.model)
    stock.train()
    assert rows["grpo"] < 0.9 * rows["bnpo"]
    assert rows["bnpo"] < 0.9 * sum(calls)


# -- refusals ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return group_trainer(GRPOTrainer, tmp_path_factory.mktemp("stock"), "tiny-qwen3")


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("torch_compile", True),
        ("use_liger_kernel", True),
        ("neftune_noise_alpha", 5.0),
        ("use_transformers_continuous_batching", True),
        ("use_weighting", True),
        ("parallelism_config", object()),
    ],
)
def test_options_that_cannot_be_honoured_are_named(
    stock: Any, option: str, value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stock.args, option, value, raising=False)
    with pytest.raises(ValueError, match=f"TRL's option {option} is not supported"):
        share(stock)


@pytest.mark.parametrize("plugin", ["fsdp", "deepspeed"])
def test_sharded_trainers_are_refused(stock: Any, plugin: str, monkeypatch: pytest.MonkeyPatch) -> None:
    state = types.SimpleNamespace(**{f"{plugin}_plugin": object()})
    accelerator = types.SimpleNamespace(state=state, mixed_precision="no")
    monkeypatch.setattr(stock, "accelerator", accelerator)
    with pytest.raises(ValueError, match=f"TRL's option {plugin} is not supported"):
        share(stock)


def test_fp32_head_under_autocast_is_refused(tmp_path: Path) -> None:
    trainer = group_trainer(GRPOTrainer, tmp_path, "tiny-qwen3", cast_lm_head_to_fp32=True, bf16=True)
    with pytest.raises(ValueError, match=r"cast_lm_head_to_fp32 together with mixed precision \(bf16\)"):
        share(trainer)


def test_what_is_no_trainer_of_trl_is_refused(stock: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TypeError, match=r"expected a trainer of TRL with its model, got list"):
        share([])
    monkeypatch.delattr(stock.model, "forward")
    with pytest.raises(TypeError, match=r"TRL's fused LM head, found a forward without its temperature"):
        share(stock)


def test_async_grpo_is_refused(stock: Any) -> None:
    class AsyncGRPOTrainer:  # the class of TRL needs a server to be built
        args, model = stock.args, stock.model

    with pytest.raises(ValueError, match="got AsyncGRPOTrainer, which packs trees for attention by itself"):
        share(AsyncGRPOTrainer())


def test_images_and_other_labels_are_refused(tmp_path: Path) -> None:
    model = group_trainer(HartsGRPOTrainer, tmp_path, "tiny-qwen3").model
    ids = torch.arange(2, 8).view(1, 6)
    assert model(input_ids=ids, labels=ids, fused_lm_head=True).log_probs.shape == (1, 5)
    with pytest.raises(ValueError, match="pixel_values is not supported"):
        model(input_ids=ids, labels=ids, pixel_values=torch.ones(1), fused_lm_head=True)
    with pytest.raises(ValueError, match=r"labels: expected those of input_ids where they are not -100"):
        model(input_ids=ids, labels=ids + 1, fused_lm_head=True)


@pytest.mark.parametrize("found", ["1.14.2", "1.17.0", "2.0"])
def test_versions_outside_the_range_are_refused(found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda _name: found)
    with pytest.raises(ImportError, match=rf"expected TRL from 1.15 to below 1.17.* found {found}"):
        runpy.run_module("harts.integrations.trl")


# -- regrouping --------------------------------------------------------------------------------------------------


def batches() -> list[dict[str, Any]]:
    """Two microbatches of two rows; rows 0 and 3 share their prompt, whose padding differs from nothing else."""
    ids = torch.tensor([[7, 8], [0, 3], [0, 9], [7, 8]])
    whole = {
        "prompt_ids": ids,
        "prompt_mask": (ids != 0).long(),
        "completion_ids": torch.tensor([[5], [5], [5], [4]]),
        "completion_mask": torch.ones(4, 1).long(),
        "advantages": torch.arange(4.0),
        "names": ["a", "b", "c", "d"],
        "num_items_in_batch": torch.tensor(4),
        "old_per_token_logps": None,
    }
    return [
        {
            name: value[start : start + 2] if isinstance(value, list) or (value is not None and value.ndim) else value
            for name, value in whole.items()
        }
        for start in (0, 2)
    ]


def test_regroup_moves_whole_rows() -> None:
    first, second = regroup(batches())
    assert first["names"] == ["b", "d"]  # 3 < 7 8 4 < 7 8 5 < 9, compared without padding
    assert second["names"] == ["a", "c"]
    assert first["advantages"].tolist() == [1, 3]
    assert second["prompt_ids"].tolist() == [[7, 8], [0, 9]]
    assert first["num_items_in_batch"] == 4
    assert first["old_per_token_logps"] is None


def test_regroup_leaves_images_alone() -> None:
    given = [{**batch, "pixel_values": torch.ones(3)} for batch in batches()]
    assert regroup(given) is given


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"loss_type": "bnpo"}, "loss_type='bnpo'"),
        ({"top_entropy_quantile": 0.5}, "top_entropy_quantile"),
        ({"entropy_coef": 0.1}, "entropy bonus"),
        ({"steps_per_generation": 3}, "do not divide one another"),
    ],
)
def test_what_is_not_regrouped_is_said(
    tmp_path: Path, changes: dict[str, Any], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    group_trainer(HartsGRPOTrainer, tmp_path, "tiny-qwen3", **changes)
    assert [reason in record.message for record in caplog.records if "not regrouped" in record.message] == [True]


def test_checkpoints_resume_and_load_without_harts(tmp_path: Path) -> None:
    saving = {"save_strategy": "steps", "save_steps": 1}
    whole = group_trainer(HartsGRPOTrainer, tmp_path / "whole", max_steps=2, num_iterations=2, **saving)
    torch.manual_seed(0)
    whole.train()
    assert "harts" not in (tmp_path / "whole" / "checkpoint-2" / "config.json").read_text()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "whole" / "checkpoint-2")
    for name, value in whole.model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name
    ids = torch.arange(2, 20).view(2, 9)
    generated = [
        each.eval().generate(input_ids=ids, max_new_tokens=4, do_sample=False) for each in (whole.model, loaded)
    ]
    assert torch.equal(*generated)
    again = group_trainer(HartsGRPOTrainer, tmp_path / "again", max_steps=3, num_iterations=2, **saving)
    again.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    assert again.state.global_step == 3
