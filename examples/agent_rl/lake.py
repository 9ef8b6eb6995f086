"""FrozenLake of textarena, turn by turn, in tokens: what the game says is tokenised once, when it says it."""

import re
from typing import Any, Protocol

__all__ = ["ACTIONS", "TURN", "VOCABULARY", "Game", "Lake"]

ACTIONS = ("[up]", "[down]", "[left]", "[right]")
VOCABULARY = (*ACTIONS, "<moved>", "<invalid>", "<empty>", "H", "G", "P", "P/G", "<over>")
TURN = 17  # a word on the last action and 16 cells


class Game(Protocol):
    """What rollouts need; every observation has TURN tokens."""

    def reset(self, seed: int) -> list[int]:
        """Starts the game of a seed; its first observation."""

    def step(self, action: int) -> tuple[list[int], bool, float]:
        """Takes a token; gives the observation, whether the game is over, and its reward then."""


class Lake:
    """A 4 x 4 board with 3 holes; a path of at least 6 moves leads to the goal, and 8 may be taken.

    The reward is textarena's: 1 at the goal, else the share of the way that was made, at most 0.95.
    """

    def __init__(self, moves: int = 8) -> None:
        import textarena

        self.moves = moves
        self._env: Any = textarena.make("FrozenLake-v0-raw")

    def reset(self, seed: int) -> list[int]:
        self._env.reset(num_players=1, seed=seed)
        self._env.state.max_turns = self.moves
        return self._observe()

    def step(self, action: int) -> tuple[list[int], bool, float]:
        over, _ = self._env.step(VOCABULARY[action])
        reward = float(self._env.close()[0][0]) if over else 0.0
        return self._observe(), over, reward

    def _observe(self) -> list[int]:
        messages = [message for _, message, _ in self._env.get_observation()[1]]
        word = "<invalid>" if any("invalid move" in message for message in messages) else "<moved>"
        board = next(message for message in messages if "Current Board" in message)
        cells = [cell.strip() or "<empty>" for line in re.findall(r"\|(.*)\|", board) for cell in line.split("|")]
        return [VOCABULARY.index(each) for each in (word, *cells)]
