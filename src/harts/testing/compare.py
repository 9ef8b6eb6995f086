"""Measures a model on a tree against the same model on separate rows: log-probs, entropies, gradients.

The other side is as independent as it can be: a detached copy of the model runs one trajectory after the other through
transformers' own code, without a layout, an op or a loss of HARTS. Both differentiate the same loss, which weighs the
log-prob and the entropy of every trained token with a random number of its own: a value or gradient that lands on
another token, or is summed over one trajectory too few, then shows. The laws are in `harts.testing.judging`.

Shape suffixes: B trajectories, N tokens of all of them, L tokens of the longest, X trained tokens, V vocabulary.
"""

import contextlib
import copy
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from harts.layout import PackedTree, pack
from harts.models import attach, detach, score_tree
from harts.models.attach import find_backbone
from harts.models.memory import Memory
from harts.ops.kernels import Kernels
from harts.testing.fp64 import all_fp64
from harts.testing.judging import ERROR_RATIO, FP64_GRAD, FP64_LOGPROB, Comparison, Scores, judge, pool
from harts.trajectory import Trajectory
from harts.tree import PrefixTree, Share

__all__ = ["ERROR_RATIO", "FP64_GRAD", "FP64_LOGPROB", "Comparison", "Scores", "compare", "score_packed", "score_rows"]

_MOST_BATCH_ROWS = 4096
_DRAWS = 4


def compare(
    model: nn.Module,
    trajectories: Sequence[Trajectory],
    *,
    dtype: torch.dtype | None = None,
    share: Share = "tree",
    kernels: Kernels | None = None,
    seed: int = 0,
    token_budget: int | None = None,
    memory: Memory | None = None,
) -> Comparison:
    """Runs a batch both ways, forward and backward, as one microbatch or in pieces.

    Args:
        model: of a supported family, attached or not; it is copied and left as it is. The copies are in evaluation
            mode. Up to two live at once, one of them in fp64, whose experts run with the eager implementation (grouped
            ones have no fp64).
        trajectories: at least one with a trained token. Recorded routes are left out: the other side cannot force them.
        dtype: of the copies' parameters; None takes the model's.
        share: what the tree merges.
        kernels: implementations of the ops.
        token_budget, memory: of the tree's pieces, as `harts.logprobs` takes them; None: it runs whole.
        seed: of the weights in the loss; the three after it are drawn too where a law on gradients seems not to hold.

    Raises:
        ValueError: nothing is trained, the dtype is not fp64, fp32 or bf16, or the model or a token id does not fit.
    """
    if not any(each.loss_mask.any() for each in trajectories):
        raise ValueError("trajectories: expected a trained token, got none; there is nothing to compare")
    dtype = dtype or next(model.parameters()).dtype
    if dtype not in (torch.float64, torch.float32, torch.bfloat16):
        raise ValueError(f"dtype: expected float64, float32 or bfloat16, got {dtype}")
    trajectories = [dataclasses.replace(each, routes=None) for each in trajectories]
    packed = pack(PrefixTree.build(trajectories, share=share), device=next(model.parameters()).device)
    run = functools.partial(score_packed, packed=packed, kernels=kernels, token_budget=token_budget, memory=memory)
    result = _compare(model, trajectories, packed, dtype, share, run, range(seed, seed + 1))
    if not result.ok and dtype != torch.float64:
        result = _compare(model, trajectories, packed, dtype, share, run, range(seed, seed + _DRAWS))
    return result


