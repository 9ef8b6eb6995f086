"""harts.logprobs: a model and a batch in, one log-probability per token of every trajectory out."""

from typing import Literal, Unpack, overload

import torch
from torch import Tensor, nn

from harts.models.batch import Batch, check_token_budget, lay_out_batch
from harts.models.cuts import kept_in_one_sweep, kept_in_two_sweeps, piece_starts, subtree_starts
from harts.models.heads import to_tokens
from harts.models.memory import Memory, choose_one_sweep, choose_two_sweeps
from harts.models.scorer import Scorer
from harts.models.scores import Extras, Scores
from harts.models.sharded import most, process_groups
from harts.models.streaming import Stream, SumOfLosses, in_one_sweep, in_two_sweeps
from harts.ops.kernels import Kernels

__all__ = ["backward", "logprobs", "score_tree"]


@overload
def logprobs(
    model: nn.Module,
    batch: Batch,
    *,
    token_budget: int | None = None,
    memory: Memory | None = None,
    kernels: Kernels | None = None,
    entropy: Literal[False] = False,
    router: None = None,
    hidden: Literal[False] = False,
    top_k: None = None,
) -> Tensor: ...
@overload
def logprobs(
    model: nn.Module,
    batch: Batch,
    *,
    token_budget: int | None = None,
    memory: Memory | None = None,
    kernels: Kernels | None = None,
    **extras: Unpack[Extras],
) -> Scores: ...
def logprobs(
    model: nn.Module,
    batch: Batch,
    *,
    token_budget: int | None = None,
    memory: Memory | None = None,
    kernels: Kernels | None = None,
    **extras: Unpack[Extras],
) -> Tensor | Scores:
    """Log-probability of every trained token of every trajectory, differentiable.

    Each distinct token runs once. The result has one entry per token, trajectory after trajectory in the order given
    to `PrefixTree.build`: as many entries per trajectory as it has tokens. Entry p is the log-probability (nats) of
    token p given the tokens before it, at the trajectory's temperature; nothing is shifted. Entries of tokens that are
    not trained are 0 and carry no gradient; the first token, which nothing predicts, is always one of them.

    With a `token_budget` a batch of any size goes in one call: a larger tree runs in pieces of at most so many rows,
    whose activations are kept for one piece at a time. The backward runs the pieces once more, last to first, and adds
    the gradients to `.grad` of the parameters, as reentrant checkpointing does: call `backward()`, once;
    `torch.autograd.grad` finds nothing. Log-probabilities have the bits of a tree that runs whole. Where FSDP2 shards
    the model over several processes, all of them give a `token_budget` or none does, and those with fewer pieces run
    padding rows in lock step with the others.

    Args:
        model: a model that `harts.attach` was called on.
        batch: trajectories, their `PrefixTree`, or that packed by `harts.pack` on the model's device.
        token_budget: most rows whose activations are kept; None: any number, without `memory` the tree runs whole.
        memory: most bytes that tensors take on the device, those included that lie there already: a number, "60GiB", or
            "auto" for what is free. Pieces, and how many of them are kept, are chosen by what the model was measured to
            take: in its first call with these options small trees run through it, whose gradients go nowhere. On a CPU
            what lies there already are the model and its gradients.
        kernels: implementations of the ops; None: `harts.models.default_kernels`, the fastest that take the model.
        **extras: what to give besides, all off by default. `entropy=True`: of the distribution that each trained token
            was predicted from. `router=RouterConfig(...)`: loads, balancing loss, z-loss and routes of a
            mixture-of-experts model. `hidden=True`: the hidden state that predicted each trained token. `top_k=K`: ids
            and log-probabilities of the K most likely tokens in each trained token's place.

    Returns:
        logprobs_N: [N], fp32 (fp64 for an fp64 model); `packed.split` cuts it into trajectories. Where an extra is
        asked for, a `Scores` with that and the log-probabilities.

    Raises:
        TypeError: an extra that there is not.
        ValueError: `token_budget` is no positive whole number, or a piece that runs twice gives other bits the second
            time; `memory` is no size, more than the device has, or too small for the smallest pieces (the message says
            how much they take), or the model is sharded; the model is not attached, has active dropout (one row of a
            tree stands for several trajectories, so sharing would change what dropout means), has a head that is no
            linear layer, has hooks or forwards on the modules around its decoder (see `harts.models.seams`), lies on
            another device, or a token id is outside its vocabulary; the model is dense where `router` or recorded
            routes are given, or those do not fit it; the model is sharded by FSDP1, or a part of it alone by FSDP2;
            `top_k` is below 1 or above the vocabulary.
    """
    scores = score_tree(model, batch, token_budget=token_budget, memory=memory, kernels=kernels, **extras)
    return scores if any(value is not None and value is not False for value in extras.values()) else scores.logprobs_N


