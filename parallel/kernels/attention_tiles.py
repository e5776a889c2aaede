"""The tiles of keys in which `triton_attention` reads a sequence, and how many of them are on their way at once.

Measured on an H100 over one layer: 64 keys and three stages are the fastest where a sequence is
long or there are many, and four warps nearly everywhere. From five stages on the compiler has the keys of several turns
on their way, not their slots alone, but the memory that takes leaves room for fewer programs, whose turns overlap as
well. That is kept where shared memory is scarce, and was not measured there.

Imports no PyTorch, so that a test compiles the kernels for several GPUs without loading it.
"""

from __future__ import annotations

from dataclasses import dataclass

_LARGE_SHARED = 160 << 10
"""Bytes of shared memory that a program may have on A100 (163 KiB) and H100 (227 KiB); 99 KiB on Ada."""


@dataclass(frozen=True, slots=True)
class KeyTiles:
    """`block_n` keys in a tile, as BLOCK_N, and `num_stages` as an option of the launch."""

    block_n: int
    num_stages: int

    @staticmethod
    def choose(head_dim: int, item_bytes: int, shared_bytes: int) -> KeyTiles:
        """`head_dim` is a power of two, `item_bytes` the size of the type in which keys are multiplied."""
        row_bytes = head_dim * item_bytes
        if shared_bytes >= _LARGE_SHARED:
            return KeyTiles(64 if row_bytes <= 256 else 32 if row_bytes <= 512 else 16, 3)
        if item_bytes == 4:  # its queries lie in shared memory too
            return KeyTiles(16, 2 if row_bytes <= 512 else 1)
        return KeyTiles(32 if row_bytes <= 256 else 16, 5)


def num_warps(block_m: int, head_dim: int) -> int:
    """Warps of a program with BLOCK_M rows of queries."""
    return 8 if block_m * head_dim > 8192 else 4
