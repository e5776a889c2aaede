"""Multiplying by a weight, and the layout in which a CPU does it fastest.

A pass of a few rows reads every weight once and does little with it. In float32 on CPU oneDNN's blocked layout makes
such a product about as cheap for eight rows as for one, and gives a row the same bits whatever rows stand beside it;
torch's default is slower by half for one row and more than twice for six. Elsewhere weights stay as they are.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_MIN_ROWS = 4
"""Fewer rows than these leave the multipliers waiting for each other: padding a product up to them makes it faster."""
_PACKABLE = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def packs(device: torch.device | str, dtype: torch.dtype) -> bool:
    """Whether weights of this type on this device are packed."""
    return _PACKABLE and torch.device(device).type == "cpu" and dtype == torch.float32


def packed(weight: nn.Parameter) -> nn.Parameter:
    """weight [outputs, inputs], in the blocked layout where that is for its type and device, else as it is."""
    if not packs(weight.device, weight.dtype):
        return weight
    return nn.Parameter(torch.ops.mkldnn._reorder_linear_weight(weight, 64), requires_grad=False)


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [T, inputs] -> [T, outputs] with a weight that may be packed."""
    if not weight.is_mkldnn:
        return F.linear(x, weight, bias)
    num_rows = x.shape[0]
    if num_rows >= _MIN_ROWS:
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    padded = x.expand(_MIN_ROWS, -1) if num_rows == 1 else F.pad(x, (0, 0, 0, _MIN_ROWS - num_rows))
    return torch.ops.mkldnn._linear_pointwise(padded, weight, bias, "none", [], "")[:num_rows]
