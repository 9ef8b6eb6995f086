"""The laws that a tree has to keep against separate rows, and how far it is from them.

In fp64 tree and separate rows agree within `FP64_LOGPROB` and `FP64_GRAD`. In a lower precision neither is right;
there the tree's error against fp64 separate rows is at most `ERROR_RATIO` times that of separate rows in the same
precision: root mean squares over trained tokens for log-probs and entropies, norms for the whole gradient and for the
median parameter. (A single small parameter cannot be judged: two equally good sums of many roundings into the 4 numbers
of an `A_log` differ by factors of 5 and more, either way. The worst parameter is reported.) Both sides of such a ratio
are chance. That of two root mean squares over n rows scatters by 1 / sqrt(n), so with fewer than 144 distinct trained
rows the limit is 1 + 3 / sqrt(n); that of gradients scatters by about 0.1 with the weights of the loss, so where one
draw of them exceeds the limit, four are pooled.

The error of separate rows is the larger of two: run one by one, and in padded batches of as many rows as the tree, both
through transformers. A sum over many rows at once, as in the gradient of an embedding, rounds more often than a sum of
sums, shared rows or not.

Shape suffixes: N tokens of all trajectories.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from harts.layout import PackedTree
from harts.tree import Share

__all__ = ["ERROR_RATIO", "FP64_GRAD", "FP64_LOGPROB", "Comparison", "Scores", "gradient_sizes", "judge", "pool"]

FP64_LOGPROB = 1e-10
"""Largest difference (nats) of log-probs and entropies in fp64."""

FP64_GRAD = 1e-8
"""Largest relative difference of a parameter's gradient in fp64: norm of the difference over `gradient_size`."""

_LEAST_SIZE = 1e-3
"""Of the whole gradient: a parameter's own may be zero but for rounding, which says nothing when divided by itself."""

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


@dataclass(frozen=True, kw_only=True)
class _Errors:
    """Errors of the tree against fp64 over those of separate rows."""

    logprob: float
    entropy: float
    grad: float
    grad_median: float
    grad_max: float
    grad_worst: str


def pool(draws: Sequence[Scores]) -> Scores:
    """Scores of one batch with several draws of the loss weights, as if of one batch so many times larger."""
    return Scores(
        torch.cat([scores.logprobs_N for scores in draws]),
        torch.cat([scores.entropy_N for scores in draws]),
        {name: torch.stack([scores.grads[name] for scores in draws]) for name in draws[0].grads},
    )


def judge(
    dtype: str, share: Share, packed: PackedTree, tree: Scores, separate: tuple[Scores, Scores], exact: Scores
) -> Comparison:
    """Measures scores of a tree against those of separate rows, and holds the laws to them.

    Args:
        dtype: "float64", "float32" or "bfloat16".
        share: what the tree shares.
        packed: the tree.
        tree: its scores, pooled over draws of the loss weights.
        separate: those of separate rows, one by one and in batches, with the same draws.
        exact: those of separate rows in fp64.
    """
    rows = separate[0]
    trained_N = packed.loss_mask_N.repeat(len(rows.logprobs_N) // packed.num_tokens)
    grad_max_rel, grad_worst = _largest_relative(tree.grads, rows.grads)
    logprob, entropy = _largest(tree.logprobs_N, rows.logprobs_N), _largest(tree.entropy_N, rows.entropy_N)
    errors = None
    if dtype == "float64":
        laws = [("log-prob", logprob, FP64_LOGPROB), ("entropy", entropy, FP64_LOGPROB)]
        laws.append((f"gradient of {grad_worst}, relative", grad_max_rel, FP64_GRAD))
    else:
        errors = _errors(trained_N, tree, separate, exact, torch.finfo(getattr(torch, dtype)).eps)
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
        trained=int(packed.loss_mask_N.sum()),
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


def gradient_sizes(grads: Mapping[str, Tensor]) -> dict[str, float]:
    """What a difference of a parameter's gradient is measured by: its norm, at least 0.001 of the whole gradient's."""
    whole = math.hypot(*(float(grad.norm()) for grad in grads.values()))
    return {name: max(float(grad.norm()), _LEAST_SIZE * whole) for name, grad in grads.items()}


def _largest_relative(grads: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> tuple[float, str]:
    """Largest norm of a difference over the gradient's size."""
    relative = {}
    for name, size in gradient_sizes(wanted).items():
        difference = float((grads[name] - wanted[name]).norm())
        relative[name] = difference / size if difference else 0.0
    return _worst(relative)


def _worst(by_name: Mapping[str, float]) -> tuple[float, str]:
    name = max(by_name, key=lambda each: math.inf if math.isnan(by_name[each]) else by_name[each])
    return by_name[name], name


def _errors(
    trained_N: Tensor, tree: Scores, separate: tuple[Scores, Scores], exact: Scores, resolution: float
) -> _Errors:
    """Error ratios; errors of separate rows count as at least that of rounding the exact result once.

    Rounding errors are spread evenly over a unit in the last place, between resolution / 2 and resolution of a value:
    their root mean square is about a quarter of `resolution`.
    """

    def ratio(of: Callable[[Scores], Tensor], resolution: float, size: float = 0.0) -> float:
        wanted = of(exact)
        floor = resolution / 4 * max(float(wanted.norm()), size)
        error, *allowed = (float((of(each).to(wanted) - wanted).norm()) for each in (tree, *separate))
        return error / max(*allowed, floor) if error else 0.0

    score_resolution = torch.finfo(tree.logprobs_N.dtype).eps
    by_name = {
        name: ratio(lambda scores, name=name: scores.grads[name], resolution, size)  # type: ignore[misc]
        for name, size in gradient_sizes(exact.grads).items()
    }
    grad_max, grad_worst = _worst(by_name)
    return _Errors(
        logprob=ratio(lambda scores: scores.logprobs_N[trained_N], score_resolution),
        entropy=ratio(lambda scores: scores.entropy_N[trained_N], score_resolution),
        grad=ratio(lambda scores: torch.cat([scores.grads[name].flatten() for name in exact.grads]), resolution),
        grad_median=median(by_name.values()),
        grad_max=grad_max,
        grad_worst=grad_worst,
    )
