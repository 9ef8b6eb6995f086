"""harts.logprobs: a model and a packed tree in, one log-probability per token of every trajectory out."""

from typing import Any, Literal, overload

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from harts.formats import check_vocabulary
from harts.layout import PackedTree
from harts.models.attach import Backbone, find_backbone
from harts.models.kernel_choice import default_kernels
from harts.models.routing import RouterConfig, RouterOutput, Routing, moe_layers, start_routing
from harts.models.row_floor import cut_rows, repeat_first
from harts.models.sharded import check_gathered, compute_device, find_whole, run_whole
from harts.ops import row_logprobs
from harts.ops.kernels import Kernels
from harts.ops.rows import gather_rows

__all__ = ["logprobs"]


@overload
def logprobs(
    model: nn.Module,
    packed: PackedTree,
    *,
    entropy: Literal[False] = False,
    kernels: Kernels | None = None,
    router: None = None,
) -> Tensor: ...
@overload
def logprobs(
    model: nn.Module,
    packed: PackedTree,
    *,
    entropy: Literal[True],
    kernels: Kernels | None = None,
    router: None = None,
) -> tuple[Tensor, Tensor]: ...
@overload
def logprobs(
    model: nn.Module,
    packed: PackedTree,
    *,
    entropy: Literal[False] = False,
    kernels: Kernels | None = None,
    router: RouterConfig,
) -> tuple[Tensor, RouterOutput]: ...
@overload
def logprobs(
    model: nn.Module,
    packed: PackedTree,
    *,
    entropy: Literal[True],
    kernels: Kernels | None = None,
    router: RouterConfig,
) -> tuple[Tensor, Tensor, RouterOutput]: ...
def logprobs(
    model: nn.Module,
    packed: PackedTree,
    *,
    entropy: bool = False,
    kernels: Kernels | None = None,
    router: RouterConfig | None = None,
) -> Tensor | tuple[Tensor | RouterOutput, ...]:
    """Log-probability of every trained token of every trajectory, differentiable.

    Each distinct token runs once. The result has one entry per token, trajectory after trajectory in the order given
    to `PrefixTree.build`: as many entries per trajectory as it has tokens. Entry p is the log-probability (nats) of
    token p given the tokens before it, at the trajectory's temperature; nothing is shifted. Entries of tokens that are
    not trained are 0 and carry no gradient; the first token, which nothing predicts, is always one of them.

    Args:
        model: a model that `harts.attach` was called on.
        packed: from `harts.pack`, on the model's device.
        entropy: also return the entropy (nats) of the distribution that each trained token was predicted from, in the
            same form, differentiable too.
        kernels: implementations of the ops; None: `harts.models.default_kernels`, the fastest that take the model.
        router: what to take from the routers of a mixture-of-experts model: loads, balancing loss, z-loss.

    Returns:
        logprobs_N: [N], fp32 (fp64 for an fp64 model); `packed.split` cuts it into trajectories. With `entropy=True`
        and with `router` a tuple: logprobs_N, then entropy_N, then the `RouterOutput`, as far as asked for.

    Raises:
        ValueError: the model is not attached, has active dropout (one row of a tree stands for several trajectories,
            so sharing would change what dropout means), has a head that is no plain linear layer, lies on another
            device, or a token id is outside its vocabulary; the model is dense where `router` or recorded routes are
            given, or those do not fit it; the model is sharded by FSDP1, or a part of it alone by FSDP2.
    """
    backbone = find_backbone(model)
    kernels = kernels or default_kernels(model)
    whole = _check(model, backbone, packed)
    routing = _start_routing(backbone, packed, router)

    def score(decoded: Any) -> tuple[Tensor, Tensor | None]:
        if routing is not None:
            routing.check_complete()
        hidden_TD = cut_rows(decoded.last_hidden_state[0], packed.num_rows)
        return _run_head(backbone, hidden_TD, packed, kernels, entropy)

    inputs = _inputs(backbone, packed, kernels, routing)
    if whole is None:
        logprobs_M, entropy_M = score(backbone.text(**inputs))
    else:
        logprobs_M, entropy_M = run_whole(whole, backbone.text, _find_head(backbone), inputs, score)
    results: list[Tensor | RouterOutput] = [_to_tokens(logprobs_M, packed)]
    if entropy_M is not None:
        results.append(_to_tokens(entropy_M, packed))
    if routing is not None and router is not None:
        results.append(routing.output(backbone.config.num_experts_per_tok))
    return tuple(results) if len(results) > 1 else results[0]  # type: ignore[return-value]


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
        "attention_mask": backbone.family.mask(packed.device),
        "use_cache": False,
        "packed": packed,
        "kernels": kernels,
        **({} if routing is None else {"routing": routing}),
        # transformers' own balancing loss, which a sharded model would compute, takes no tree
        **({"output_router_logits": False} if getattr(backbone.config, "output_router_logits", False) else {}),
    }


