"""Mixtures of experts on CPU, by the kernel in `experts.cpp`: rows choose their experts, are multiplied by those
experts' matrices, and the products are added up, all in one call. A row's results do not depend on the other rows of
the call. Knows no layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import Structure, addressof, c_int, c_int64, c_void_p
from functools import cache

import torch
from torch import Tensor

from parallel.kernels.activations import ORDER, Function
from parallel.kernels.products import Panels
from parallel.kernels.steps import Kernel, room


class _Expert(Structure):
    _fields_ = [(name, c_void_p) for name in ("gate_up", "gate_up_scales", "down", "down_scales")]


_NUMBERS = (
    *("num_experts", "first", "num_scores", "per_token", "hidden", "inner"),
    *("normalizes", "function", "is_fused", "gate_up_stored", "down_stored"),
)


class _Mixture(Structure):
    _fields_ = [("experts", c_void_p), *((name, c_int64) for name in _NUMBERS)]


@cache
def _mix() -> Kernel:
    return Kernel("mix_rows", *[c_void_p] * 4, c_int64, c_int, rows=4)


class Mixture:
    """The matrices of experts in panels: gates and what they weigh, [2 * inner, hidden] each, and `down` [hidden,
    inner]; they are those from `first` on of all that are scored."""

    def __init__(
        self,
        gate_up: Sequence[Panels],
        down: Sequence[Panels],
        function: Function,
        *,
        first: int,
        num_scores: int,
        per_token: int,
        normalizes: bool,
    ) -> None:
        self._panels = *gate_up, *down
        assert not any(one.fills_rows for one in self._panels), "rows are read as they are"
        pairs = zip(gate_up, down, strict=True)
        self._experts = (_Expert * len(gate_up))(*(_Expert(*one.at, *other.at) for one, other in pairs))
        self._record = _Mixture(
            addressof(self._experts),
            len(gate_up),
            first,
            num_scores,
            per_token,
            down[0].outputs,
            down[0].inputs,
            normalizes,
            ORDER.index(function),
            function == "silu" and gate_up[0].gates,
            gate_up[0].stored,
            down[0].stored,
        )

    def mix(self, x: Tensor, scores: Tensor) -> Tensor:
        """x [T, hidden], the router's scores [T, num_scores] of the same type -> what the chosen experts give, weighted
        by their probabilities, [T, hidden]."""
        x, scores = x.contiguous(), scores.contiguous()
        out = room(len(x), x.shape[1], x.dtype)
        addresses = addressof(self._record), x.data_ptr(), scores.data_ptr(), out.data_ptr()
        _mix()(*addresses, len(x), x.dtype == torch.bfloat16)
        return out