def _compare(
    model: nn.Module,
    trajectories: Sequence[Trajectory],
    packed: PackedTree,
    dtype: torch.dtype,
    share: Share,
    run: Callable[..., Scores],
    seeds: range,
) -> Comparison:
    plain = _cast(detach(copy.deepcopy(model)).eval(), dtype)
    attach(plain)
    tree = pool([run(plain, seed=seed) for seed in seeds])
    detach(plain)
    rows = batched = exact = pool([score_rows(plain, trajectories, seed=seed) for seed in seeds])
    if dtype != torch.float64:
        most = min(packed.num_rows, _MOST_BATCH_ROWS)
        batched = pool([score_rows(plain, trajectories, seed=seed, batch_rows=most) for seed in seeds])
        _cast(plain, torch.float64)
        exact = pool([score_rows(plain, trajectories, seed=seed) for seed in seeds])
    return judge(str(dtype).removeprefix("torch."), share, packed, tree, (rows, batched), exact)


def _cast(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    config = find_backbone(model).config
    if dtype == torch.float64 and getattr(config, "_experts_implementation", None):
        config._experts_implementation = "eager"
    return model.to(dtype)


def score_packed(
    model: nn.Module,
    packed: PackedTree,
    *,
    kernels: Kernels | None = None,
    seed: int = 0,
    token_budget: int | None = None,
    memory: Memory | None = None,
) -> Scores:
    """Log-probs, entropies and gradients through HARTS; `.grad` of the parameters is left as it was.

    Args:
        model: attached, on the device of `packed`. An fp64 model runs wholly in fp64.
        packed: the batch.
        kernels: implementations of the ops.
        seed: of the weights in the loss.
        token_budget, memory: as for `harts.logprobs`.
    """
    weights_2N = _loss_weights(packed.loss_mask_N, seed)
    names, parameters = _trainable(model)
    with _precision(parameters[0].dtype):
        scores = score_tree(model, packed, entropy=True, kernels=kernels, token_budget=token_budget, memory=memory)
        logprobs_N, entropy_N = scores.logprobs_N, scores.entropy_N
        assert entropy_N is not None, "it was asked for"
        loss = (weights_2N.to(logprobs_N) * torch.stack([logprobs_N, entropy_N])).sum()
        grads = _gradients(loss, parameters)
    return Scores(logprobs_N.detach(), entropy_N.detach(), _by_name(names, parameters, grads))


def _gradients(loss: Tensor, parameters: Sequence[nn.Parameter]) -> list[Tensor | None]:
    """By a backward into `.grad`, which is where a tree in pieces leaves them."""
    held = [each.grad for each in parameters]
    for each in parameters:
        each.grad = None
    loss.backward()  # type: ignore[no-untyped-call]
    found = [each.grad for each in parameters]
    for each, before in zip(parameters, held, strict=True):
        each.grad = before
    return found


def score_rows(model: nn.Module, trajectories: Sequence[Trajectory], *, seed: int = 0, batch_rows: int = 1) -> Scores:
    """The same through transformers' own code, one trajectory after the other or in padded batches.

    Gradients of batches are added up in fp32 at least, as training does.

    Args:
        model: not attached. An fp64 model runs wholly in fp64.
        trajectories: the batch.
        seed: of the weights in the loss.
        batch_rows: consecutive trajectories run together while they take at most so many rows, padding included.
    """
    if find_backbone(model).attached:
        raise ValueError("model: expected one that is not attached, to compare with; call harts.detach(model)")
    names, parameters = _trainable(model)
    device = parameters[0].device
    mask_N = torch.cat([torch.tensor(each.loss_mask) for each in trajectories]).to(device)
    batches = _batches(trajectories, batch_rows)
    weights_X = torch.split(_loss_weights(mask_N, seed), [sum(map(len, batch)) for batch in batches], dim=1)
    dtype = torch.promote_types(parameters[0].dtype, torch.float32)
    total = [torch.zeros_like(parameter, dtype=dtype) for parameter in parameters]
    parts: list[Tensor] = []
    for batch, weights_2N in zip(batches, weights_X, strict=True):
        with _precision(parameters[0].dtype):
            scores_2N = _score_batch(model, batch, device)
            if scores_2N.requires_grad:
                loss = (weights_2N.to(scores_2N) * scores_2N).sum()
                for sum_, grad in zip(total, torch.autograd.grad(loss, parameters, allow_unused=True), strict=True):
                    if grad is not None:
                        sum_ += grad.to(dtype)
        parts.append(scores_2N.detach())
    logprobs_N, entropy_N = torch.cat(parts, dim=1)
    return Scores(logprobs_N, entropy_N, _by_name(names, parameters, total))


def _batches(trajectories: Sequence[Trajectory], batch_rows: int) -> list[list[Trajectory]]:
    """Consecutive trajectories, as many as fit into `batch_rows` when padded, at least one."""
    batches: list[list[Trajectory]] = [[]]
    for trajectory in trajectories:
        longest = max(map(len, [*batches[-1], trajectory]))
        if batches[-1] and longest * (len(batches[-1]) + 1) > batch_rows:
            batches.append([])
        batches[-1].append(trajectory)
    return batches


def _score_batch(model: Any, batch: Sequence[Trajectory], device: torch.device) -> Tensor:
    """Log-probs and entropies of some trajectories, [2, N]; padded behind, which causal models do not look at."""
    dtype = torch.promote_types(next(model.parameters()).dtype, torch.float32)
    ids_BL = torch.zeros(len(batch), max(map(len, batch)), dtype=torch.int64)
    mask_BL = torch.zeros_like(ids_BL, dtype=torch.bool)
    for row, each in enumerate(batch):
        ids_BL[row, : len(each)] = torch.tensor(each.token_ids)
        mask_BL[row, : len(each)] = torch.tensor(each.loss_mask)
    inside_BL = torch.arange(ids_BL.shape[1]) < torch.tensor([[len(each)] for each in batch])
    scores_2BL = torch.zeros(2, *ids_BL.shape, dtype=dtype, device=device)
    row_X, at_X = (index.to(device) for index in mask_BL.nonzero(as_tuple=True))
    if len(row_X):
        kept, place_X = torch.unique(at_X - 1, return_inverse=True)  # the positions that predict
        output = model(input_ids=ids_BL.to(device), use_cache=False, logits_to_keep=kept)
        temperature_B = torch.tensor([each.temperature for each in batch], dtype=dtype, device=device)
        logp_XV = (output.logits[row_X, place_X].to(dtype) / temperature_B[row_X, None]).log_softmax(-1)
        token_X = ids_BL.to(device)[row_X, at_X]
        scores_X2 = torch.stack([logp_XV.gather(1, token_X[:, None])[:, 0], -(logp_XV.exp() * logp_XV).sum(-1)], dim=1)
        scores_2BL = scores_2BL.permute(1, 2, 0).index_put((row_X, at_X), scores_X2).permute(2, 0, 1)
    return scores_2BL[:, inside_BL.to(device)]


def _loss_weights(mask_N: Tensor, seed: int) -> Tensor:
    """[2, N], fp64: weights of log-probs and entropies, drawn on the CPU; 0 where nothing is trained."""
    generator = torch.Generator().manual_seed(seed)
    weights_2N = torch.randn(2, len(mask_N), generator=generator, dtype=torch.float64).to(mask_N.device)
    return weights_2N * mask_N / max(1, int(mask_N.sum()))


def _precision(dtype: torch.dtype) -> contextlib.AbstractContextManager[None]:
    return all_fp64() if dtype == torch.float64 else contextlib.nullcontext()


def _trainable(model: nn.Module) -> tuple[list[str], list[nn.Parameter]]:
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    if not named:
        raise ValueError("model: expected parameters that require a gradient, got none; unfreeze some")
    return [name for name, _ in named], [parameter for _, parameter in named]


def _by_name(names: Sequence[str], like: Sequence[Tensor], grads: Sequence[Tensor | None]) -> dict[str, Tensor]:
    zeros = (torch.zeros_like(each) if grad is None else grad for each, grad in zip(like, grads, strict=True))
    return {name: grad.to(torch.float64) for name, grad in zip(names, zeros, strict=True)}
