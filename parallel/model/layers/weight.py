"""What a layer is made of: weights, and the layouts in which a CPU multiplies by them fastest.

Layers are plain objects, not `torch.nn.Module`s: for a pass of one row the hooks and attribute look-ups of a module
cost as much as its kernels (a fifth of a small model's pass). Knows no ranks and no models.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypedDict

import torch
import torch.nn.functional as F
from torch import Tensor

_FEW_ROWS = 2
_PACKABLE = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


class TensorOptions(TypedDict):
    """Where a layer's tensors are allocated, and of which type."""

    dtype: torch.dtype
    device: torch.device | str


def packs(device: torch.device | str, dtype: torch.dtype) -> bool:
    """Whether weights of this type on this device are packed."""
    return _PACKABLE and torch.device(device).type == "cpu" and dtype == torch.float32


class Layer:
    """Weights and how to apply them, for inference only."""

    def walk(self) -> Iterator[Layer]:
        """This layer and all layers within."""
        yield self
        for value in vars(self).values():
            for part in value if isinstance(value, list) else (value,):
                if isinstance(part, Layer):
                    yield from part.walk()

    def nbytes(self) -> int:
        """Bytes of all weights, shared ones counted once; constants do not count."""
        tensors = {id(value): value for part in self.walk() for value in vars(part).values()}
        return sum(value.nbytes for value in tensors.values() if isinstance(value, Tensor) and value.dim())


class Weight(Layer):
    """A matrix [outputs, inputs] to multiply rows by; `plain` holds it until it is packed, and is empty after.

    A pass of a few rows reads every weight once and does little with it, so the layout decides. In float32 on CPU the
    transposed matrix is best for one row or two and oneDNN's blocked layout, whose calls cost more, for any more: six
    rows then cost about what one does, where the plain layout takes twice as long. Both are kept.
    """

    def __init__(self, outputs: int, inputs: int, *, dtype: torch.dtype, device: torch.device | str) -> None:
        self.plain = torch.empty(outputs, inputs, dtype=dtype, device=device)
        self._columns = self.plain
        self._blocks: Tensor | None = None

    def pack(self, *, keep_plain: bool = False) -> None:
        """Change to the layouts that suit the device, if any do; call it after loading."""
        if not packs(self.plain.device, self.plain.dtype):
            return
        self._columns = self.plain.t().contiguous()
        self._blocks = torch.ops.mkldnn._reorder_linear_weight(self.plain, 64)
        if not keep_plain:
            self.plain = self.plain.new_empty(0)

    def multiply(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [T, inputs] -> [T, outputs]."""
        if self._blocks is None:
            return F.linear(x, self.plain, bias)
        if x.shape[0] > _FEW_ROWS:
            return torch.ops.mkldnn._linear_pointwise.default(x, self._blocks, bias, "none", [], "")
        return torch.mm(x, self._columns) if bias is None else torch.addmm(bias, x, self._columns)
