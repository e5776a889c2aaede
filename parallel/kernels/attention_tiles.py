"""The tiles of keys in which `triton_attention` reads a sequence, and how many of them are on their way at once.

The loop of `attend_items` reads slots, then the keys and values that lie there. The compiler pipelines both loads from
five stages on: with fewer it pipelines the slots alone, and each turn waits for its own keys (`cp.async.wait_group 0`;
seen in the PTX of Triton 3.6 and 3.7). Four tiles of keys and values then lie in shared memory, which smaller tiles
make up for. Imports no PyTorch, so that a test compiles the kernels for several GPUs without loading it.
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
            return KeyTiles(32 if row_bytes <= 512 else 16, 5)
        if item_bytes == 4:  # its queries lie in shared memory too
            return KeyTiles(16, 2 if row_bytes <= 512 else 1)
        return KeyTiles(32 if row_bytes <= 256 else 16, 5)


def num_warps(block_m: int, head_dim: int) -> int:
    """Warps of a program with BLOCK_M rows of queries."""
    return 8 if block_m * head_dim > 4096 else 4