def _run_head(
    backbone: Backbone, hidden_TD: Tensor, packed: PackedTree, kernels: Kernels, entropy: bool
) -> tuple[Tensor, Tensor | None]:
    """Log-probs [M] and entropies [M] of the rows' targets; in a sharded model while the head is gathered."""
    head = _find_head(backbone)
    check_gathered(head.weight)
    return row_logprobs(
        hidden_TD,
        head.weight,
        packed,
        bias_V=head.bias,
        entropy=entropy,
        chunk_rows=kernels.chunk_rows,
        impl=kernels.row_logprobs,
    )


def _to_tokens(values_M: Tensor, packed: PackedTree) -> Tensor:
    """One gather hands a row's value to every trajectory through it; its backward sums their gradients."""
    return gather_rows(values_M, packed.target_of_N, missing=True)


def _find_head(backbone: Backbone) -> nn.Linear:
    head: Any = backbone.head
    if hasattr(head, "modules_to_save"):  # peft's full copy of a module
        head = head.original_module if head.disable_adapters else head.modules_to_save[head.active_adapters[0]]
    if not isinstance(head, nn.Linear) or type(head).forward is not nn.Linear.forward:
        raise ValueError(
            f"model: expected the head to be a torch.nn.Linear, came {type(head).__name__}; leave the head out of the "
            "LoRA target modules (modules_to_save is fine)"
        )
    return head


def _check(model: nn.Module, backbone: Backbone, packed: PackedTree) -> nn.Module | None:
    """Returns the module to call as a whole, if the model is sharded."""
    if not backbone.attached:
        raise ValueError("model: not attached; call harts.attach(model) once before harts.logprobs")
    head = _find_head(backbone)
    whole = find_whole(model, backbone.text, head)
    device = head.weight.device if whole is None else compute_device(whole)
    if packed.device != device:
        raise ValueError(f"packed: lies on {packed.device}, the model on {device}; use packed.to(...)")
    if isinstance(model, DistributedDataParallel) and torch.is_grad_enabled():
        raise ValueError(
            "model: DistributedDataParallel sums gradients only of what runs through its own forward, which takes no "
            "tree; pass model.module and sum gradients yourself (harts.train.parallel.Replicas.sum_gradients)"
        )
    _check_dropout(model)
    vocabulary = backbone.text.get_input_embeddings().weight.shape[0]  # type: ignore[operator]
    if packed.tree.token_ids_T.max() >= vocabulary:
        check_vocabulary(packed.tree.trajectories, vocabulary)
    return whole


def _check_dropout(model: nn.Module) -> None:
    training = [(name, module) for name, module in model.named_modules() if module.training]
    active = [name for name, module in training if isinstance(module, nn.Dropout) and module.p > 0]
    if any(getattr(module, "attention_dropout", 0.0) for _, module in training):
        active.append("config.attention_dropout")
    if active:
        raise ValueError(
            f"model: dropout is active in {active[0]}{' and others' if len(active) > 1 else ''}; a row of the tree "
            "stands for several trajectories, which would no longer be dropped alone. Set it to 0 or call model.eval()"
        )
