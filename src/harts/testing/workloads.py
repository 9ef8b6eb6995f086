"""The workloads that HARTS is checked and timed on, by name: synthetic ones, seeded, and real ones from files.

    trajectories = workload("think", scale=0.1, turns=5)
    trajectories, token_ids = harts.vocabulary.remap_vocabulary(workload("tau", groups=2))

Everything is a pure function of its arguments and of the files. In synthetic workloads siblings differ in their first
token, so that nothing merges by chance.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from harts.testing.real_rows import MissingData, read_real, shrink
from harts.trajectory import Trajectory

__all__ = ["WORKLOADS", "MissingData", "Workload", "shrink", "workload"]

Tokens = NDArray[np.int32]
Piece = tuple[Tokens, bool]
"""Token ids, and whether they are trained."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What there is to know of a workload before it is made.

    Attributes:
        name: as `workload` takes it.
        summary: one line for people.
        sizes: numbers that `workload` takes as keywords, with their defaults. None means no limit.
        files: of a real workload, the file it reads under each name that it goes by; empty for a synthetic one.
    """

    name: str
    summary: str
    sizes: Mapping[str, int | None]
    files: tuple[str, ...] = ()


def workload(
    name: str,
    *,
    scale: float = 1.0,
    seed: int = 0,
    data_dir: str | PathLike[str] | None = None,
    vocab_size: int = 1024,
    **sizes: int | None,
) -> list[Trajectory]:
    """Makes a workload.

    Args:
        name: one of `WORKLOADS`.
        scale: factor on all lengths, in (0, 1]; every piece keeps at least one token. Numbers of trajectories, turns
            and branches stay. Real rows are shortened by `shrink`, which keeps the tree's shape too.
        seed: of the synthetic workloads.
        data_dir: where the files of the real workloads are. None looks into the directory that the environment
            variable HARTS_DATA names, `../shared/data` beside a checkout of HARTS and, for `tau`, its `examples/data`.
        vocab_size: synthetic token ids are in [0, vocab_size). Real rows have their own, see `harts.vocabulary`.
        sizes: see `WORKLOADS[name].sizes`: `turns=5` say.

    Raises:
        ValueError: unknown name or size, a scale outside (0, 1], a size below 1, more groups than the file has, or no
            such file; the message says where it was looked for.
    """
    if name not in WORKLOADS:
        raise ValueError(f"workload: expected one of {', '.join(WORKLOADS)}, got {name!r}")
    about = WORKLOADS[name]
    if not 0 < scale <= 1:
        raise ValueError(f"workload {name!r}, scale: expected a factor above 0 and at most 1, got {scale}")
    for size, value in sizes.items():
        if size not in about.sizes:
            known = ", ".join(about.sizes) or "none"
            raise ValueError(f"workload {name!r}: there is no size {size!r}; expected one of: {known}")
        if value is not None and value < 1:
            raise ValueError(f"workload {name!r}, {size}: expected at least 1, got {value}")
    filled = {**about.sizes, **sizes}
    if about.files:
        return read_real(name, about.files, scale=scale, data_dir=data_dir, **filled)
    draw = _Draw(seed, vocab_size, scale, name)
    _MAKERS[name](draw, **{size: value for size, value in filled.items() if value is not None})
    return draw.trajectories


class _Draw:
    """Draws pieces of token ids and collects the trajectories made of them.

    Shape and token ids come from two generators, so that the shape does not depend on how many ids were drawn.
    """

    def __init__(self, seed: int, vocab_size: int, scale: float, name: str) -> None:
        if vocab_size < 2:
            raise ValueError(f"workload {name!r}, vocab_size: expected at least 2, got {vocab_size}")
        self.rng, self._token_rng = np.random.default_rng([seed, 0]), np.random.default_rng([seed, 1])
        self.vocab_size, self.scale, self.name = vocab_size, scale, name
        self.trajectories: list[Trajectory] = []
        self._pieces = 0

    def tokens(self, length: float) -> Tokens:
        """Scaled number of random tokens; the first one tells this piece from those drawn shortly before and after."""
        count = max(1, round(length * self.scale))
        ids = self._token_rng.integers(0, self.vocab_size, count, np.int32)
        ids[0] = self._pieces % self.vocab_size
        self._pieces += 1
        return ids

    def between(self, low: int, high: int) -> Tokens:
        """Tokens of a length drawn evenly from [low, high]."""
        return self.tokens(int(self.rng.integers(low, high + 1)))

    def add(self, id: str, pieces: Sequence[Piece], group: str = "") -> None:
        """A trajectory of these pieces, with an advantage of its own."""
        advantage = float(self.rng.normal())
        self.trajectories.append(
            Trajectory(
                token_ids=np.concatenate([ids for ids, _ in pieces]),
                loss_mask=np.concatenate([np.full(len(ids), trained) for ids, trained in pieces]),
                group=group or self.name,
                id=f"{self.name}/{id}",
                advantages=np.float64(advantage),  # type: ignore[arg-type]
                reward=advantage,
            )
        )


def _star3(draw: _Draw) -> None:
    root = draw.tokens(12_321)
    for branch, inner in enumerate([draw.tokens(2_055) for _ in range(4)]):
        for leaf in range(4):
            draw.add(f"{branch}.{leaf}", [(root, False), (inner, True), (draw.tokens(1_029), True)])


def _grpo(draw: _Draw, responses: int) -> None:
    prompt = draw.tokens(2_048)
    for response in range(responses):
        length = float(draw.rng.lognormal(np.log(1_000), 0.5))
        draw.add(str(response), [(prompt, False), (draw.tokens(length), True)])


def _think(draw: _Draw, rollouts: int, turns: int) -> None:
    system = draw.tokens(4_800)
    for rollout in range(rollouts):
        context: list[Piece] = [(system, False)]
        for turn in range(turns):
            context.append((draw.between(200, 1_000), False))
            reasoning, answer = draw.between(300, 1_500), draw.between(100, 400)
            draw.add(f"{rollout}/turn{turn}", [*context, (reasoning, True), (answer, True)])
            context.append((answer, False))  # later turns do not see the reasoning


def _swe(draw: _Draw, rollouts: int, turns: int) -> None:
    root = draw.tokens(12_000)
    for rollout in range(rollouts):
        cuts = draw.rng.permutation(np.arange(2, turns))[:3].tolist()
        contexts: list[list[Piece]] = [[(root, False)]]  # before each turn
        for turn in range(turns):
            if turn in cuts:
                contexts[turn] = contexts[int(draw.rng.integers(1, turn))]
            observation, output = draw.between(600, 1_200), draw.between(150, 350)
            context = [*contexts[turn], (observation, False)]
            draw.add(f"{rollout}/turn{turn}", [*context, (output, True)])
            contexts.append([*context, (output, False)])


def _search(draw: _Draw, depth: int) -> None:
    def expand(path: list[Piece], id: str, below: int) -> None:
        if below == 0:
            draw.add(id, path)
            return
        children = [draw.between(256, 1_024) for _ in range(int(draw.rng.integers(2, 5)))]
        for index, child in enumerate(children):
            expand([*path, (child, True)], f"{id}.{index}", below - 1)

    expand([(draw.between(256, 1_024), False)], "0", depth - 1)


def _flat(draw: _Draw, rows: int) -> None:
    for row in range(rows):
        draw.add(str(row), [(draw.tokens(1_024), False), (draw.tokens(3_072), True)])


def _thin(draw: _Draw, rows: int) -> None:
    """Rows branch off another one of their group of 8 somewhere in the first tokens, N / 11 tokens in all."""
    for first in range(0, rows, 8):
        group: list[Tokens] = []
        for row in range(first, min(first + 8, rows)):
            length = int(draw.rng.integers(128, 385))
            # 7 of 8 rows share this much on average, so that tokens / rows is 1.1; at most what is left of any row
            most = 2 * 256 * draw.scale / 11 * 8 / 7
            kept = round(float(draw.rng.uniform(0, most))) if group else 0
            base = group[int(draw.rng.integers(len(group)))] if group else np.zeros(0, np.int32)
            own = draw.tokens(length)
            group.append(np.concatenate([base[:kept], own])[: max(len(own), kept + 1)])
            shared = min(kept, len(base))
            untrained = max(1, shared)
            pieces = [(group[-1][:untrained], False), (group[-1][untrained:], True)]
            draw.add(str(row), pieces, group=f"{draw.name}/{first // 8}")


_MAKERS: Mapping[str, Callable[..., None]] = {
    "star3": _star3,
    "grpo": _grpo,
    "think": _think,
    "swe": _swe,
    "search": _search,
    "flat": _flat,
    "thin": _thin,
}


def _registry() -> dict[str, Workload]:
    synthetic: list[tuple[str, dict[str, int | None], str]] = [
        ("star3", {}, "root of 12,321 tokens, 4 branches of 2,055, under each 4 of 1,029; the branches trained"),
        ("grpo", {"responses": 16}, "prompt of 2,048 tokens, responses log-normal around 1,000 (sigma 0.5)"),
        (
            "think",
            {"rollouts": 8, "turns": 20},
            "system of 4,800 tokens; a turn adds observation 200-1,000 and answer 100-400 to the context and has a "
            "dropped reasoning of 300-1,500; one row a turn",
        ),
        (
            "swe",
            {"rollouts": 8, "turns": 40},
            "root of 12,000 tokens; a turn is observation 600-1,200 and output 150-350; 3 times a rollout the context "
            "is cut back to an earlier turn; one row a turn",
        ),
        ("search", {"depth": 6}, "tree of 6 levels of nodes, 2-4 children each, 256-1,024 tokens a node"),
        ("flat", {"rows": 16}, "rows of 4,096 tokens, nothing shared"),
        ("thin", {"rows": 256}, "groups of 8 rows of 128-384 tokens, sharing 1.1 in many short segments"),
    ]
    real: list[tuple[str, dict[str, int | None], tuple[str, ...], str]] = [
        ("tau", {"groups": 6}, ("taubench-airline", "tau-airline"), "tau-bench airline, 4 trials a task"),
        ("mint", {"groups": 12}, ("mint",), "MINT, 16 models a task"),
        ("toolbench", {"groups": 12}, ("toolbench-dfsdt",), "ToolBench, depth-first search trees"),
        ("pi", {"groups": 1, "max_length": 30_000}, ("pi-sessions",), "one coding session with two compactions"),
        ("openhands", {"groups": 3}, ("openhands-mswe",), "OpenHands on Multi-SWE-bench"),
    ]
    found = {name: Workload(name=name, summary=summary, sizes=sizes) for name, sizes, summary in synthetic}
    for name, sizes, stems, summary in real:
        files = tuple(f"{stem}.jsonl.gz" for stem in stems)
        summary = f"{summary}; one row a model call"
        found[name] = Workload(name=name, summary=summary, sizes={"max_length": None, **sizes}, files=files)
    return found


WORKLOADS: Mapping[str, Workload] = MappingProxyType(_registry())
"""All workloads by name. The real ones take their first `groups` groups, and leave out calls longer than `max_length`
tokens (before scaling)."""
