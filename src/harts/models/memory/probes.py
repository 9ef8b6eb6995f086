"""Runs small trees through a model and measures what they take. Nothing of it stays: no gradient, no graph.

Shape suffixes: T rows, D channels.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from harts.layout import PackedTree, pack
from harts.mixers import Context
from harts.models.heads import Parts
from harts.models.memory.footprint import Footprint, Phases, Probe, decoder_features, head_features
from harts.models.memory.meter import Meter
from harts.models.outcomes import Outcome
from harts.models.scorer import Scorer
from harts.models.streaming import Stream
from harts.trajectory import Trajectory
from harts.tree import PrefixTree

__all__ = ["footprint_of"]

_ATTRIBUTE = "_harts_footprints"
_ROWS = {"cuda": 2048}
_ROWS_ELSEWHERE = 640
_SHAPES = (
    # rows of the stem, branches, trained share, of a tree of 64; and the row at which it is cut
    (64, 0, 1.0, 32),
    (16, 6, 0.5, 16),
    (8, 24, 0.2, 40),
    (0, 16, 1.0, 24),
    (56, 2, 1.0, 58),
    (24, 0, 0.3, 4),
    (4, 60, 1.0, 8),
)


def footprint_of(scorer: Scorer, packed: PackedTree) -> Footprint:
    """What pieces take in this model as it is set now; measured when first asked for.

    Args:
        scorer: of an unsharded model.
        packed: the batch, for its device.

    Raises:
        ValueError: layers recompute by reentrant checkpointing.
    """
    text: Any = scorer.backbone.text
    known: dict[Any, Footprint] = vars(text).setdefault(_ATTRIBUTE, {})
    key = _setting(scorer, packed.device)
    if key not in known:
        known[key] = _measure(scorer, packed.device)
    return known[key]


def _setting(scorer: Scorer, device: torch.device) -> tuple[Any, ...]:
    """All that changes what a piece takes."""
    inner = scorer.backbone.inner
    cast = torch.is_autocast_enabled(device.type) and torch.get_autocast_dtype(device.type)
    parameters = tuple((each.dtype, each.requires_grad) for each in inner.parameters())
    recomputes = tuple(getattr(module, "gradient_checkpointing", None) for module in inner.modules())
    return (scorer.setting, device, cast, inner.training, hash(parameters), hash(recomputes))


def _measure(scorer: Scorer, device: torch.device) -> Footprint:
    rows = _ROWS.get(device.type, _ROWS_ELSEWHERE)
    # chunks of logits that are smaller than the probes, so that their memory is told apart from that of rows
    small = scorer.with_kernels(dataclasses.replace(scorer.kernels, chunk_rows=rows // 4))
    probes: list[Probe] = []
    entries: dict[tuple[object, str], int] = {}
    grads: dict[tuple[object, str], int] = {}
    streams = list(_streams(small, rows, device))
    with torch.enable_grad():
        _probe(small, streams[0], 0, device)  # what is allocated once
        streams = list(_streams(small, rows, device))
        for stream in streams:
            for piece in range(len(stream.pieces)):
                probe, contexts = _probe(small, stream, piece, device)
                probes.append(probe)
                _note_entries(stream, contexts, entries, grads)
    decoder: Any = scorer.backbone.text
    aside = {id(each) for part in (scorer.backbone.head, decoder.get_input_embeddings()) for each in part.parameters()}
    trained = [each for each in decoder.parameters() if each.requires_grad and id(each) not in aside]
    return Footprint.fit(
        probes,
        entry_bytes=entries,
        grad_bytes=grads,
        largest_gradient=max((each.numel() * each.element_size() for each in trained), default=0),
    )


def _streams(scorer: Scorer, rows: int, device: torch.device) -> Iterator[Stream]:
    vocabulary = scorer.backbone.text.get_input_embeddings().weight.shape[0]  # type: ignore[operator]
    for seed, (stem, branches, trained, cut) in enumerate(_SHAPES):
        trajectories = _star(np.random.default_rng(seed), rows, stem, branches, trained, int(vocabulary))
        packed = pack(PrefixTree.build(trajectories, share="tree" if stem else "none"), device=device)
        yield Stream(scorer, packed, [0, max(1, cut * packed.num_rows // 64 - 3)])


def _star(
    rng: np.random.Generator, rows: int, stem: int, branches: int, trained: float, vocabulary: int
) -> list[Trajectory]:
    """A stem of `stem` 64ths of the rows, the rest in branches."""
    shared = rng.integers(0, vocabulary, stem * rows // 64)
    length = (64 - stem) * rows // 64 // max(branches, 1)
    trajectories = []
    for _ in range(max(branches, 1)):
        ids = np.concatenate([shared, rng.integers(0, vocabulary, length)]).astype(np.int32)
        mask = (rng.random(len(ids)) < trained) & (np.arange(len(ids)) > 0)
        mask[-1] = True
        trajectories.append(Trajectory(token_ids=ids, loss_mask=mask))
    return trajectories


def _probe(scorer: Scorer, stream: Stream, piece: int, device: torch.device) -> tuple[Probe, Mapping[int, Context]]:
    """Measures one piece; what earlier ones give must be there, and what it gives is kept."""
    packed = stream.pieces[piece]
    with Meter(device) as meter:
        with torch.no_grad():
            scorer.score(scorer.decode(packed, stream.contexts(piece)), packed)
        layout = meter.now
        alone = _forward_alone(scorer, stream, piece, meter)
        contexts = stream.contexts(piece)
        decoder, head = _forward_and_backward(scorer, packed, contexts, meter)
    stream.keep(piece, contexts)
    probe = Probe(
        decoder_K=decoder_features(packed, scorer.kernels.min_rows),
        head_K=head_features(packed, scorer.kernels.chunk_rows),
        decoder=dataclasses.replace(decoder, forward_alone=alone[0]),
        head=dataclasses.replace(head, forward_alone=alone[1]),
        layout=max(layout, 0),
    )
    return probe, contexts


def _forward_alone(scorer: Scorer, stream: Stream, piece: int, meter: Meter) -> tuple[float, float]:
    """Peaks of decoder and head without gradients."""
    with torch.no_grad():
        contexts = stream.contexts(piece)
        start = meter.now
        meter.restart()
        hidden_TD = scorer.decode(stream.pieces[piece], contexts)
        decoder = meter.peak - start
        meter.restart()
        scorer.score(hidden_TD, stream.pieces[piece])
        return decoder, meter.peak - start


def _forward_and_backward(
    scorer: Scorer, packed: PackedTree, contexts: Mapping[int, Context], meter: Meter
) -> tuple[Phases[float], Phases[float]]:
    inputs: list[Tensor] = []
    decoder: Any = scorer.backbone.text
    embedding = decoder.get_input_embeddings()
    handle = embedding.register_forward_hook(lambda module, arguments, output: inputs.append(_with_gradient(output)))
    start = meter.now
    meter.restart()
    try:
        hidden_TD = scorer.decode(packed, contexts)
    finally:
        handle.remove()
    forward = meter.peak - start
    given = [each for context in contexts.values() for each in context.given.values()]
    kept = meter.now - start - sum(each.numel() * each.element_size() for each in given)
    head = _head(scorer, packed, hidden_TD, meter)
    roots = [each for each in (hidden_TD, *given) if each.requires_grad]
    taken = [each for context in contexts.values() for each in context.taken.values() if each.requires_grad]
    backward = _peak_of_backward(roots, [*inputs, *taken], meter)
    return Phases(kept=kept, forward=forward, forward_alone=0, backward=backward), head


def _with_gradient(output: Tensor) -> Tensor:
    return output if output.requires_grad else output.requires_grad_()


def _head(scorer: Scorer, packed: PackedTree, hidden_TD: Tensor, meter: Meter) -> Phases[float]:
    leaf_TD = hidden_TD.detach().requires_grad_()
    start = meter.now
    meter.restart()
    parts: Parts = scorer.score(leaf_TD, packed)
    kept, forward = meter.now - start, meter.peak - start
    roots = [each for each in Outcome(parts, None).tensors().values() if each.requires_grad]
    trained: list[Tensor] = [each for each in scorer.backbone.head.parameters() if each.requires_grad]
    return Phases(
        kept=kept, forward=forward, forward_alone=0, backward=_peak_of_backward(roots, [leaf_TD, *trained], meter)
    )


def _peak_of_backward(roots: list[Tensor], leaves: list[Tensor], meter: Meter) -> int:
    """Most bytes during a backward, above those before it; no `.grad` is touched."""
    start = meter.now
    meter.restart()
    try:
        torch.autograd.grad(roots, leaves, [torch.zeros_like(each) for each in roots], allow_unused=True)
    except RuntimeError as error:
        if "reentrant" not in str(error):
            raise
        raise ValueError(
            "memory: expected layers that do not recompute by reentrant checkpointing, which cannot be measured; use "
            "harts.models.recompute_activations, or gradient_checkpointing_enable({'use_reentrant': False})"
        ) from error
    return meter.peak - start


def _note_entries(
    stream: Stream,
    contexts: Mapping[int, Context],
    entries: dict[tuple[object, str], int],
    grads: dict[tuple[object, str], int],
) -> None:
    """Adds up over layers what one entry takes."""
    found: dict[tuple[object, str], list[Tensor]] = {}
    for layer, context in contexts.items():
        for name, given in context.given.items():
            found.setdefault((stream.mixers[layer], name), []).append(given)
    for key, layers in found.items():
        per_entry = [(each[0].numel(), each.dtype) for each in layers]
        entries[key] = sum(numel * dtype.itemsize for numel, dtype in per_entry)
        grads[key] = sum(numel * torch.promote_types(dtype, torch.float32).itemsize for numel, dtype in per_entry)
