"""Swaps norms, MLPs, gated attention and experts of an attached model for fused ones, in place and reversibly.

The classes here go before a transformers class in the bases of what takes its place; `harts.models.qwen3_5` and its
like do so for each family.

Shape suffixes: T rows of the tree, F rows with the dummy ones of `harts.models.row_floor`, D channels, H query heads,
G key heads.
"""

from typing import Any

import torch
from torch import Tensor, nn

from harts.layout import PackedTree
from harts.mixers import Attention
from harts.models.attach import find_backbone
from harts.models.families import FAMILIES
from harts.models.pieces import context_of
from harts.models.row_floor import cut_rows, fill_rows
from harts.models.sharded import Sealed, compute_device, compute_dtype, unseal
from harts.models.twins import swap, swap_back
from harts.ops import fused
from harts.ops.requirements import has_triton

__all__ = [
    "FusedAttention",
    "FusedGatedNorm",
    "FusedMLP",
    "FusedNorm",
    "FusedZeroCentredNorm",
    "can_fuse",
    "fuse",
    "fused_impl",
    "unfuse",
]

_IMPL = "_harts_fused_impl"


def fused_impl(module: nn.Module) -> str:
    """The `impl=` that `fuse` was called with."""
    return vars(module)[_IMPL]  # type: ignore[no-any-return]


class FusedNorm(nn.Module):
    """RMSNorm that multiplies by its weight."""

    weight: Tensor
    variance_epsilon: float

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Normalises the last dimension."""
        return fused.rms_norm(hidden_states, self.weight, eps=self.variance_epsilon, impl=fused_impl(self))


class FusedZeroCentredNorm(nn.Module):
    """RMSNorm that multiplies by 1 + weight."""

    weight: Tensor
    eps: float

    def forward(self, x: Tensor) -> Tensor:
        """Normalises the last dimension."""
        return fused.rms_norm(x, self.weight, eps=self.eps, zero_centred=True, impl=fused_impl(self))


class FusedGatedNorm(nn.Module):
    """RMSNorm behind which the gate of linear attention comes."""

    weight: Tensor
    variance_epsilon: float

    def forward(self, hidden_states: Tensor, gate: Tensor) -> Tensor:
        """Normalises the last dimension, then multiplies by silu(gate)."""
        eps = self.variance_epsilon
        return fused.gated_rms_norm(hidden_states, gate, self.weight, eps=eps, impl=fused_impl(self))


class FusedMLP(nn.Module):
    """MLP gated by SiLU."""

    gate_proj: Any
    up_proj: Any
    down_proj: Any

    def forward(self, x: Tensor) -> Tensor:
        """The gated MLP of each row."""
        middle = fused.swiglu(self.gate_proj(x), self.up_proj(x), impl=fused_impl(self))
        return self.down_proj(middle)  # type: ignore[no-any-return]


class FusedAttention(nn.Module):
    """Attention with an output gate in q's projection; without `packed=` it is the original."""

    head_dim: int
    scaling: float
    q_proj: Any
    k_proj: Any
    v_proj: Any
    o_proj: Any
    q_norm: Any
    k_norm: Any

    def forward(
        self,
        hidden_states: Tensor,  # [1, F, D]
        position_embeddings: tuple[Tensor, Tensor],
        *args: Any,
        packed: PackedTree | Sealed[PackedTree] | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Runs on the rows of `packed`, heads of a row side by side throughout, so that nothing is transposed."""
        packed = unseal(packed)
        if packed is None:
            return super().forward(hidden_states, position_embeddings, *args, **kwargs)  # type: ignore[misc, no-any-return]
        impl = fused_impl(self)
        rows, hidden_FD = packed.num_rows, hidden_states[0]
        cos_FR, sin_FR = (angle[0] for angle in position_embeddings)
        q_FHD, gate_FHD = self.q_proj(hidden_FD).unflatten(-1, (-1, 2 * self.head_dim)).chunk(2, -1)
        k_FGD = self.k_proj(hidden_FD).unflatten(-1, (-1, self.head_dim))
        out_THD = Attention(scale=self.scaling).forward(
            packed,
            kwargs["kernels"],
            context_of(self, kwargs.get("contexts")),
            cut_rows(fused.rotary(self.q_norm(q_FHD), cos_FR, sin_FR, impl=impl), rows),
            cut_rows(fused.rotary(self.k_norm(k_FGD), cos_FR, sin_FR, impl=impl), rows),
            cut_rows(self.v_proj(hidden_FD).unflatten(-1, (-1, self.head_dim)), rows),
        )
        gated_FHD = fused.sigmoid_gate(fill_rows(out_THD, len(hidden_FD)), gate_FHD, impl=impl)
        return self.o_proj(gated_FHD.flatten(1)).unsqueeze(0), None


def fuse(model: nn.Module, *, impl: str = "triton") -> nn.Module:
    """Makes a model's norms, gates, MLPs, rotary positions and experts few kernels each; parameters keep their names.

    Results differ from the unfused model's by rounding: steps between which transformers rounds to bf16 are computed
    in fp32. Opt-in, after `attach`, and the same for any layout; the model runs on plain batches too.

    Args:
        model: a model of the Qwen3.5, Qwen3.5-MoE, Qwen3-Next or Qwen3-MoE family that `attach` was called on, possibly
            wrapped by peft.
        impl: `"triton"`: for a model on CUDA; `"reference"`: plain PyTorch with transformers' roundings.

    Returns:
        The same model.

    Raises:
        ValueError: the model is not attached, of another family, or has an activation other than SiLU.
        ImportError: `"triton"` without Triton.
    """
    backbone = find_backbone(model)
    if not backbone.attached:
        raise ValueError("model: not attached; call harts.attach(model) before fusing it")
    classes = backbone.family.fused_classes()
    if not classes or backbone.config.hidden_act != "silu":
        known = ", ".join(name for name, family in FAMILIES.items() if family.fused)
        raise ValueError(
            f"model: expected one of {known} with hidden_act 'silu' to fuse, got {backbone.config.model_type} with "
            f"{backbone.config.hidden_act!r}; it runs unfused"
        )
    if impl == "triton":
        from harts.ops.requirements import require_triton

        require_triton("fuse", compute_device(model))
    elif impl != "reference":
        raise ValueError(f"fuse: impl={impl!r} is not available; expected one of 'reference', 'triton'")
    for twin in swap(backbone.text, classes):
        vars(twin)[_IMPL] = impl
    return model


def can_fuse(model: nn.Module, *, dtype: torch.dtype | None = None) -> bool:
    """Whether `fuse` takes an attached model: its family and activation, in bf16 on a CUDA GPU.

    Args:
        model: attached.
        dtype: that it will compute in; None: as it is now.
    """
    backbone = find_backbone(model)
    known = bool(backbone.family.fused_classes()) and backbone.config.hidden_act == "silu"
    return (
        known
        and compute_device(model).type == "cuda"
        and (dtype or compute_dtype(model)) == torch.bfloat16
        and has_triton()
    )


def unfuse(model: nn.Module) -> nn.Module:
    """Undoes `fuse`, as `detach` does too; parameters keep what training made of them. Returns the same model."""
    swap_back(find_backbone(model).text)
    return model
