"""Muon with its iteration in the precision that the device is fast in.

`torch.optim.Muon` orthogonalises in bfloat16 everywhere. On CPUs that oneDNN computes no bfloat16 on, PyTorch's own
loops then take 20 to 30 times as long as float32 (5.0 and 0.19 s for a matrix of 512 x 1536 on one core without
AVX-512), and steps of a small model are little else.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from parallel.training.precision import fast_dtype


def orthogonalised(matrix: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """Approximates `U V^T` of a matrix `U S V^T` in its own type, by quintic Newton-Schulz steps."""
    a, b, c = coefficients
    is_tall = matrix.shape[0] > matrix.shape[1]
    wide = matrix.T if is_tall else matrix
    wide = wide / wide.norm().clamp(min=eps)
    for _ in range(steps):
        gram = wide @ wide.T
        wide = torch.addmm(wide, torch.addmm(gram, gram, gram, beta=b, alpha=c), wide, beta=a)
    return wide.T if is_tall else wide


class Muon(torch.optim.Muon):
    """Muon, scaled to match the size of AdamW's updates; its state is that of `torch.optim.Muon`."""

    def __init__(self, matrices: list[torch.nn.Parameter], lr: float) -> None:
        super().__init__(matrices, lr=lr, adjust_lr_fn="match_rms_adamw")

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Move every matrix that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for matrix in group["params"]:
                if matrix.grad is not None:
                    self._move(matrix, matrix.grad, group)
        return loss

    def _move(self, matrix: torch.nn.Parameter, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[matrix]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        average = state["momentum_buffer"].lerp_(gradient, 1 - group["momentum"])
        update = gradient.lerp(average, group["momentum"]) if group["nesterov"] else average
        update = update.to(fast_dtype(matrix.device.type))
        update = orthogonalised(update, group["ns_coefficients"], group["ns_steps"], group["eps"])
        matrix.mul_(1 - group["lr"] * group["weight_decay"])
        matrix.add_(update, alpha=-group["lr"] * 0.2 * math.sqrt(max(matrix.shape)))
