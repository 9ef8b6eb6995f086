"""Tree ops: each equals the ordinary op on every trajectory, unpacked, in outputs and all gradients.

Every op takes its tensors over the T rows of a `PackedTree`, the `PackedTree` itself, and `impl=`, which names one of
its implementations. Nothing falls back in silence: an unsupported case raises and names the valid values.
"""

from harts.ops.attention import attention
from harts.ops.causal_conv1d import causal_conv1d
from harts.ops.gated_delta_rule import gated_delta_rule
from harts.ops.linear_attention import linear_attention
from harts.ops.logprobs import row_logprobs

__all__ = ["attention", "causal_conv1d", "gated_delta_rule", "linear_attention", "row_logprobs"]
