"""`share` on DPO, KTO and SFT, and on GRPO with LoRA, tool masks, experts: the same training as stock, fewer rows."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("trl", reason="TRL is not installed")

from datasets import Dataset
from peft import LoraConfig
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, KTOConfig, KTOTrainer, SFTConfig, SFTTrainer
from trl_arms import (
    END,
    WORDS,
    assert_same,
    calls_of,
    prompts,
    reward,
    run,
    saved,
    settings,
    text_of,
    tiny,
    word_tokenizer,
)

from harts.integrations.trl import share

BATCH = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}


def answers(seed: int) -> list[str]:
    rng = np.random.default_rng(seed)
    return [" " + text_of(rng.integers(2, WORDS, int(rng.integers(3, 9))).tolist()) for _ in range(16)]


def questions() -> list[str]:
    """Each four times."""
    return [each for each in prompts(4) for _ in range(4)]


def dpo(out: Path, model: Any, **changes: Any) -> Any:
    rows = {"prompt": questions(), "chosen": answers(0), "rejected": answers(1)}
    return trainer(DPOTrainer, DPOConfig, out, model, rows, **changes)


def kto(out: Path, model: Any, **changes: Any) -> Any:
    rows = {"prompt": questions(), "completion": answers(0), "label": [number % 3 > 0 for number in range(16)]}
    return trainer(KTOTrainer, KTOConfig, out, model, rows, **changes)


def sft(out: Path, model: Any, **changes: Any) -> Any:
    rows = {"prompt": questions(), "completion": answers(0)}
    return trainer(SFTTrainer, SFTConfig, out, model, rows, **changes)


def trainer(
    kind: Any, config: Any, out: Path, model: Any, rows: dict[str, Any], peft: bool = False, **changes: Any
) -> Any:
    return kind(
        model=model,
        args=config(**settings(out, **BATCH, **changes)),
        train_dataset=Dataset.from_dict(rows),
        processing_class=word_tokenizer(),
        **({"peft_config": lora()} if peft else {}),
    )


def lora() -> LoraConfig:
    """All linear layers of a Qwen3.5; B starts at random, so that A has gradients too."""
    targets = ["q_proj", "v_proj", "in_proj_qkv", "out_proj", "down_proj"]
    return LoraConfig(r=4, target_modules=targets, init_lora_weights=False, task_type="CAUSAL_LM")


@pytest.mark.parametrize("make", [dpo, kto, sft])
@pytest.mark.parametrize("peft", [False, True], ids=["whole", "lora"])
def test_share_trains_as_stock_and_runs_fewer_rows(tmp_path: Path, make: Callable[..., Any], peft: bool) -> None:
    model = saved(tmp_path, "tiny-qwen3.5")
    torch.manual_seed(0)
    stock = make(tmp_path, model, peft=peft)
    torch.manual_seed(0)  # of LoRA
    ours = share(make(tmp_path, model, peft=peft))
    rows, fewer = calls_of(stock.model), calls_of(ours.model)
    assert_same(stock, ours)
    assert sum(fewer) < 0.75 * sum(rows)


@pytest.mark.parametrize(
    ("make", "changes"),
    [
        (dpo, {"loss_type": ["ipo", "sft"], "precompute_ref_log_probs": True, "gradient_checkpointing": True}),
        (kto, {"loss_type": "apo_zero_unpaired"}),
        (sft, {"loss_type": "dft"}),
        (sft, {"packing": True, "max_length": 64}),
        (sft, {"padding_free": True, "max_length": None, "completion_only_loss": False}),
    ],
    ids=["ipo", "apo", "dft", "packing", "padding-free"],
)
def test_variants_train_as_stock(tmp_path: Path, make: Callable[..., Any], changes: dict[str, Any]) -> None:
    """On full attention: stock transformers does not keep packed rows apart in linear attention on a CPU."""
    model = saved(tmp_path, "tiny-qwen3")
    assert_same(make(tmp_path, model, **changes), share(make(tmp_path, model, **changes)))


@pytest.mark.parametrize("make", [dpo, kto, sft])
def test_mixed_precision(tmp_path: Path, make: Callable[..., Any]) -> None:
    """TRL's default, in which two ways of computing agree to some digits."""
    model = saved(tmp_path, "tiny-qwen3")
    losses, norms = run(make(tmp_path, model, bf16=True))
    found, found_norms = run(share(make(tmp_path, model, bf16=True)))
    np.testing.assert_allclose(found, losses, rtol=2e-2)
    np.testing.assert_allclose(found_norms, norms, rtol=2e-2)


