"""Falcon-H1's Mamba2 mixer on a tree; attention beside it runs through transformers' interface.

Shape suffixes: F rows, D channels, P channels of the input projection.
"""

from typing import Any

from torch import Tensor
from torch.nn.functional import silu
from transformers.models.falcon_h1.modeling_falcon_h1 import FalconH1Mixer

from harts.models.mamba2 import TreeMamba2

__all__ = ["TreeMamba2Mixer"]


class TreeMamba2Mixer(TreeMamba2, FalconH1Mixer):  # type: ignore[misc]
    """Stands in for a `FalconH1Mixer`."""

    def project(self, hidden_FD: Tensor) -> Tensor:
        """See `TreeMamba2.project`; with the multipliers of maximal update parametrisation."""
        mixer: Any = self
        return mixer.in_proj(hidden_FD * mixer.ssm_in_multiplier) * mixer.mup_vector[0]  # type: ignore[no-any-return]

    def gated_norm(self, out_1FD: Tensor, gate_1FD: Tensor) -> Tensor:
        """See `TreeMamba2.gated_norm`; a gate alone where the config asks for no norm."""
        mixer: Any = self
        return super().gated_norm(out_1FD, gate_1FD) if mixer.mamba_rms_norm else out_1FD * silu(gate_1FD)
