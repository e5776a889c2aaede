"""Memory for what every pass reads, in pages of 2 MiB where the system has them.

A pass reads all weights, and with pages of 4 KiB the processor looks up an address for every 4 KiB of them. A matrix is
often smaller than a large page, so matrices share blocks. Knows no matrices.
"""

from __future__ import annotations

import mmap
import threading
from contextlib import suppress

import torch
from torch import Tensor

PAGE = 2 << 20
_BLOCK = 32 * PAGE
"""Bytes of a block that matrices share; what is not written yet takes no memory."""
_LINE = 64


class _Block:
    """Bytes from the start of a large page on, given out one after the other."""

    def __init__(self, size: int) -> None:
        self._memory = mmap.mmap(-1, size + PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):  # a system may have been built without them
                self._memory.madvise(mmap.MADV_HUGEPAGE)
        self._start = -torch.frombuffer(self._memory, dtype=torch.uint8, count=1).data_ptr() % PAGE
        self._left = size

    def take(self, size: int, dtype: torch.dtype) -> Tensor | None:
        """A tensor [size], which keeps the block; None if it has no room for it."""
        taken = -(-size * dtype.itemsize // _LINE) * _LINE
        if taken > self._left:
            return None
        given = torch.frombuffer(self._memory, dtype=dtype, count=size, offset=self._start)
        self._start, self._left = self._start + taken, self._left - taken
        return given


class _Shared(threading.local):
    block: _Block | None = None


_shared = _Shared()
"""Ranks may be threads of one process."""


def empty(size: int, dtype: torch.dtype) -> Tensor:
    """A tensor [size] on the CPU, zero, at the start of a cache line."""
    if not size:
        return torch.empty(0, dtype=dtype)
    if size * dtype.itemsize > _BLOCK // 8:
        block = _Block(-(-size * dtype.itemsize // _LINE) * _LINE)
    else:
        block = _shared.block
        if block is not None and (given := block.take(size, dtype)) is not None:
            return given
        block = _shared.block = _Block(_BLOCK)
    given = block.take(size, dtype)
    assert given is not None
    return given
