"""Memory for what every pass reads, in pages of 2 MiB where the system has them.

A pass reads all weights, and with pages of 4 KiB the processor looks up an address for every 4 KiB of them. A matrix is
often smaller than a large page, so matrices share blocks. Knows no matrices.
"""

from __future__ import annotations

import mmap
import threading

import torch
from torch import Tensor

PAGE = 2 << 20
_BLOCK = 32 * PAGE
"""Bytes of a block that is shared; what is not written yet takes no memory."""
_LINE = 64
_LOCK = threading.Lock()  # ranks may be threads of one process
_rest = torch.empty(0, dtype=torch.uint8)
"""What is left of the last block that is shared."""


def empty(size: int, dtype: torch.dtype) -> Tensor:
    """A tensor [size] on the CPU, zero, at the start of a cache line."""
    global _rest  # noqa: PLW0603
    num_bytes = size * dtype.itemsize
    taken = -(-num_bytes // _LINE) * _LINE
    if taken >= _BLOCK // 8:
        return _block(taken)[:num_bytes].view(dtype)
    with _LOCK:
        if taken > len(_rest):
            _rest = _block(_BLOCK)
        given, _rest = _rest[:num_bytes], _rest[taken:]
    return given.view(dtype)


def _block(size: int) -> Tensor:
    """uint8 [size] at the start of a large page."""
    memory = mmap.mmap(-1, size + PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    block = torch.frombuffer(memory, dtype=torch.uint8)
    start = -block.data_ptr() % PAGE
    return block[start : start + size]
