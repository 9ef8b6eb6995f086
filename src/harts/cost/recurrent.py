"""The recurrent mixers that a transformers config names, under the names of its many families."""

from dataclasses import dataclass
from typing import Any

from harts.cost.experts import Reader

__all__ = ["Mamba2Sizes", "mamba2_sizes"]

_HEADS = ("mamba_n_heads", "mamba_num_heads", "n_mamba_heads")
_HEAD_SIZE = ("mamba_d_head", "mamba_head_dim", "mamba_headdim")
_GROUPS = ("mamba_n_groups", "n_groups", "mamba_ngroups")
_STATE_SIZE = ("mamba_d_state", "ssm_state_size")
_TAPS = ("mamba_d_conv", "conv_kernel")


@dataclass(frozen=True, kw_only=True)
class Mamba2Sizes:
    """The Mamba2 layers of a model.

    Attributes:
        heads, head_size: of x.
        groups, state_size: of B and C; a group serves heads / groups consecutive heads.
        taps: of the short convolution over x, B and C.
    """

    heads: int
    head_size: int
    groups: int
    state_size: int
    taps: int

    @property
    def inner(self) -> int:
        """Channels of x, and of the gate."""
        return self.heads * self.head_size

    @property
    def channels(self) -> int:
        """Channels of x, B and C together."""
        return self.inner + 2 * self.groups * self.state_size


def mamba2_sizes(config: Any) -> Mamba2Sizes | None:
    """Reads them; None for a model without.

    Raises:
        ValueError: a size is missing, or the heads are no multiple of the groups.
    """
    reader = config if isinstance(config, Reader) else Reader(config)
    if reader.first(_HEADS, None) is None:
        return None
    found = {
        "heads": _need(reader, _HEADS),
        "head_size": _need(reader, _HEAD_SIZE),
        "groups": _need(reader, _GROUPS),
        "state_size": _need(reader, _STATE_SIZE),
        "taps": _need(reader, _TAPS),
    }
    if found["heads"] % found["groups"]:
        raise ValueError(
            f"config, field {_name(reader, _HEADS)}: expected a multiple of {_name(reader, _GROUPS)} = "
            f"{found['groups']}, got {found['heads']}"
        )
    return Mamba2Sizes(**found)


def _need(reader: Reader, names: tuple[str, ...]) -> int:
    return reader.need(_name(reader, names))


def _name(reader: Reader, names: tuple[str, ...]) -> str:
    """The one of several fields that is there."""
    return next((name for name in names if reader.get(name, None) is not None), names[0])
