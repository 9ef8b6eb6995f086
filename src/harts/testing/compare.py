"""Measures a model on a tree against the same model on separate rows: log-probs, entropies, gradients.

The other side is as independent as it can be: a detached copy of the model runs one trajectory after the other through
transformers' own code, without a layout, an op or a loss of HARTS. Both differentiate the same loss, which weighs the
log-prob and the entropy of every trained token with a random number of its own: a value or gradient that lands on
another token, or is summed over one trajectory too few, then shows.

Laws. In fp64 tree and separate rows agree within `FP64_LOGPROB` and `FP64_GRAD`. In a lower precision neither is right;
there the tree's error against fp64 separate rows is at most `ERROR_RATIO` times that of separate rows in the same
precision: root mean squares over trained tokens for log-probs and entropies, norms for the whole gradient and for the
median parameter. (A single small parameter cannot be judged: two equally good sums of many roundings into the 4 numbers
of an `A_log` differ by factors of 5 and more, either way. The worst parameter is reported.) The ratio of two root mean
squares over n rows scatters by 1 / sqrt(n), so with fewer than 144 distinct trained rows the limit is 1 + 3 / sqrt(n).

Shape suffixes: B trajectories, N tokens of all of them, L tokens of one, V vocabulary.
"""

import contextlib
import copy
import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from harts.layout import PackedTree, pack
from harts.models import attach, detach, logprobs
from harts.models.attach import find_backbone
from harts.ops.kernels import Kernels
from harts.testing.fp64 import all_fp64
from harts.trajectory import Trajectory
from harts.tree import PrefixTree, Share

__all__ = ["ERROR_RATIO", "FP64_GRAD", "FP64_LOGPROB", "Comparison", "Scores", "compare", "score_packed", "score_rows"]

FP64_LOGPROB = 1e-10
"""Largest difference (nats) of log-probs and entropies in fp64."""

FP64_GRAD = 1e-8
"""Largest relative difference of a parameter's gradient in fp64: norm of the difference over norm."""

ERROR_RATIO = 1.25
"""Largest ratio of errors against fp64, tree over separate rows, in fp32 and bf16."""


