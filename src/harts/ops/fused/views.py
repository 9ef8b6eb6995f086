"""How kernels see rows of a view: two strides, without a copy where two are enough."""

from dataclasses import dataclass

from torch import Tensor

__all__ = ["Rows"]


@dataclass(frozen=True)
class Rows:
    """Rows of a tensor [..., D]: row r lies at `(r // inner) * outer_stride + (r % inner) * inner_stride`.

    Attributes:
        tensor: the tensor, or a contiguous copy where it has more strides than these or strided channels.
        count: number of rows.
        inner, outer_stride, inner_stride: see above.
    """

    tensor: Tensor
    count: int
    inner: int
    outer_stride: int
    inner_stride: int

    @staticmethod
    def of(x_XD: Tensor) -> "Rows":
        """Reads the strides of a tensor."""
        count = x_XD.numel() // max(1, x_XD.shape[-1])
        dims = [(size, stride) for size, stride in zip(x_XD.shape, x_XD.stride(), strict=True) if size != 1]
        if x_XD.shape[-1] != 1:
            (_, last), dims = dims[-1], dims[:-1]
        else:
            last = 1
        merged: list[tuple[int, int]] = []
        for size, stride in dims:  # from the outermost in
            if merged and merged[-1][1] == size * stride:
                merged[-1] = (merged[-1][0] * size, stride)
            else:
                merged.append((size, stride))
        if last != 1 or len(merged) > 2:
            return Rows.of(x_XD.contiguous())
        merged = [(1, 0)] * (2 - len(merged)) + merged
        return Rows(x_XD, count, merged[1][0], merged[0][1], merged[1][1])

    @property
    def strides(self) -> tuple[int, int, int]:
        """What kernels take: inner, outer_stride, inner_stride."""
        return self.inner, self.outer_stride, self.inner_stride
