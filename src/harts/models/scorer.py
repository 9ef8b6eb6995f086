"""A model that was checked, ready to run a tree or its pieces."""

import copy
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from transformers.utils import ModelOutput

from harts.cost import expert_sizes
from harts.formats import check_vocabulary
from harts.layout import PackedTree
from harts.models.attach import Backbone, find_backbone
from harts.models.draws import check_draws
from harts.models.heads import Parts, check_top_k, must_call, run_head
from harts.models.kernel_choice import default_kernels
from harts.models.pieces import Contexts
from harts.models.router_hooks import moe_layers
from harts.models.router_output import RouterConfig, RouterOutput
from harts.models.routing import Routing, start_routing
from harts.models.row_floor import cut_rows, repeat_first
from harts.models.scores import Extras
from harts.models.seams import LogitShape, check_around, find_head, logit_shape
from harts.models.sharded import check_gathered, compute_device, find_whole, run_whole
from harts.models.watch import mixers_run_on
from harts.ops.kernels import Kernels

__all__ = ["Scorer"]


class Scorer:
    """A model that was checked, with what is asked of it; runs a tree, or its pieces one by one.

    Args:
        model: attached.
        packed: the whole tree.
        kernels: None: `default_kernels`.
        extras: what to give beside log-probabilities.

    Raises:
        ValueError: see `logprobs`.
    """

    def __init__(self, model: nn.Module, packed: PackedTree, kernels: Kernels | None, extras: Extras) -> None:
        self.backbone = find_backbone(model)
        self.kernels = kernels or default_kernels(model)
        self.shape = logit_shape(self.backbone.inner, self.backbone.config)
        self.whole = _check(model, self.backbone, packed, self.shape)
        self.router: RouterConfig | None = extras.get("router")
        self.extras = extras
        if unknown := sorted(set(extras) - set(Extras.__annotations__)):
            raise TypeError(f"harts.logprobs: no extra named {unknown[0]!r}; see harts.models.scores.Extras")
        check_top_k(extras.get("top_k"), find_head(self.backbone.head).out_features)

    @property
    def setting(self) -> tuple[Kernels, str]:
        """Kernels, and what is asked for."""
        return self.kernels, repr(sorted(self.extras.items(), key=lambda item: item[0]))

    def with_kernels(self, kernels: Kernels) -> Self:
        """The same with other implementations of the ops."""
        other = copy.copy(self)
        other.kernels = kernels
        return other

    def run(self, packed: PackedTree, contexts: Contexts | None = None) -> tuple[Parts, RouterOutput | None]:
        """What the head and the routers give.

        Args:
            packed: the tree, or a piece of it.
            contexts: of a piece, by layer.
        """
        backbone = self.backbone
        routing = self._start_routing(packed)
        inputs = self._inputs(packed, routing, contexts)

        def score(decoded: Any) -> Parts:
            if routing is not None:
                routing.check_complete()
            return self.score(_rows_of(decoded, inputs, packed), packed)

        with mixers_run_on(packed, backbone.text):
            if self.whole is None:
                parts = score(backbone.text(**inputs))
            else:
                parts = run_whole(self.whole, backbone.text, find_head(backbone.head), inputs, score)
        routed = None
        if routing is not None and self.router is not None:
            routed = routing.output(_experts(backbone)[1])
        return parts, routed

    def decode(self, packed: PackedTree, contexts: Contexts | None = None) -> Tensor:
        """Hidden states [T, D] of the decoder alone; of an unsharded model."""
        inputs = self._inputs(packed, self._start_routing(packed), contexts)
        with mixers_run_on(packed, self.backbone.text):
            return _rows_of(self.backbone.text(**inputs), inputs, packed)

    def score(self, hidden_TD: Tensor, packed: PackedTree) -> Parts:
        """What the head gives for hidden states."""
        head = find_head(self.backbone.head)
        check_gathered(head.weight)
        return run_head(
            head,
            hidden_TD,
            packed,
            self.kernels,
            shape=self.shape,
            entropy=self.extras.get("entropy", False),
            hidden=self.extras.get("hidden", False),
            top_k=self.extras.get("top_k"),
        )

    def _start_routing(self, packed: PackedTree) -> Routing | None:
        backbone = self.backbone
        num_experts, per_token = _experts(backbone)
        return start_routing(
            packed,
            self.router,
            moe_layers(backbone.text, backbone.family.router_class()),
            router=backbone.family.router,
            num_experts=num_experts,
            per_token=per_token,
        )

    def _inputs(self, packed: PackedTree, routing: Routing | None, contexts: Contexts | None) -> dict[str, Any]:
        """What the decoder is called with."""
        backbone, rows = self.backbone, max(packed.num_rows, self.kernels.min_rows)
        return {
            "input_ids": repeat_first(packed.token_ids_T, rows).unsqueeze(0),
            "position_ids": repeat_first(packed.position_T, rows).unsqueeze(0),
            "attention_mask": backbone.family.attention_mask(packed.device),
            "use_cache": False,
            "packed": packed,
            "kernels": self.kernels,
            **({} if routing is None else {"routing": routing}),
            **({} if contexts is None else {"contexts": contexts}),
            # transformers' own balancing loss, which a sharded model would compute, takes no tree
            **({"output_router_logits": False} if getattr(backbone.config, "output_router_logits", False) else {}),
        }


def _experts(backbone: Backbone) -> tuple[int, int]:
    """Experts of a layer, and those of a token; 0 for a dense model."""
    experts = None if backbone.family.router is None else expert_sizes(backbone.config)
    return (0, 0) if experts is None else (experts.number, experts.per_token)


def _rows_of(decoded: Any, inputs: dict[str, Any], packed: PackedTree) -> Tensor:
    """Hidden states of own rows, [T, D]."""
    return cut_rows(_last_hidden(decoded, inputs)[0], packed.num_rows)


def _last_hidden(decoded: Any, inputs: dict[str, Any]) -> Tensor:
    """What the decoder gave first, hidden states [1, F, D], whether in a tuple or not."""
    hidden = decoded[0] if isinstance(decoded, tuple | ModelOutput) else decoded
    rows = inputs["input_ids"].shape[1]
    if not isinstance(hidden, Tensor) or hidden.ndim != 3 or tuple(hidden.shape[:2]) != (1, rows):
        got = list(hidden.shape) if isinstance(hidden, Tensor) else type(hidden).__name__
        raise ValueError(
            f"model: expected hidden states [1, {rows}, channels] of the decoder, got {got}; its hooks may change "
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