@dataclass(frozen=True, eq=False)
class Scores:
    """What one way of running a batch gave.

    Attributes:
        logprobs_N, entropy_N: [N], nats, in the dtype they came in (fp32 or fp64); 0 where nothing is trained.
        grads: by parameter name, fp64: gradients of the probing loss.
    """

    logprobs_N: Tensor
    entropy_N: Tensor
    grads: Mapping[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A model on a tree against separate rows, and, below fp64, both against fp64.

    Attributes:
        dtype: of the model.
        share: what the tree shared; "none" is packed separate rows through the same ops.
        trajectories, tokens, rows, trained: sizes; trained tokens are counted per trajectory.
        logprob_max_abs, entropy_max_abs: largest differences, nats.
        logprob_bitwise_equal_fraction: share of trained tokens whose log-prob has the same bits.
        grad_max_rel: largest relative difference of a parameter's gradient, and `grad_worst` its name.
        logprob_error_ratio, entropy_error_ratio: error of the tree over error of separate rows; None in fp64.
        grad_error_ratio, grad_error_ratio_median, grad_error_ratio_max: the same for the whole gradient, the median
            parameter and the worst one, whose name is `grad_error_worst`; None in fp64.
        failures: the laws that do not hold, in words.
    """

    dtype: str
    share: Share
    trajectories: int
    tokens: int
    rows: int
    trained: int
    logprob_max_abs: float
    entropy_max_abs: float
    logprob_bitwise_equal_fraction: float
    grad_max_rel: float
    grad_worst: str
    logprob_error_ratio: float | None
    entropy_error_ratio: float | None
    grad_error_ratio: float | None
    grad_error_ratio_median: float | None
    grad_error_ratio_max: float | None
    grad_error_worst: str
    failures: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether every law holds."""
        return not self.failures


def compare(
    model: nn.Module,
    trajectories: Sequence[Trajectory],
    *,
    dtype: torch.dtype | None = None,
    share: Share = "tree",
    kernels: Kernels | None = None,
    seed: int = 0,
) -> Comparison:
    """Runs a batch both ways, forward and backward, as one microbatch.

    Args:
        model: of a supported family, attached or not; it is copied and left as it is. The copies are in evaluation
            mode. Up to two live at once, one of them in fp64, whose experts run with the eager implementation (grouped
            ones have no fp64).
        trajectories: at least one with a trained token. Recorded routes are left out: the other side cannot force them.
        dtype: of the copies' parameters; None takes the model's.
        share: what the tree merges.
        kernels: implementations of the ops.
        seed: of the weights in the loss.

    Raises:
        ValueError: nothing is trained, the dtype is not fp64, fp32 or bf16, or the model or a token id does not fit.
    """
    if not any(each.loss_mask.any() for each in trajectories):
        raise ValueError("trajectories: expected a trained token, came none; there is nothing to compare")
    dtype = dtype or next(model.parameters()).dtype
    if dtype not in (torch.float64, torch.float32, torch.bfloat16):
        raise ValueError(f"dtype: expected float64, float32 or bfloat16, came {dtype}")
    trajectories = [dataclasses.replace(each, routes=None) for each in trajectories]
    plain = _cast(detach(copy.deepcopy(model)).eval(), dtype)
    packed = pack(PrefixTree.build(trajectories, share=share), device=next(plain.parameters()).device)
    tree = score_packed(attach(plain), packed, kernels=kernels, seed=seed)
    rows = score_rows(detach(plain), trajectories, seed=seed)
    exact = rows if dtype == torch.float64 else score_rows(_cast(plain, torch.float64), trajectories, seed=seed)
    return _judge(str(dtype).removeprefix("torch."), share, packed, tree, rows, exact)


def _cast(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    config = find_backbone(model).config
    if dtype == torch.float64 and getattr(config, "_experts_implementation", None):
        config._experts_implementation = "eager"
    return model.to(dtype)


def score_packed(model: nn.Module, packed: PackedTree, *, kernels: Kernels | None = None, seed: int = 0) -> Scores:
    """Log-probs, entropies and gradients through HARTS.

    Args:
        model: attached, on the device of `packed`. An fp64 model runs wholly in fp64.
        packed: the batch.
        kernels: implementations of the ops.
        seed: of the weights in the loss.
    """
    weights_2N = _loss_weights(packed.loss_mask_N, seed)
    names, parameters = _trainable(model)
    with _precision(parameters[0].dtype):
        logprobs_N, entropy_N = logprobs(model, packed, entropy=True, kernels=kernels)
        loss = (weights_2N.to(logprobs_N) * torch.stack([logprobs_N, entropy_N])).sum()
        grads = torch.autograd.grad(loss, parameters, allow_unused=True)
    return Scores(logprobs_N.detach(), entropy_N.detach(), _by_name(names, parameters, grads))


def score_rows(model: nn.Module, trajectories: Sequence[Trajectory], *, seed: int = 0) -> Scores:
    """The same through transformers' own code, one trajectory after the other; gradients are added up in at
    least fp32, as training does.

    Args:
        model: not attached. An fp64 model runs wholly in fp64.
        trajectories: the batch.
        seed: of the weights in the loss.
    """
    if find_backbone(model).attached:
        raise ValueError("model: expected one that is not attached, to compare with; call harts.detach(model)")
    names, parameters = _trainable(model)
    device = parameters[0].device
    mask_N = torch.cat([torch.tensor(each.loss_mask) for each in trajectories]).to(device)
    weights_B = torch.split(_loss_weights(mask_N, seed), [len(each) for each in trajectories], dim=1)
    dtype = torch.promote_types(parameters[0].dtype, torch.float32)
    total = [torch.zeros_like(parameter, dtype=dtype) for parameter in parameters]
    scores_B: list[Tensor] = []
    for trajectory, weights_2L in zip(trajectories, weights_B, strict=True):
        with _precision(parameters[0].dtype):
            scores_2L = _score_row(model, trajectory, device)
            if scores_2L.requires_grad:
                loss = (weights_2L.to(scores_2L) * scores_2L).sum()
                for sum_, grad in zip(total, torch.autograd.grad(loss, parameters, allow_unused=True), strict=True):
                    if grad is not None:
                        sum_ += grad.to(dtype)
        scores_B.append(scores_2L.detach())
    logprobs_N, entropy_N = torch.cat(scores_B, dim=1)
    return Scores(logprobs_N, entropy_N, _by_name(names, parameters, total))


def _score_row(model: Any, trajectory: Trajectory, device: torch.device) -> Tensor:
    """Log-probs and entropies of one trajectory, [2, L]."""
    ids_L = torch.tensor(trajectory.token_ids, dtype=torch.int64, device=device)
    trained = torch.tensor(trajectory.loss_mask, device=device).nonzero().squeeze(-1)
    dtype = torch.promote_types(next(model.parameters()).dtype, torch.float32)
    scores_2L = torch.zeros(2, len(ids_L), dtype=dtype, device=device)
    if len(trained) == 0:
        return scores_2L
    output = model(input_ids=ids_L.unsqueeze(0), use_cache=False, logits_to_keep=trained - 1)
    logp = (output.logits[0].to(dtype) / trajectory.temperature).log_softmax(-1)
    logprob = logp.gather(1, ids_L[trained].unsqueeze(-1)).squeeze(-1)
    return scores_2L.index_copy(1, trained, torch.stack([logprob, -(logp.exp() * logp).sum(-1)]))


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
        raise ValueError("model: expected parameters that require a gradient, came none; unfreeze some")
    return [name for name, _ in named], [parameter for _, parameter in named]


def _by_name(names: Sequence[str], like: Sequence[Tensor], grads: Sequence[Tensor | None]) -> dict[str, Tensor]:
    zeros = (torch.zeros_like(each) if grad is None else grad for each, grad in zip(like, grads, strict=True))
    return {name: grad.to(torch.float64) for name, grad in zip(names, zeros, strict=True)}


@dataclass(frozen=True, kw_only=True)
class _Errors:
    """Errors of the tree against fp64 over those of separate rows."""

    logprob: float
    entropy: float
    grad: float
    grad_median: float
    grad_max: float
    grad_worst: str


def _judge(dtype: str, share: Share, packed: PackedTree, tree: Scores, rows: Scores, exact: Scores) -> Comparison:
    trained_N = packed.loss_mask_N
    grad_max_rel, grad_worst = _largest_relative(tree.grads, rows.grads)
    logprob, entropy = _largest(tree.logprobs_N, rows.logprobs_N), _largest(tree.entropy_N, rows.entropy_N)
    errors = None
    if dtype == "float64":
        laws = [("log-prob", logprob, FP64_LOGPROB), ("entropy", entropy, FP64_LOGPROB)]
        laws.append((f"gradient of {grad_worst}, relative", grad_max_rel, FP64_GRAD))
    else:
        errors = _errors(trained_N, tree, rows, exact, torch.finfo(getattr(torch, dtype)).eps)
        limit = max(ERROR_RATIO, 1 + 3 / len(packed.token_M) ** 0.5)
        laws = [
            ("log-prob error over separate rows'", errors.logprob, limit),
            ("entropy error over separate rows'", errors.entropy, limit),
            ("gradient error over separate rows'", errors.grad, limit),
            ("median parameter's gradient error over separate rows'", errors.grad_median, limit),
        ]
    same_N = tree.logprobs_N == rows.logprobs_N
    return Comparison(
        dtype=dtype,
        share=share,
        trajectories=packed.tree.num_trajectories,
        tokens=packed.num_tokens,
        rows=packed.num_rows,
        trained=int(trained_N.sum()),
        logprob_max_abs=logprob,
        entropy_max_abs=entropy,
        logprob_bitwise_equal_fraction=float(same_N[trained_N].double().mean()),
        grad_max_rel=grad_max_rel,
        grad_worst=grad_worst,
        logprob_error_ratio=errors.logprob if errors else None,
        entropy_error_ratio=errors.entropy if errors else None,
        grad_error_ratio=errors.grad if errors else None,
        grad_error_ratio_median=errors.grad_median if errors else None,
        grad_error_ratio_max=errors.grad_max if errors else None,
        grad_error_worst=errors.grad_worst if errors else "",
        # a value that is no number fails too
        failures=tuple(f"{what}: {value:.3g} > {limit:.3g}" for what, value, limit in laws if not value <= limit),
    )


def _largest(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).abs().max())


def _largest_relative(grads: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> tuple[float, str]:
    """Largest norm of a difference over its norm, or over 1e-6 of the whole gradient's where that is more."""
    whole = math.hypot(*(float(grad.norm()) for grad in wanted.values()))
    relative = {}
    for name, grad in wanted.items():
        difference = float((grads[name] - grad).norm())
        relative[name] = difference / max(float(grad.norm()), 1e-6 * whole) if difference else 0.0
    return _worst(relative)


def _worst(by_name: Mapping[str, float]) -> tuple[float, str]:
    name = max(by_name, key=lambda each: math.inf if math.isnan(by_name[each]) else by_name[each])
    return by_name[name], name


def _errors(trained_N: Tensor, tree: Scores, rows: Scores, exact: Scores, resolution: float) -> _Errors:
    """Error ratios; errors of separate rows count as at least that of rounding the exact result once.

    Rounding errors are spread evenly over a unit in the last place, between resolution / 2 and resolution of a value:
    their root mean square is about a quarter of `resolution`.
    """

    def ratio(tree_x: Tensor, rows_x: Tensor, exact_x: Tensor, resolution: float) -> float:
        floor = resolution / 4 * float(exact_x.norm())
        error, allowed = (float((each.to(exact_x) - exact_x).norm()) for each in (tree_x, rows_x))
        return error / max(allowed, floor) if error else 0.0

    def of_scores(name: str) -> float:
        tree_x, rows_x, exact_x = (getattr(each, name)[trained_N] for each in (tree, rows, exact))
        return ratio(tree_x, rows_x, exact_x, torch.finfo(tree_x.dtype).eps)

    def whole(scores: Scores) -> Tensor:
        return torch.cat([scores.grads[name].flatten() for name in exact.grads])

    by_name = {name: ratio(tree.grads[name], rows.grads[name], exact.grads[name], resolution) for name in exact.grads}
    grad_max, grad_worst = _worst(by_name)
    return _Errors(
        logprob=of_scores("logprobs_N"),
        entropy=of_scores("entropy_N"),
        grad=ratio(whole(tree), whole(rows), whole(exact), resolution),
        grad_median=median(by_name.values()),
        grad_max=grad_max,
        grad_worst=grad_worst,
    )
