"""The sequences' tables of slots, mirrored in one int32 tensor on the pool's device; a plan sends what is new.

A sequence has a region of the tensor, of a power of two entries; when it outgrows it, it gets another. Regions are
handed out in turn from one half of the tensor, then from the other, where every sequence is sent anew: a plan that was
made ahead keeps its regions until its pass has run, and the tensor keeps its address, which captured passes hold.
Knows no rows but their slots.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from parallel.kv.pool import KVPool, SeqId

_SMALLEST = 4
_HALVES = 2 * 2 * _SMALLEST
"""Entries for each slot, both halves together."""
BYTES_PER_SLOT = 4 * _HALVES


TableOrPart = tuple[SeqId, np.ndarray | None]
"""A sequence, and the slots that a pass reads in place of its whole table."""


class SlotMirror:
    """`tables` is the tensor. Half of it holds all regions at once: a region is at most _SMALLEST times its rows, and a
    slot is a row of one sequence and, if that lends it, of another."""

    def __init__(self, pool: KVPool) -> None:
        self._pool = pool
        self._half = _HALVES // 2 * (pool.num_slots + 1)
        self._next, self._end = 0, self._half
        self._regions: dict[tuple[SeqId, bool], range] = {}
        self.tables = torch.zeros(2 * self._half, dtype=torch.int32, device=pool.keys.device)

    def update(self, tables: Sequence[TableOrPart]) -> tuple[list[int], np.ndarray, np.ndarray]:
        """Where each table starts, and what is to be written first: indices, int64, and slots, int32."""
        starts, indices, slots = list[int](), list[np.ndarray](), list[np.ndarray]()
        for seq_id, part in tables:
            key, rows, changed = (seq_id, part is None), part, 0
            if rows is None:
                rows, changed = self._pool.slots(seq_id), self._pool.take_first_changed(seq_id)
            region = self._regions.get(key)
            if region is None or len(region) < len(rows):
                region, changed = self._allocate(key, len(rows)), 0
            starts.append(region.start)
            indices.append(np.arange(region.start + changed, region.start + len(rows)))
            slots.append(rows[changed:])
        return starts, np.concatenate(indices), np.concatenate(slots).astype(np.int32)

    def _allocate(self, key: tuple[SeqId, bool], num_rows: int) -> range:
        size = max(_SMALLEST, 1 << (num_rows - 1).bit_length())
        if self._next + size > self._end:
            self._next = self._half if self._end == self._half else 0
            self._end = self._next + self._half
            self._regions.clear()
        region = self._regions[key] = range(self._next, self._next + size)
        self._next = region.stop
        return region
