"""Is what is learnt on the tree what is learnt on separate rows? Two checks, and faults that each must catch.

    python examples/agent_rl/compare.py same-games runs/rows-fp64 runs/tree-fp64
    python examples/agent_rl/compare.py replay runs/rows-0 --steps 60 --out replay.jsonl

`same-games` reads two runs of `train.py` with one seed. `replay` takes the games that a run played, and trains copies
of one new model on them in fp32: on rows, on rows in another order, on the tree, and on trees with a fault.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from arms import ARMS, FAULTS, prepare
from rollouts import Row, advantages
from torch import Tensor, nn

from train import Config, loss_of, new_model

__all__ = ["games_of", "replay", "same_games"]


def same_games(one: Path, other: Path) -> dict[str, Any]:
    """How many steps played the same games token by token, and how far the parameters are apart behind the last step.

    Where one run is shorter, its steps are compared, and parameters are not.

    Raises:
        ValueError: the runs have other settings.
    """
    configs = [json.loads((path / "config.json").read_text()) for path in (one, other)]
    for name in set(configs[0]) - {"arm"}:
        if configs[0][name] != configs[1][name]:
            raise ValueError(f"{other}: expected {name} {configs[0][name]}, as in {one}, got {configs[1][name]}")
    lines = [[json.loads(line) for line in (path / "steps.jsonl").read_text().splitlines()] for path in (one, other)]
    states = [torch.load(path / "state.pt", weights_only=True)["model"] for path in (one, other)]
    same = [first["games"] == second["games"] for first, second in zip(*lines, strict=False)]
    apart = max(float((states[0][name] - states[1][name]).abs().max()) for name in states[0])
    return {
        "check": "same games",
        "arms": [config["arm"] for config in configs],
        "fp64": configs[0]["fp64"],
        "seed": configs[0]["seed"],
        "steps": len(same),
        "steps_with_the_same_games": same.index(False) if False in same else len(same),
        "parameters_apart": apart if len(lines[0]) == len(lines[1]) else None,
        "win_rate_at_the_end": [sum(line["win_rate"] for line in each[-10:]) / len(each[-10:]) for each in lines],
    }


def games_of(run: Path, steps: int) -> Iterator[list[Row]]:
    """The rows that a run trained on, step by step."""
    with (run / "games.jsonl").open() as file:
        for _, line in zip(range(steps), file, strict=False):
            yield [Row(**row) for row in json.loads(line)["rows"]]


def replay(batches: Sequence[list[Row]], config: Config, arms: Sequence[str]) -> list[dict[str, float]]:
    """Trains a new model per arm on the same games, with the `rows` arm as the reference.

    Returns:
        Of each step, the norm of every other arm's parameters less those of `rows`.
    """
    trained = {}
    for arm in ("rows", *arms):
        model = prepare(new_model(config), arm)
        trained[arm] = model, torch.optim.AdamW(model.parameters(), lr=config.learning_rate, weight_decay=0.0)
    distances = []
    for rows in batches:
        for arm, (model, optimizer) in trained.items():
            loss = loss_of(ARMS[arm](model, rows), rows, advantages(rows), config.clip)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        reference = _parameters(trained["rows"][0])
        distances.append({arm: float((_parameters(trained[arm][0]) - reference).norm()) for arm in arms})
    return distances


def _parameters(model: nn.Module) -> Tensor:
    return torch.cat([each.detach().reshape(-1) for each in model.parameters()]).double()


def main() -> None:
    """Prints, and keeps, JSON lines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    first = commands.add_parser("same-games")
    first.add_argument("runs", type=Path, nargs=2)
    second = commands.add_parser("replay")
    second.add_argument("run", type=Path)
    second.add_argument("--steps", type=int, default=60)
    for each in (first, second):
        each.add_argument("--out", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.command == "same-games":
        line = same_games(*given.runs)
    else:
        config = Config(**{**json.loads((given.run / "config.json").read_text()), "fp64": False})
        distances = replay(list(games_of(given.run, given.steps)), config, ("reordered", "tree", *FAULTS))
        line = {"check": "replay", "steps": len(distances), "seed": config.seed, "distance": distances[-1]}
        line["over_reordered"] = {
            arm: value / distances[-1]["reordered"] for arm, value in distances[-1].items() if arm != "reordered"
        }
        line["distance_by_step"] = {
            arm: [each[arm] for each in distances[:: max(1, len(distances) // 20)]] for arm in distances[0]
        }
    print(json.dumps(line))
    if given.out:
        with given.out.open("a") as file:
            file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
