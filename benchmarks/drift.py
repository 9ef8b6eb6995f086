"""How far training on the tree drifts from training on separate rows, against the drift of separate rows themselves.

Three copies of one fp64 model take the same optimiser steps on real rows (supervised loss, AdamW):

    tree        all rows of the step in one prefix tree
    separate    each row alone, through untouched transformers, one after the other
    reordered   the same in the opposite order: what summing in another order does by itself

Beside that, every step is taken once more on the tree from the parameters and optimiser state of `separate`, and the
parameters behind that single step are compared. One JSON line goes to stdout.

    python benchmarks/drift.py examples/data/lats-webshop.jsonl.gz --steps 200
"""

import argparse
import copy
import json
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

import harts
from harts.models import tiny_model
from harts.testing.fp64 import all_fp64
from harts.train.batches import Batches
from harts.trajectory import Trajectory
from harts.vocabulary import remap_vocabulary

Scores = Callable[[nn.Module, Sequence[Trajectory]], Tensor]


class Arm:
    """A model, its optimiser and how it scores rows."""

    def __init__(self, model: nn.Module, score: Scores, learning_rate: float) -> None:
        self.model, self.score = model, score
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)

    def step(self, rows: Sequence[Trajectory]) -> tuple[float, Tensor]:
        """One supervised step; returns the loss and the log-probs before it."""
        logprobs_N = self.score(self.model, rows)
        loss = -logprobs_N.sum() / sum(row.num_trained for row in rows)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return float(loss.detach()), logprobs_N.detach()

    def parameters(self) -> Tensor:
        """All parameters in one vector."""
        return torch.cat([parameter.detach().reshape(-1) for parameter in self.model.parameters()])

    def start_from(self, other: "Arm") -> None:
        """Takes over another arm's parameters and optimiser state."""
        self.model.load_state_dict(other.model.state_dict())
        self.optimizer.load_state_dict(copy.deepcopy(other.optimizer.state_dict()))


def on_tree(model: nn.Module, rows: Sequence[Trajectory]) -> Tensor:
    return harts.logprobs(model, harts.pack(harts.PrefixTree.build(rows)))


def one_by_one(model: nn.Module, rows: Sequence[Trajectory], *, backwards: bool = False) -> Tensor:
    scores: dict[int, Tensor] = {}
    for index in reversed(range(len(rows))) if backwards else range(len(rows)):
        ids = torch.tensor(rows[index].token_ids, dtype=torch.int64).unsqueeze(0)
        logp = model(input_ids=ids, use_cache=False).logits[0, :-1].log_softmax(-1)
        scored = torch.cat([logp.new_zeros(1), logp.gather(1, ids[0, 1:, None]).squeeze(1)])
        scores[index] = scored * torch.tensor(rows[index].loss_mask)
    return torch.cat([scores[index] for index in range(len(rows))])


def drift(batches: Batches, vocabulary: int, steps: int, learning_rate: float) -> dict[str, Any]:
    def fresh() -> nn.Module:
        return tiny_model("tiny-qwen3.5", dtype=torch.float64, vocab_size=vocabulary)

    tree, again = (Arm(harts.attach(fresh()), on_tree, learning_rate) for _ in range(2))
    separate = Arm(fresh(), one_by_one, learning_rate)
    reordered = Arm(fresh(), lambda model, rows: one_by_one(model, rows, backwards=True), learning_rate)
    names = ("loss", "logprobs", "parameters")
    worst = {arm: dict.fromkeys(names, 0.0) for arm in ("tree", "reordered")}
    single = 0.0
    losses = []
    start = time.perf_counter()
    for step in range(steps):
        rows = batches.of_step(step)
        again.start_from(separate)
        again.step(rows)
        loss, logprobs_N = separate.step(rows)
        losses.append(loss)
        expected = separate.parameters()
        single = max(single, float((again.parameters() - expected).norm() / expected.norm()))
        for name, arm in (("tree", tree), ("reordered", reordered)):
            other_loss, other_logprobs_N = arm.step(rows)
            far = (
                abs(other_loss - loss),
                float((other_logprobs_N - logprobs_N).abs().max()),
                float((arm.parameters() - expected).norm() / expected.norm()),
            )
            worst[name] = {key: max(worst[name][key], value) for key, value in zip(names, far, strict=True)}
        seconds = time.perf_counter() - start
        print(f"step {step + 1}/{steps}  loss {loss:.4f}  {seconds:.0f} s  {worst}", file=sys.stderr)
    epoch = min(batches.steps_per_epoch, steps)
    return {
        "steps": steps,
        "first_epoch_loss": sum(losses[:epoch]) / epoch,
        "last_epoch_loss": sum(losses[-epoch:]) / epoch,
        "single_step_parameters_max_rel": single,
        "drift": worst,
        "drift_ratio": {key: worst["tree"][key] / worst["reordered"][key] for key in names},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rows-per-group", type=int, default=4, help="first rows of each group that are used")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    options = parser.parse_args()
    rows = harts.read(options.data)
    taken: dict[str, list[Trajectory]] = {}
    for row in rows:
        if len(taken.setdefault(row.group, [])) < options.rows_per_group:
            taken[row.group].append(row)
    trajectories, vocabulary = remap_vocabulary([row for group in taken.values() for row in group])
    batches = Batches(trajectories, groups_per_step=1, seed=0)
    with all_fp64():
        result = drift(batches, len(vocabulary), options.steps, options.learning_rate)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    named = options.data.name if options.data.is_absolute() else options.data
    result |= {
        "data": options.data.name,
        "rows": len(trajectories),
        "sharing": harts.PrefixTree.build(trajectories).sharing,
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "commit": commit.stdout.strip(),
        "command": f"python benchmarks/drift.py {named} --steps {options.steps}",
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
