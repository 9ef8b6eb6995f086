"""TRL's GRPO as it comes against the same trainer on the tree: seconds of a training step, generation apart.

Both arms train a tiny random Qwen3.5 on the same made-up completions, alternating, on one core:
`OMP_NUM_THREADS=1 python benchmarks/trl_step.py --out benchmarks/results/trl_step.jsonl`. Needs TRL.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from torch import nn
from transformers import PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

from harts.integrations.trl import HartsGRPOTrainer
from harts.models import tiny_model
from record import provenance

WORDS = 512


def tokenizer() -> PreTrainedTokenizerFast:
    """One token a word."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit

    inner = Tokenizer(WordLevel({f"w{number}": number for number in range(WORDS)}, unk_token="w0"))
    inner.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="w0", eos_token="w1", padding_side="left")


def trainer_of(kind: type, sizes: argparse.Namespace, folder: str) -> Any:
    """A trainer whose completions come from a generator, and that notes the seconds of each training step."""
    rng = np.random.default_rng(0)
    prompts = [" ".join(f"w{each}" for each in rng.integers(2, WORDS, sizes.prompt)) for _ in range(sizes.groups)]
    config = GRPOConfig(
        output_dir=folder,
        use_cpu=True,
        bf16=False,
        per_device_train_batch_size=sizes.batch,
        gradient_accumulation_steps=sizes.groups * sizes.group_size // sizes.batch,
        num_generations=sizes.group_size,
        max_completion_length=sizes.completion,
        gradient_checkpointing=False,
        max_steps=sizes.steps,
        learning_rate=1e-4,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        logging_strategy="no",
    )
    trainer = kind(
        model=tiny_model("tiny-qwen3.5", pad_token_id=0, eos_token_id=1),
        reward_funcs=lambda completion_ids, **_: [float(np.mean(row)) for row in completion_ids],
        args=config,
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=tokenizer(),
    )
    lengths = np.random.default_rng(1).integers(sizes.completion // 2, sizes.completion, 1000)
    trainer._generate_single_turn = lambda given, *_: (
        [np.random.default_rng(index).integers(2, WORDS, lengths[index]).tolist() for index in range(len(given))],
        None,
    )
    return trainer


def timed(trainer: Any) -> tuple[list[float], int]:
    """Seconds of each optimiser step, and the rows its model ran."""
    rows: list[int] = []
    embedding: nn.Module = trainer.model.get_input_embeddings()
    embedding.register_forward_hook(lambda _module, inputs, _output: rows.append(inputs[0].numel()))
    seconds: list[float] = []
    step = trainer.training_step

    def clocked(*given: Any, **named: Any) -> Any:
        start = time.perf_counter()
        loss = step(*given, **named)
        seconds.append(time.perf_counter() - start)
        return loss

    trainer.training_step = clocked
    torch.manual_seed(0)
    trainer.train()
    parts = trainer.args.gradient_accumulation_steps
    return [sum(seconds[at : at + parts]) for at in range(0, len(seconds), parts)], sum(rows)


def main() -> None:
    """Measures, prints and keeps one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--groups", type=int, default=4)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=384)
    parser.add_argument("--completion", type=int, default=128)
    parser.add_argument("--batch", type=int, default=8, help="rows of a call")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=2, help="how often the two arms take turns")
    parser.add_argument("--out", type=Path)
    sizes = parser.parse_args()
    torch.set_num_threads(1)
    seconds: dict[str, list[float]] = {"stock": [], "harts": []}
    rows = {"stock": 0, "harts": 0}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(sizes.rounds):
            for name, kind in (("stock", GRPOTrainer), ("harts", HartsGRPOTrainer)):
                found, rows[name] = timed(trainer_of(kind, sizes, folder))
                seconds[name] += found
    median = {name: float(np.median(each)) for name, each in seconds.items()}
    line = {
        "benchmark": "trl_step",
        **{name: getattr(sizes, name) for name in ("groups", "group_size", "prompt", "completion", "batch", "steps")},
        "model": "tiny-qwen3.5",
        "seconds": median,
        "rows_per_step": {name: count / sizes.steps for name, count in rows.items()},
        "speedup": median["stock"] / median["harts"],
        "row_ratio": rows["stock"] / rows["harts"],
        **provenance(),
    }
    print(json.dumps(line))
    if sizes.out:
        with sizes.out.open("a") as file:
            file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
