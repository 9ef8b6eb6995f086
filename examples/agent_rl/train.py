"""Trains a tiny hybrid model to walk FrozenLake, on the tree or on separate rows, in pieces that resume.

    python examples/agent_rl/train.py --arm tree --seed 0 --steps 120 --out runs/lake-tree-0
    python examples/agent_rl/train.py --arm rows --seed 0 --steps 120 --out runs/lake-rows-0

A run that is interrupted goes on where it was when the same command is given again. Needs textarena 0.7.4.
"""

import argparse
import contextlib
import hashlib
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from arms import ARMS, prepare
from lake import VOCABULARY, Game, Lake
from rollouts import Row, advantages, play_step
from torch import Tensor, nn

from harts.models import tiny_model
from harts.testing.fp64 import all_fp64

__all__ = ["Config", "Run", "loss_of", "new_model"]


@dataclass(frozen=True)
class Config:
    """All that decides a run, but for the number of its steps."""

    arm: str = "tree"
    seed: int = 0
    fp64: bool = False
    boards: int = 4
    starts: int = 6
    branches: int = 4
    learning_rate: float = 3e-3
    clip: float = 0.2


def new_model(config: Config) -> nn.Module:
    """Three layers of gated delta rule and one of attention, the same for a seed."""
    dtype = torch.float64 if config.fp64 else torch.float32
    return tiny_model("tiny-qwen3.5", vocab_size=len(VOCABULARY), dtype=dtype, seed=config.seed)


def loss_of(logprobs: Sequence[Tensor], rows: Sequence[Row], advantage: Sequence[float], clip: float) -> Tensor:
    """The clipped policy loss, a mean over the tokens that the model chose."""
    total, count = logprobs[0].new_zeros(()), 0
    for values, row, each in zip(logprobs, rows, advantage, strict=True):
        chosen = torch.tensor(row.chosen)
        behaviour = torch.tensor(row.logprobs, dtype=torch.float64).to(values.dtype)
        ratio = (values - behaviour)[chosen].exp()
        total = total - torch.minimum(ratio * each, ratio.clamp(1 - clip, 1 + clip) * each).sum()
        count += int(chosen.sum())
    return total / count


class Run:
    """A model, its optimiser, and a folder with config.json, steps.jsonl, games.jsonl and state.pt.

    Args:
        config: must be that of the folder, where it holds a run already.
        out: the folder.
        make: the game.
    """

    def __init__(self, config: Config, out: Path, make: Callable[[], Game] = Lake) -> None:
        self.config, self.out, self.make = config, out, make
        out.mkdir(parents=True, exist_ok=True)
        written = out / "config.json"
        if written.exists() and json.loads(written.read_text()) != asdict(config):
            raise ValueError(f"{out}: expected the config that the run was begun with, see config.json, got another")
        written.write_text(json.dumps(asdict(config)))
        self.step = 0
        self.model = prepare(new_model(config), config.arm)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=config.learning_rate, weight_decay=0.0)
        if (out / "state.pt").exists():
            state = torch.load(out / "state.pt", weights_only=True)
            self.step = state["step"]
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
        for name in ("steps.jsonl", "games.jsonl"):  # lines behind the last state are taken again
            if (out / name).exists():
                lines = (out / name).read_text().splitlines(keepends=True)
                kept = [line for line in lines if json.loads(line)["step"] < self.step]
                (out / name).write_text("".join(kept))

    def train(self, steps: int, save_every: int = 10) -> None:
        """Goes on until so many steps are done."""
        with all_fp64() if self.config.fp64 else contextlib.nullcontext():
            while self.step < steps:
                line, games = self._take_step()
                for name, value in (("steps.jsonl", line), ("games.jsonl", games)):
                    with (self.out / name).open("a") as file:
                        file.write(json.dumps(value) + "\n")
                self.step += 1
                if self.step % save_every == 0 or self.step == steps:
                    self._save()

    def _take_step(self) -> tuple[dict[str, Any], dict[str, Any]]:
        config = self.config
        seconds = [time.perf_counter()]
        sizes = {"boards": config.boards, "starts": config.starts, "branches": config.branches}
        rows = play_step(self.model, self.make, seed=config.seed, step=self.step, **sizes)
        seconds.append(time.perf_counter())
        logprobs = ARMS[config.arm](self.model, rows)
        loss = loss_of(logprobs, rows, advantages(rows), config.clip)
        self.optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        seconds.append(time.perf_counter())
        self.optimizer.step()
        from_start = [row for row in rows if not row.forced]
        off = [
            (values.detach().double() - torch.tensor(row.logprobs).double()).abs()
            for values, row in zip(logprobs, rows, strict=True)
        ]
        entropy = -np.sum([sum(row.logprobs) for row in rows]) / sum(sum(row.chosen) for row in rows)
        line = {
            "step": self.step,
            "win_rate": float(np.mean([row.reward == 1 for row in from_start])),
            "reward": float(np.mean([row.reward for row in from_start])),
            "loss": float(loss.detach()),
            "grad_norm": float(norm),
            "entropy": float(entropy),
            "generation_gap": float(torch.cat(off).max()),
            "tokens": sum(len(row.tokens) for row in rows),
            "games": hashlib.sha256(json.dumps([row.tokens for row in rows]).encode()).hexdigest()[:16],
            "seconds": {"rollout": seconds[1] - seconds[0], "score": seconds[2] - seconds[1]},
        }
        return line, {"step": self.step, "rows": [asdict(row) for row in rows]}

    def _save(self) -> None:
        state = {"step": self.step, "model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        torch.save(state, self.out / "state.pt.new")
        os.replace(self.out / "state.pt.new", self.out / "state.pt")


def main() -> None:
    """Trains one run and prints a line every ten steps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arm", choices=sorted(ARMS), default="tree")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--fp64", action="store_true", help="all in fp64, casts of transformers to fp32 lifted")
    parser.add_argument("--learning-rate", type=float, default=Config.learning_rate)
    parser.add_argument("--boards", type=int, default=Config.boards, help="of a step")
    parser.add_argument("--starts", type=int, default=Config.starts, help="games from the start of each board")
    parser.add_argument("--branches", type=int, default=Config.branches, help="games from the middle of those")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    torch.set_num_threads(1)
    config = Config(**{name: value for name, value in vars(given).items() if name not in ("steps", "out")})
    run = Run(config, given.out)
    while run.step < given.steps:
        run.train(min(given.steps, run.step + 10))
        lines = [json.loads(line) for line in (given.out / "steps.jsonl").read_text().splitlines()[-10:]]
        means = {name: float(np.mean([line[name] for line in lines])) for name in ("win_rate", "reward", "entropy")}
        took = {name: float(np.mean([line["seconds"][name] for line in lines])) for name in ("rollout", "score")}
        print(run.step, {name: round(value, 3) for name, value in (means | took).items()}, flush=True)


if __name__ == "__main__":
    main()
