"""What lives at each moment of a sweep over pieces; the sweeps themselves are in `harts.models.streaming`.

Shape suffix: P pieces.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from harts.models.memory.footprint import Phases

__all__ = ["Bytes", "one_sweep", "two_sweeps", "without_gradients"]

Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Bytes:
    """Of the pieces of one cut.

    Attributes:
        resident: what is there all the time.
        missing: gradients of parameters that the first backward makes.
        phases: of each piece.
        given_P: what it hands on, which lives until the last piece that needs it is done.
        grads_P: gradients of that.
        copied_P: what it takes as copies, which live as long as its graph.
        done_P: last piece that needs it.
    """

    resident: float
    missing: float
    phases: Phases[Floats]
    given_P: Floats
    grads_P: Floats
    copied_P: Floats
    done_P: NDArray[np.int64]

    @property
    def graph_P(self) -> Floats:
        """A kept piece."""
        return self.phases.kept + self.copied_P

    @property
    def again_P(self) -> Floats:
        """Most during forward with gradients and backward of a piece that was not kept."""
        return self.copied_P + np.maximum(self.phases.forward, self.phases.kept + self.phases.backward)

    def alive(self, bytes_P: Floats) -> Floats:
        """[P]: what earlier pieces and the piece itself gave and is still needed while each piece runs."""
        count = len(bytes_P)
        change = np.zeros(count + 1)
        change[:count] += bytes_P
        np.subtract.at(change, self.done_P + 1, bytes_P)
        return np.cumsum(change[:count])


def without_gradients(bytes_: Bytes, limit: float) -> tuple[frozenset[int], float]:
    """One forward; returns that nothing is kept, and the peak."""
    peak_P = bytes_.alive(bytes_.given_P) + bytes_.copied_P + bytes_.phases.forward_alone
    return frozenset(), bytes_.resident + float(peak_P.max())


def two_sweeps(bytes_: Bytes, limit: float) -> tuple[frozenset[int], float]:
    """Keeps as many of the last pieces as fit.

    Returns:
        Pieces that are kept, and the peak; above `limit` where not even none kept fits.
    """
    count = len(bytes_.done_P)
    low, high = 0, count  # bisection: more kept pieces take more
    while low < high:
        middle = (low + high + 1) // 2
        if _peak_of_two(bytes_, count - middle) <= limit:
            low = middle
        else:
            high = middle - 1
    return frozenset(range(count - low, count)), _peak_of_two(bytes_, count - low)


def _peak_of_two(bytes_: Bytes, first_kept: int) -> float:
    phases = bytes_.phases
    is_kept_P = np.arange(len(bytes_.done_P)) >= first_kept
    graph_P = np.where(is_kept_P, bytes_.graph_P, 0)
    before_P = np.cumsum(graph_P) - graph_P
    given_P = np.cumsum(bytes_.given_P)
    running_P = np.where(is_kept_P, phases.forward, phases.forward_alone) + bytes_.copied_P
    forward = float((given_P + before_P + running_P).max())
    later_P = np.where(is_kept_P, graph_P + phases.backward, bytes_.again_P)
    backward = float((given_P + bytes_.alive(bytes_.grads_P) + before_P + later_P).max())
    return bytes_.resident + max(forward, bytes_.missing + backward)


def one_sweep(bytes_: Bytes, limit: float) -> tuple[frozenset[int], float]:
    """Keeps pieces that are done soonest, as far as they fit.

    Returns:
        Pieces that are kept, and the peak; above `limit` where not even none kept fits.
    """
    count, phases, done_P = len(bytes_.done_P), bytes_.phases, bytes_.done_P
    given_P = bytes_.given_P + bytes_.grads_P
    base = bytes_.resident + bytes_.missing
    forward_P = base + bytes_.alive(given_P) + phases.forward_alone + bytes_.copied_P
    order_P = np.arange(count)
    # pieces behind it are done and gone when a piece goes backward
    is_alive_PP = (order_P[:, None] >= order_P) & (done_P[:, None] <= done_P)
    backward_P = base + is_alive_PP @ given_P + bytes_.again_P
    kept: set[int] = set()
    for piece in sorted(range(count), key=lambda piece: (done_P[piece] - piece, piece)):
        done, graph = int(done_P[piece]), float(bytes_.graph_P[piece])
        while_alive = np.arange(piece + 1, done + 1)
        below = np.flatnonzero((order_P > piece) & (done_P <= done))  # go backward while it lives
        own_forward = forward_P[piece] - phases.forward_alone[piece] + phases.forward[piece]
        highest = max(forward_P[while_alive].max(initial=0.0), backward_P[below].max(initial=0.0)) + graph
        if max(highest, own_forward) > limit:
            continue
        kept.add(piece)
        forward_P[while_alive] += graph
        backward_P[below] += graph
        forward_P[piece] = own_forward
    return frozenset(kept), float(max(forward_P.max(), backward_P.max()))
