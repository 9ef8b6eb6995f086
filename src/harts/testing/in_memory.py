"""Arms that run within a given memory: pieces and recomputation are chosen for each by the same model of memory.

Separate rows and trees are told apart by what they share alone; both run in one sweep (`harts.backward`).
"""

from dataclasses import dataclass

from torch import Tensor, nn

from harts.layout import PackedTree
from harts.models import backward
from harts.models.memory import Memory, choose_one_sweep
from harts.models.recompute import keep_activations, recompute_activations
from harts.models.scorer import Scorer
from harts.ops.kernels import Kernels
from harts.train.step import StepPlan

__all__ = ["Chosen", "choose", "run_in_memory"]


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """How an arm runs.

    Attributes:
        recompute: whether layers recompute their activations.
        pieces, kept: of the batch, and how many of them keep their graph.
        rows_again: rows whose forward runs twice, those recomputed by layers aside.
        predicted_bytes: at the peak.
    """

    recompute: bool
    pieces: int
    kept: int
    rows_again: int
    predicted_bytes: int


def choose(model: nn.Module, packed: PackedTree, memory: Memory, kernels: Kernels | None) -> Chosen:
    """With or without recomputation, whichever runs fewer rows forward; leaves the model set so.

    Raises:
        ValueError: the memory is no size, or too small.
    """
    best: tuple[int, Chosen] | None = None
    failure: ValueError | None = None
    for recompute in (False, True):
        _set(model, recompute)
        try:
            choice = choose_one_sweep(Scorer(model, packed, kernels, {}), packed, memory, None)
        except ValueError as error:
            failure = error
            continue
        rows = choice.rows_again + recompute * packed.num_rows
        if best is None or rows < best[0]:
            best = (
                rows,
                Chosen(
                    recompute=recompute,
                    pieces=len(choice.stream.pieces),
                    kept=len(choice.keep),
                    rows_again=choice.rows_again,
                    predicted_bytes=choice.peak_bytes,
                ),
            )
    if best is None:
        assert failure is not None, "nothing was chosen"
        raise failure
    _set(model, best[1].recompute)
    return best[1]


def _set(model: nn.Module, recompute: bool) -> None:
    (recompute_activations if recompute else keep_activations)(model)


def run_in_memory(model: nn.Module, step: StepPlan, memory: Memory, kernels: Kernels | None) -> dict[int, Tensor]:
    """Forward and backward of a step of one microbatch, with the loss minus the mean log-prob of its trained tokens.

    Returns:
        Log-probs of each trajectory, [L], by its index.
    """
    (microbatch,) = step.microbatches
    share = -1.0 / sum(each.num_trained for each in step.trajectories)
    packed = microbatch.packed
    _, scores = backward(model, packed, lambda _, some: some.logprobs_N.sum() * share, memory=memory, kernels=kernels)
    return dict(zip(microbatch.indices, packed.split(scores.logprobs_N), strict=True))
