"""harts.logprobs: a model and a packed tree in, one log-probability per token of every trajectory out."""

from typing import Any, Literal, Unpack, overload

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from transformers.utils import ModelOutput

from harts.formats import check_vocabulary
from harts.layout import PackedTree
from harts.models.attach import Backbone, find_backbone
from harts.models.draws import check_draws
from harts.models.heads import Parts, check_top_k, must_call, run_head, to_tokens
from harts.models.kernel_choice import default_kernels
from harts.models.routing import RouterConfig, Routing, moe_layers, start_routing
from harts.models.row_floor import cut_rows, repeat_first
from harts.models.scores import Extras, Scores
from harts.models.seams import LogitShape, check_around, find_head, logit_shape
from harts.models.sharded import check_gathered, compute_device, find_whole, run_whole
from harts.models.watch import mixers_run_on
from harts.ops.kernels import Kernels

__all__ = ["logprobs", "score_tree"]


@overload
def logprobs(
    model: nn.Module,
    packed: PackedTree,
    *,
    kernels: Kernels | None = None,
    entropy: Literal[False] = False,
    router: None = None,
    hidden: Literal[False] = False,
    top_k: None = None,
) -> Tensor: ...
@overload
def logprobs(
    model: nn.Module, packed: PackedTree, *, kernels: Kernels | None = None, **extras: Unpack[Extras]
) -> Scores: ...
def logprobs(
    model: nn.Module, packed: PackedTree, *, kernels: Kernels | None = None, **extras: Unpack[Extras]
) -> Tensor | Scores:
    """Log-probability of every trained token of every trajectory, differentiable.

    Each distinct token runs once. The result has one entry per token, trajectory after trajectory in the order given
    to `PrefixTree.build`: as many entries per trajectory as it has tokens. Entry p is the log-probability (nats) of
    token p given the tokens before it, at the trajectory's temperature; nothing is shifted. Entries of tokens that are
    not trained are 0 and carry no gradient; the first token, which nothing predicts, is always one of them.

    Args:
        model: a model that `harts.attach` was called on.
        packed: from `harts.pack`, on the model's device.
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
        ValueError: the model is not attached, has active dropout (one row of a tree stands for several trajectories,
            so sharing would change what dropout means), has a head that is no linear layer, has hooks or forwards on
            the modules around its decoder (see `harts.models.seams`), lies on another device, or a token id is outside
            its vocabulary; the model is dense where `router` or recorded routes are given, or those do not fit it; the
            model is sharded by FSDP1, or a part of it alone by FSDP2; `top_k` is below 1 or above the vocabulary.
    """
    scores = score_tree(model, packed, kernels=kernels, **extras)
    return scores if any(value is not None and value is not False for value in extras.values()) else scores.logprobs_N


def score_tree(
    model: nn.Module,
    packed: PackedTree,
    *,
    kernels: Kernels | None = None,
    entropy: bool = False,
    router: RouterConfig | None = None,
    hidden: bool = False,
    top_k: int | None = None,
) -> Scores:
    """`logprobs`, whose result is a `Scores` whatever is asked for."""
    backbone = find_backbone(model)
    kernels = kernels or default_kernels(model)
    shape = logit_shape(backbone.inner, backbone.config)
    whole = _check(model, backbone, packed, shape)
    check_top_k(top_k, find_head(backbone.head).out_features)
    routing = _start_routing(backbone, packed, router)

    def score(decoded: Any) -> Parts:
        if routing is not None:
            routing.check_complete()
        hidden_TD = cut_rows(_last_hidden(decoded, inputs)[0], packed.num_rows)
        head = find_head(backbone.head)
        check_gathered(head.weight)
        return run_head(head, hidden_TD, packed, kernels, shape=shape, entropy=entropy, hidden=hidden, top_k=top_k)

    inputs = _inputs(backbone, packed, kernels, routing)
    with mixers_run_on(packed, backbone.text):
        if whole is None:
            parts = score(backbone.text(**inputs))
        else:
            parts = run_whole(whole, backbone.text, find_head(backbone.head), inputs, score)
    routed = None
    if routing is not None and router is not None:
        routed = routing.output(backbone.config.num_experts_per_tok)
    return to_tokens(parts, packed, routed)


def _start_routing(backbone: Backbone, packed: PackedTree, router: RouterConfig | None) -> Routing | None:
    return start_routing(
        packed,
        router,
        moe_layers(backbone.text, backbone.family.router_class()),
        num_experts=getattr(backbone.config, "num_experts", 0),
        per_token=getattr(backbone.config, "num_experts_per_tok", 0),
    )


def _inputs(backbone: Backbone, packed: PackedTree, kernels: Kernels, routing: Routing | None) -> dict[str, Any]:
    """What the decoder is called with."""
    rows = max(packed.num_rows, kernels.min_rows)
    return {
        "input_ids": repeat_first(packed.token_ids_T, rows).unsqueeze(0),
        "position_ids": repeat_first(packed.position_T, rows).unsqueeze(0),
        "attention_mask": backbone.family.attention_mask(packed.device),
        "use_cache": False,
        "packed": packed,
        "kernels": kernels,
        **({} if routing is None else {"routing": routing}),
        # transformers' own balancing loss, which a sharded model would compute, takes no tree
        **({"output_router_logits": False} if getattr(backbone.config, "output_router_logits", False) else {}),
    }


def _last_hidden(decoded: Any, inputs: dict[str, Any]) -> Tensor:
    """What the decoder gave first, hidden states [1, F, D], whether in a tuple or not."""
    hidden = decoded[0] if isinstance(decoded, tuple | ModelOutput) else decoded
    rows = inputs["input_ids"].shape[1]
    if not isinstance(hidden, Tensor) or hidden.ndim != 3 or tuple(hidden.shape[:2]) != (1, rows):
        came = list(hidden.shape) if isinstance(hidden, Tensor) else type(hidden).__name__
        raise ValueError(
            f"model: expected hidden states [1, {rows}, channels] of the decoder, came {came}; its hooks may change "
            "values, not their shape"
        )
    return hidden


def _check(model: nn.Module, backbone: Backbone, packed: PackedTree, shape: LogitShape) -> nn.Module | None:
    """Returns the module to call as a whole, if the model is sharded."""
    if not backbone.attached:
        raise ValueError("model: not attached; call harts.attach(model) once before harts.logprobs")
    check_around(model, backbone.inner, backbone.text)
    head = find_head(backbone.head)
    whole = find_whole(model, backbone.text, head)
    if whole is not None and must_call(head, shape):
        raise ValueError(
            "model: hooks on the head, a forward that was set on it, and config.final_logit_softcapping are not "
            "supported in a model sharded by fully_shard, whose head is scored while it is gathered; take them off"
        )
    device = head.weight.device if whole is None else compute_device(whole)
    if packed.device != device:
        raise ValueError(f"packed: lies on {packed.device}, the model on {device}; use packed.to(...)")
    if isinstance(model, DistributedDataParallel) and torch.is_grad_enabled():
        raise ValueError(
            "model: DistributedDataParallel sums gradients only of what runs through its own forward, which takes no "
            "tree; pass model.module and sum gradients yourself (harts.train.parallel.Replicas.sum_gradients)"
        )
    check_draws(model)
    vocabulary = backbone.text.get_input_embeddings().weight.shape[0]  # type: ignore[operator]
    if packed.tree.token_ids_T.max() >= vocabulary:
        check_vocabulary(packed.tree.trajectories, vocabulary)
    return whole
