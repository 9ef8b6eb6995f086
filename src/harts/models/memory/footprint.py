"""Bytes of a piece of a tree, as a linear function of what it holds; fitted to probes on the very model.

Two parts are measured apart, as only one of them is at work at a time: the decoder, whose memory grows with rows, and
the head, which works on chunks of rows.

Shape suffixes: P pieces, K features, R probes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from harts.blocks import BLOCK, Blocks
from harts.cost.least_squares import non_negative_least_squares
from harts.layout import PackedTree

__all__ = ["Footprint", "Phases", "Probe", "decoder_features", "head_features"]

Floats = NDArray[np.float64]
T = TypeVar("T", float, Floats)


@dataclass(frozen=True, kw_only=True)
class Phases(Generic[T]):
    """Bytes above those that lived before, of one piece or of all, [P].

    Attributes:
        kept: of the graph, behind a forward with gradients, up to the backward.
        forward: most during that forward.
        forward_alone: most during a forward without gradients.
        backward: most during the backward, above `kept`.
    """

    kept: T
    forward: T
    forward_alone: T
    backward: T


@dataclass(frozen=True, kw_only=True)
class Probe:
    """What one piece was measured to take.

    Attributes:
        decoder_K, head_K: its features.
        decoder, head: what the two take; what a decoder hands on to other pieces is left out of `kept`.
        layout: bytes of index tensors, which stay as long as the tree.
    """

    decoder_K: Floats
    head_K: Floats
    decoder: Phases[float]
    head: Phases[float]
    layout: float


@dataclass(frozen=True, kw_only=True)
class _Fit:
    """One phase: coefficients of features."""

    per_feature_K: Floats

    @staticmethod
    def of(features_RK: Floats, bytes_R: Floats) -> "_Fit":
        """Least squares of relative errors, then all coefficients raised until no probe is above its fit."""
        floor_R = np.maximum(bytes_R, max(1.0, 0.01 * float(bytes_R.max())))  # of next to nothing, no relative error
        scale_K = np.maximum(features_RK.max(axis=0), 1.0)
        fitted_K = non_negative_least_squares(features_RK / scale_K / floor_R[:, None], bytes_R / floor_R) / scale_K
        fitted_R = np.maximum(features_RK @ fitted_K, 1e-30)
        return _Fit(per_feature_K=fitted_K * max(1.0, float((bytes_R / fitted_R)[bytes_R == floor_R].max(initial=1.0))))

    def __call__(self, features_PK: Floats) -> Floats:
        return features_PK @ self.per_feature_K


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """Of one model in one setting.

    Attributes:
        entry_bytes: bytes of one entry that a layer hands on, summed over the layers of each mixer, by mixer and name.
        grad_bytes: the same of its gradient, which is summed in at least fp32.
        largest_gradient: of the decoder's parameters, which lives before it is added.
    """

    decoder: Mapping[str, _Fit]
    head: Mapping[str, _Fit]
    layout: _Fit
    entry_bytes: Mapping[tuple[object, str], int]
    grad_bytes: Mapping[tuple[object, str], int]
    largest_gradient: int

    @staticmethod
    def fit(
        probes: Sequence[Probe],
        *,
        entry_bytes: Mapping[tuple[object, str], int],
        grad_bytes: Mapping[tuple[object, str], int],
        largest_gradient: int,
    ) -> "Footprint":
        """Fits all phases to probes that differ in all features."""
        fits: list[dict[str, _Fit]] = []
        for part in ("decoder", "head"):
            features_RK = np.stack([getattr(each, f"{part}_K") for each in probes])
            phases = [getattr(each, part) for each in probes]
            fits.append(
                {
                    name: _Fit.of(features_RK, np.array([getattr(each, name) for each in phases], np.float64))
                    for name in Phases.__dataclass_fields__
                }
            )
        layout = _Fit.of(np.stack([each.decoder_K for each in probes]), np.array([each.layout for each in probes]))
        return Footprint(
            decoder=fits[0],
            head=fits[1],
            layout=layout,
            entry_bytes=entry_bytes,
            grad_bytes=grad_bytes,
            largest_gradient=largest_gradient,
        )

    def phases(self, pieces: Sequence[PackedTree], *, min_rows: int, chunk_rows: int) -> tuple[Phases[Floats], Floats]:
        """Of each piece, decoder and head together; and bytes of layouts."""
        decoder_PK = np.stack([decoder_features(piece, min_rows) for piece in pieces])
        head_PK = np.stack([head_features(piece, chunk_rows) for piece in pieces])
        decoder = {name: fit(decoder_PK) for name, fit in self.decoder.items()}
        head = {name: fit(head_PK) for name, fit in self.head.items()}
        together = Phases(
            kept=decoder["kept"] + head["kept"],
            forward=np.maximum(decoder["forward"], decoder["kept"] + head["forward"]),
            forward_alone=np.maximum(decoder["forward_alone"], head["forward_alone"]),
            backward=np.maximum(head["backward"], decoder["backward"] + self.largest_gradient),
        )
        return together, self.layout(decoder_PK)


def decoder_features(piece: PackedTree, min_rows: int) -> Floats:
    """Rows, blocks of a recurrence, chains, rows outside, keys of all chains, keys that masks have room for, and 1."""
    chains = piece.chains
    masked_C = np.where(chains.depth_C > 0, chains.rows_C * chains.length_C, 0)
    return np.array(
        [
            max(piece.num_rows, min_rows),
            BLOCK * Blocks.of(chains).num_blocks,
            chains.num_chains,
            piece.num_outside,
            chains.length_C.sum(),
            masked_C.sum(),
            1,
        ],
        np.float64,
    )


def head_features(piece: PackedTree, chunk_rows: int) -> Floats:
    """Head rows, head rows of a chunk, targets, rows (of their hidden states), and 1."""
    heads = len(piece.head_row_U)
    return np.array([heads, min(heads, chunk_rows), len(piece.token_M), piece.num_rows, 1], np.float64)
