"""Swaps norms, MLPs and gated attention of an attached model for versions of one kernel each, in place and reversibly.

Shape suffixes: T rows, D channels, H query heads, G key heads.
"""

from typing import Any

from torch import Tensor, nn
from transformers.models.qwen3_5.modeling_qwen3_5 import (
    Qwen3_5Attention,
    Qwen3_5MLP,
    Qwen3_5RMSNorm,
    Qwen3_5RMSNormGated,
)

from harts.layout import PackedTree
from harts.models.attach import find_backbone
from harts.models.twins import swap, swap_back
from harts.ops import attention, fused
from harts.ops.kernels import Kernels

__all__ = ["fuse", "unfuse"]

_IMPL = "_harts_fused_impl"


class FusedRMSNorm(Qwen3_5RMSNorm):  # type: ignore[misc]
    """Stands in for a `Qwen3_5RMSNorm`, whose parameter it shares."""

    stands_for = Qwen3_5RMSNorm

    def forward(self, x: Tensor) -> Tensor:
        """Normalises the last dimension."""
        return fused.rms_norm(x, self.weight, eps=self.eps, zero_centred=True, impl=vars(self)[_IMPL])


class FusedRMSNormGated(Qwen3_5RMSNormGated):  # type: ignore[misc]
    """Stands in for a `Qwen3_5RMSNormGated`, whose parameter it shares."""

    stands_for = Qwen3_5RMSNormGated

    def forward(self, hidden_states: Tensor, gate: Tensor) -> Tensor:
        """Normalises the last dimension, then multiplies by silu(gate)."""
        eps = self.variance_epsilon
        return fused.gated_rms_norm(hidden_states, gate, self.weight, eps=eps, impl=vars(self)[_IMPL])


class FusedMLP(Qwen3_5MLP):  # type: ignore[misc]
    """Stands in for a `Qwen3_5MLP`, whose projections it shares."""

    stands_for = Qwen3_5MLP

    def forward(self, x: Tensor) -> Tensor:
        """The gated MLP of each row."""
        middle = fused.swiglu(self.gate_proj(x), self.up_proj(x), impl=vars(self)[_IMPL])
        return self.down_proj(middle)  # type: ignore[no-any-return]


class FusedAttention(Qwen3_5Attention):  # type: ignore[misc]
    """Stands in for a `Qwen3_5Attention`, whose submodules it shares; without `packed=` it is that module."""

    stands_for = Qwen3_5Attention

    def forward(
        self,
        hidden_states: Tensor,  # [1, T, D]
        position_embeddings: tuple[Tensor, Tensor],
        *args: Any,
        packed: PackedTree | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Runs on the rows of `packed`, heads of a row side by side throughout, so that nothing is transposed."""
        if packed is None:
            return super().forward(hidden_states, position_embeddings, *args, **kwargs)  # type: ignore[no-any-return]
        kernels: Kernels = kwargs["kernels"]
        impl = vars(self)[_IMPL]
        hidden_TD = hidden_states[0]
        cos_TR, sin_TR = (angle[0] for angle in position_embeddings)
        q_THD, gate_THD = self.q_proj(hidden_TD).unflatten(-1, (-1, 2 * self.head_dim)).chunk(2, -1)
        k_TGD = self.k_proj(hidden_TD).unflatten(-1, (-1, self.head_dim))
        out_THD = attention(
            fused.rotary(self.q_norm(q_THD), cos_TR, sin_TR, impl=impl),
            fused.rotary(self.k_norm(k_TGD), cos_TR, sin_TR, impl=impl),
            self.v_proj(hidden_TD).unflatten(-1, (-1, self.head_dim)),
            packed,
            scale=self.scaling,
            impl=kernels.attention,
            deterministic=kernels.deterministic,
        )
        gated_THD = fused.sigmoid_gate(out_THD, gate_THD, impl=impl)
        return self.o_proj(gated_THD.flatten(1)).unsqueeze(0), None


_TWINS = (FusedRMSNorm, FusedRMSNormGated, FusedMLP, FusedAttention)


def fuse(model: nn.Module, *, impl: str = "triton") -> nn.Module:
    """Makes a Qwen3.5 model's norms, gates, MLPs and rotary positions one kernel each; parameters keep their names.

    Results differ from the unfused model's by rounding: steps between which transformers rounds to bf16 are computed
    in fp32. Opt-in, after `attach`, and the same for any layout; the model runs on plain batches too.

    Args:
        model: a dense Qwen3.5 model that `attach` was called on, possibly wrapped by peft.
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
    if backbone.config.model_type != "qwen3_5_text" or backbone.config.hidden_act != "silu":
        raise ValueError(
            f"model: expected qwen3_5_text with hidden_act 'silu' to fuse, came {backbone.config.model_type} with "
            f"{backbone.config.hidden_act!r}; it runs unfused"
        )
    if impl == "triton":
        from harts.ops.requirements import require_triton

        require_triton("fuse", next(backbone.text.parameters()).device)
    elif impl != "reference":
        raise ValueError(f"fuse: impl={impl!r} is not available; expected one of 'reference', 'triton'")
    for twin in swap(backbone.text, {twin.stands_for: twin for twin in _TWINS}):
        vars(twin)[_IMPL] = impl
    return model


def unfuse(model: nn.Module) -> nn.Module:
    """Undoes `fuse`, as `detach` does too; parameters keep what training made of them. Returns the same model."""
    swap_back(find_backbone(model).text)
    return model
