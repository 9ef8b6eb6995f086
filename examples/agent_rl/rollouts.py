"""Games of a step: from their start, and branches from the middle of those; every token and log-probability is kept.

Random numbers are tied to (seed, step), so that two runs whose models agree play the same games.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from lake import TURN, Game
from torch import Tensor, nn

__all__ = ["Row", "advantages", "play_step"]

MOST_TURNS = 16


@dataclass
class Row:
    """One game: tokens, which of them the model chose in it, their log-probabilities then, the reward of the game."""

    group: int
    tokens: list[int]
    chosen: list[bool]
    logprobs: list[float]
    forced: list[int] = field(default_factory=list)
    over: bool = False
    reward: float = 0.0

    @property
    def actions(self) -> list[int]:
        """Every action taken, forced ones too."""
        return self.tokens[TURN :: TURN + 1]

    def say(self, tokens: Sequence[int]) -> None:
        """Adds what the game says."""
        self.tokens += tokens
        self.chosen += [False] * len(tokens)
        self.logprobs += [0.0] * len(tokens)


def play_step(
    model: nn.Module, make: Callable[[], Game], *, seed: int, step: int, boards: int, starts: int, branches: int
) -> list[Row]:
    """Plays `starts` games on each board, then `branches` more that begin with some moves of one of those."""
    rng = np.random.default_rng([seed, step])
    board_seeds = rng.integers(0, 2**31, boards).tolist()
    first = [Row(board, [], [], []) for board in range(boards) for _ in range(starts)]
    _play(model, make, first, board_seeds, rng)
    second = []
    for board in range(boards):
        for _ in range(branches):
            parent = first[board * starts + int(rng.integers(starts))]
            second.append(
                Row(board, [], [], [], forced=parent.actions[: int(rng.integers(1, 1 + len(parent.actions)))])
            )
            second[-1].forced = second[-1].forced[: max(1, len(parent.actions) - 1)]  # never a whole game
    _play(model, make, second, board_seeds, rng)
    return first + second


@torch.no_grad()
def _play(
    model: nn.Module, make: Callable[[], Game], rows: list[Row], board_seeds: list[int], rng: np.random.Generator
) -> None:
    """Plays all games turn by turn with one cache. A game that is over gets filler, which is not kept."""
    games = [make() for _ in rows]
    for row, game in zip(rows, games, strict=True):
        row.say(game.reset(board_seeds[row.group]))
    new = torch.tensor([row.tokens for row in rows])
    cache = None
    for turn in range(MOST_TURNS):
        given = {} if cache is None else {"past_key_values": cache}
        output = model(input_ids=new, use_cache=True, **given)
        cache = output.past_key_values
        logprobs_GV = output.logits[:, -1].double().log_softmax(-1)
        actions = _choose(logprobs_GV, rng.random(len(rows)))
        filler = [0] * (TURN + 1)
        said = [filler] * len(rows)
        for number, (row, game) in enumerate(zip(rows, games, strict=True)):
            if row.over:
                continue
            forced = turn < len(row.forced)
            action = row.forced[turn] if forced else actions[number]
            row.tokens.append(action)
            row.chosen.append(not forced)
            row.logprobs.append(0.0 if forced else float(logprobs_GV[number, action]))
            observed, row.over, row.reward = game.step(action)
            said[number] = [action, *observed]
            if not row.over:
                row.say(observed)
        if all(row.over for row in rows):
            return
        new = torch.tensor(said)
    raise AssertionError(f"a game was not over in {MOST_TURNS} turns")


def _choose(logprobs_GV: Tensor, uniform_G: np.ndarray) -> list[int]:
    """Tokens by inverse cumulative probability: the same for models that agree to rounding."""
    cumulative_GV = logprobs_GV.exp().cumsum(-1).cpu().numpy()
    last = cumulative_GV.shape[1] - 1
    return [min(int(np.searchsorted(row, u)), last) for row, u in zip(cumulative_GV, uniform_G, strict=True)]


def advantages(rows: Sequence[Row]) -> list[float]:
    """Rewards against the mean of the games on the same board, over their standard deviation."""
    rewards, groups = np.array([row.reward for row in rows]), np.array([row.group for row in rows])
    out = np.zeros(len(rows))
    for group in np.unique(groups):
        at = groups == group
        out[at] = (rewards[at] - rewards[at].mean()) / (rewards[at].std() + 1e-4)
    return out.tolist()