def score_tree(
    model: nn.Module,
    batch: Batch,
    *,
    token_budget: int | None = None,
    memory: Memory | None = None,
    kernels: Kernels | None = None,
    **extras: Unpack[Extras],
) -> Scores:
    """`logprobs`, whose result is a `Scores` whatever is asked for."""
    packed = lay_out_batch(batch, model)
    check_token_budget(token_budget)
    scorer = Scorer(model, packed, kernels, extras)
    if memory is not None:
        choice = choose_two_sweeps(scorer, packed, memory, token_budget)
        if len(choice.stream.pieces) > 1:
            return in_two_sweeps(choice.stream, choice.keep)
        token_budget = None
    starts = [0] if token_budget is None else piece_starts(packed.tree, token_budget)
    groups = [] if token_budget is None else process_groups(scorer.whole)
    runs = most(len(starts), groups, packed.device)
    if token_budget is None or runs == 1:
        parts, router = scorer.run(packed)
        return to_tokens(parts, packed, router)
    stream = Stream(scorer, packed, starts)
    padding = runs - len(starts)
    kept = kept_in_two_sweeps([*(piece.num_rows for piece in stream.pieces), *[1] * padding], token_budget)
    fewest = -most(-len(kept), groups, packed.device)
    return in_two_sweeps(stream, range(runs - fewest, runs), padding)


def backward(
    model: nn.Module,
    batch: Batch,
    loss: SumOfLosses,
    *,
    token_budget: int | None = None,
    memory: Memory | None = None,
    kernels: Kernels | None = None,
    **extras: Unpack[Extras],
) -> tuple[Tensor, Scores]:
    """Forward and backward of a batch of any size, each piece of its tree once where that is possible.

    For losses that are sums over trajectories, divided by what is known beforehand (counts of the whole step). The loss
    of a trajectory is taken as soon as its last token has run, and a subtree goes backward as soon as its last
    trajectory has; only activations of what lies above are kept. So no piece runs forward twice but those for which
    `token_budget` has no room. Adds to `.grad` of the parameters.

    Args:
        model: a model that `harts.attach` was called on.
        batch: as for `logprobs`.
        loss: gets indices of trajectories, and their scores, token after token in that order (`router` is None there);
            gives the sum of their losses, a tensor []. It is called until every trajectory was in one call.
        token_budget: most rows whose activations are kept at any time.
        memory: most bytes on the device, as for `logprobs`; one of the two is needed.
        kernels, extras: as for `logprobs`.

    Returns:
        The sum of the losses, and the scores of the whole batch, all detached.

    Raises:
        ValueError: see `logprobs`; or gradients are off, or the loss is no single number with a gradient, or the
            routers have an auxiliary loss, which is no sum over trajectories, or several processes share the model
            (take `logprobs` there).
    """
    if not torch.is_grad_enabled():
        raise ValueError("backward: expected gradients to be on, got torch.no_grad or inference mode; leave it")
    router = extras.get("router")
    if router is not None and (router.balance_coefficient or router.z_coefficient):
        raise ValueError(
            "router: expected coefficients of 0, as auxiliary losses are no sums over trajectories, got "
            f"{router.balance_coefficient} and {router.z_coefficient}; use harts.logprobs with a token_budget"
        )
    packed = lay_out_batch(batch, model)
    check_token_budget(token_budget)
    scorer = Scorer(model, packed, kernels, extras)
    if process_groups(scorer.whole):
        raise ValueError(
            "backward: expected a model that one process holds, got one sharded over several, whose pieces must run in "
            "lock step; use harts.logprobs with a token_budget"
        )
    if memory is not None:
        choice = choose_one_sweep(scorer, packed, memory, token_budget)
        return in_one_sweep(choice.stream, loss, choice.keep)
    if token_budget is None:
        raise ValueError("backward: expected a token_budget (rows) or memory (bytes, '60GiB', 'auto'), got neither")
    stream = Stream(scorer, packed, subtree_starts(packed.tree, token_budget))
    rows = [piece.num_rows for piece in stream.pieces]
    return in_one_sweep(stream, loss, kept_in_one_sweep(rows, stream.done_after, token_budget))
