"""A TRL trainer on a tiny model and made-up groups, run as it comes and on the tree; what both arms share."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedTokenizerFast, TrainerCallback

from harts.models import tiny_model

PROMPTS, GROUP, WORDS = 4, 4, 512
END, PAD = 1, 0


def word_tokenizer() -> PreTrainedTokenizerFast:
    """One token a word "w7", the end, and padding."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit

    words = {f"w{number}": number for number in range(2, WORDS)}
    inner = Tokenizer(WordLevel({"<pad>": PAD, "<end>": END, **words}, unk_token="<pad>"))
    inner.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<end>", padding_side="left")


def text_of(ids: list[int]) -> str:
    return " ".join(f"w{token}" for token in ids)


def prompts(count: int = PROMPTS) -> list[str]:
    """Of different lengths, half of them with the same long start."""
    rng = np.random.default_rng(3)
    start = rng.integers(2, WORDS, 20).tolist()
    rows = [(start if number % 2 else []) + rng.integers(2, WORDS, 5 + 3 * number).tolist() for number in range(count)]
    return [text_of(row) for row in rows]


def play(trainer: Any, seed: int = 0, longest: int = 12) -> None:
    """Completions from a generator instead of the model, so that arms see the same rows whatever rounding does.

    Two of a group begin alike; every fourth is cut off, the others have an end.
    """
    rng = np.random.default_rng(seed)

    def single_turn(prompt_ids: list[list[int]], *_: Any, **__: Any) -> Any:
        completions = []
        for number in range(len(prompt_ids)):
            begin = completions[-1][:3] if number % 2 else []
            row = [*begin, *rng.integers(2, WORDS, int(rng.integers(2, longest - 4))).tolist()]
            completions.append(row if number % 4 == 3 else [*row, END])
        return completions if _is_rloo(trainer) else (completions, None)

    trainer._generate_single_turn = single_turn


def _is_rloo(trainer: Any) -> bool:
    return any(each.__name__ == "RLOOTrainer" for each in type(trainer).__mro__)


def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """The share of even token ids."""
    return [float(np.mean([token % 2 == 0 for token in row])) for row in completion_ids]


class Steps(TrainerCallback):  # type: ignore[misc]
    """The gradient norm of every optimiser step."""

    def __init__(self) -> None:
        self.norms: list[float] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: nn.Module, **_: Any) -> None:
        grads = [each.grad for each in model.parameters() if each.grad is not None]
        self.norms.append(float(torch.stack([grad.double().norm() for grad in grads]).norm()))


def run(trainer: Any) -> tuple[np.ndarray, np.ndarray]:
    """Trains; losses and gradient norms of each optimiser step."""
    steps, losses, step = Steps(), [], trainer.training_step
    trainer.add_callback(steps)

    def noted(*args: Any, **kwargs: Any) -> Any:
        losses.append(step(*args, **kwargs))
        return losses[-1]

    trainer.training_step = noted
    torch.manual_seed(0)  # TRL shuffles with it
    trainer.train()
    parts = torch.stack([loss.detach().double() for loss in losses]).numpy()
    return parts.reshape(len(steps.norms), -1).sum(1), np.array(steps.norms)


def settings(out: Path, **changes: Any) -> dict[str, Any]:
    """Arguments of a config: two small steps in fp32 on a CPU, plain SGD, no clipping."""
    return {
        "output_dir": str(out),
        "use_cpu": True,
        "bf16": False,
        "optim": "sgd",
        "learning_rate": 0.05,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 1e9,
        "max_steps": 2,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "gradient_checkpointing": False,
        "logging_steps": 1,
    } | changes


def calls_of(model: nn.Module) -> list[int]:
    """Rows that the embedding of a model runs in each call from now on."""
    rows: list[int] = []
    embedding = model.get_input_embeddings()  # type: ignore[operator]
    embedding.register_forward_hook(lambda _module, inputs, _output: rows.append(inputs[0].numel()))
    return rows


def tiny(name: str = "tiny-qwen3.5", **changes: Any) -> nn.Module:
    return tiny_model(name, pad_token_id=PAD, eos_token_id=END, **changes)


def saved(out: Path, model: str) -> str:
    """A directory: TRL loads the reference model from there."""
    folder = out / model
    tiny(model).save_pretrained(folder)  # type: ignore[operator]
    return str(folder)


def assert_same(stock: Any, ours: Any) -> None:
    losses, norms = run(stock)
    found, found_norms = run(ours)
    assert np.ptp(norms) > 0
    assert np.abs(norms).min() > 1e-3
    np.testing.assert_allclose(found, losses, rtol=0, atol=1e-6)
    np.testing.assert_allclose(found_norms, norms, rtol=1e-5, atol=0)
