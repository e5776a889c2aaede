"""Where Triton's kernels can run, how they are launched, and those of `triton_rows.py` as functions of tensors.

Triton compiles a kernel at its first launch and keeps it on disk. With TRITON_INTERPRET=1 in the environment, set
before Triton is imported, kernels run on a CPU, slowly: for tests. Knows no layers.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import threading
from functools import cache
from typing import Any

import torch
from torch import Tensor

from parallel.kernels.library import SWITCH

INTERPRETS = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether kernels run in Triton's interpreter, which takes tensors of any device."""
_interpreter = threading.Lock()  # it replaces functions of Triton's while a kernel runs; ranks may be threads
_LARGEST_BLOCK = 1024


@cache
def has_triton() -> bool:
    """Whether Triton is installed, can build its launchers, and is not switched off by SPECDEC_KERNELS=0."""
    if os.environ.get(SWITCH) == "0" or importlib.util.find_spec("triton") is None:
        return False
    return INTERPRETS or any(shutil.which(name) for name in (os.environ.get("CC"), "gcc", "cc", "clang") if name)


def runs_on(device: torch.device) -> bool:
    """Whether Triton's kernels take tensors of this device. On `meta` they compute nothing, as PyTorch's."""
    return has_triton() and (device.type in ("cuda", "meta") or INTERPRETS)


def launch(kernel: Any, grid: tuple[int, ...], *arguments: object, **options: Any) -> None:
    """Run a kernel on the current device; the first argument is a tensor."""
    first = arguments[0]
    assert isinstance(first, Tensor)
    if first.is_meta or 0 in grid:
        return
    if INTERPRETS:
        with _interpreter:
            kernel[grid](*arguments, **options)
    else:
        kernel[grid](*arguments, **options)


def block_size(size: int, least: int = 16) -> int:
    """The power of two that holds `size` elements."""
    return max(least, 1 << (size - 1).bit_length())


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, offset: float, added: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """x + added, if given, and its rows divided by their root mean square, times weight + offset (0 or 1)."""
    from parallel.kernels.triton_rows import normalize_rows

    assert offset in (0.0, 1.0)
    x, size = x.contiguous(), len(weight)
    out = torch.empty_like(x)
    total = x if added is None else torch.empty_like(x)
    block = block_size(size)
    launch(
        normalize_rows,
        (x.numel() // size,),
        x,
        x if added is None else added.contiguous(),
        weight,
        total,
        out,
        size,
        eps,
        ADDS=added is not None,
        PLUS_ONE=offset == 1.0,
        BLOCK=block,
        num_warps=min(16, max(4, block // 512)),
    )
    return total, out


def gated(x: Tensor) -> Tensor:
    """[T, 2 n] -> silu of the first half of a row times the second, [T, n]."""
    from parallel.kernels.triton_rows import gate_rows

    num_rows, size = x.shape[0], x.shape[1] // 2
    out = x.new_empty(num_rows, size)
    block = min(_LARGEST_BLOCK, block_size(size))
    launch(gate_rows, (num_rows, -(-size // block)), x.contiguous(), out, size, BLOCK=block)
    return out