def test_metrics_are_those_of_stock(tmp_path: Path) -> None:
    model = saved(tmp_path, "tiny-qwen3")
    for make in (dpo, sft):
        stock, ours = make(tmp_path, model, max_steps=1), share(make(tmp_path, model, max_steps=1))
        found = []
        for each in (stock, ours):
            torch.manual_seed(0)
            each.train()
            found.append(each.state.log_history[0])
        names = {"entropy", "mean_token_accuracy", "logits/chosen", "logits/rejected"} & set(found[0])
        assert len(names) >= 2
        for name in names:
            assert float(found[1][name]) == pytest.approx(float(found[0][name]), rel=1e-4, abs=1e-6), name


def groups(out: Path, model: Any, peft: bool = False, with_mask: bool = False, **changes: Any) -> Any:
    """GRPO with completions of several turns: what the environment says is masked, and shared within a group."""
    rng = np.random.default_rng(5)

    def rollout(texts: list[str], trainer: Any) -> dict[str, Any]:
        given = trainer.processing_class(texts)["input_ids"]
        first, said = rng.integers(2, WORDS, 6).tolist(), rng.integers(2, WORDS, 9).tolist()
        last = [rng.integers(2, WORDS, int(rng.integers(2, 8))).tolist() for _ in given]
        mask = {"env_mask": [[1] * 6 + [0] * 9 + [1] * (len(row) + 1) for row in last]} if with_mask else {}
        rows = [[*first, *said, *row, END] for row in last]
        return {"prompt_ids": given, "completion_ids": rows, "logprobs": None, **mask}

    return GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=GRPOConfig(**settings(out, **BATCH, num_generations=4, max_completion_length=32, **changes)),
        train_dataset=Dataset.from_dict({"prompt": prompts(4)}),
        processing_class=word_tokenizer(),
        rollout_func=rollout,
        **({"peft_config": lora()} if peft else {}),
    )


def test_tool_masks_and_lora_train_as_stock(tmp_path: Path) -> None:
    model = saved(tmp_path, "tiny-qwen3.5")
    arms = []
    for _ in range(2):
        torch.manual_seed(0)
        arms.append(groups(tmp_path, model, peft=True, with_mask=True, beta=0.1))
    rows, fewer = calls_of(arms[0].model), calls_of(arms[1].model)
    assert_same(arms[0], share(arms[1]))
    assert sum(fewer) < 0.5 * sum(rows)


def test_a_mask_counts(tmp_path: Path) -> None:
    """What the test above would not see if nobody passed the mask on."""
    with_mask, without = (groups(tmp_path, tiny(), with_mask=each, max_steps=1) for each in (True, False))
    with pytest.raises(AssertionError):
        assert_same(with_mask, share(without))


@pytest.mark.parametrize("make", [groups, dpo])
def test_experts_have_the_same_auxiliary_loss(tmp_path: Path, make: Callable[..., Any]) -> None:
    model = saved(tmp_path, "tiny-qwen3-moe")
    stock, ours = (make(tmp_path, model, router_aux_loss_coef=0.5) for _ in range(2))
    assert stock.aux_loss_enabled
    assert_same(stock, share(ours))


def test_two_processes_train_as_stock(tmp_path: Path) -> None:
    """DDP by accelerate; each process has its own groups, regrouped by itself."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    started = [
        subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("trl_two_processes.py")), str(tmp_path)],
            env={**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank), "ACCELERATE_USE_CPU": "true"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said = [process.communicate(timeout=300)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0, 0], said
    for rank in range(2):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        np.testing.assert_allclose(found["harts"]["losses"], found["stock"]["losses"], rtol=0, atol=1e-6)
        np.testing.assert_allclose(found["harts"]["norms"], found["stock"]["norms"], rtol=1e-5)
        assert found["harts"]["rows"] < 0.5 * found["stock"]["rows"]
