"""What a drafter remembers of ended requests, kept apart for every client and `cache_salt`.

A draft shows in the acceptance of the one who asked, so a memory that clients share tells each of them what others
have read. Knows neither clients nor tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import Generic, TypeVar

Memory = TypeVar("Memory")

MOST_SCOPES = 8
"""Full memories that are kept, or more that are as large together: those that were used longest ago are dropped."""


class Share(StrEnum):
    """Which clients share what a drafter remembers of ended requests: none, or all."""

    client = "client"
    all = "all"


class ScopedMemory(Generic[Memory]):
    """One memory for each scope, or, shared by `all`, one. `size` is that of a memory, `full` that of a full one;
    without them all are equally large."""

    def __init__(
        self, make: Callable[[], Memory], share: Share, size: Callable[[Memory], int] = lambda _: 1, full: int = 1
    ) -> None:
        self._make = make
        self._share = share
        self._size = size
        self._most = MOST_SCOPES * full
        self._memories: dict[int, Memory] = {}  # that of the latest use last
        self._sizes: dict[int, int] = {}
        self._total = 0

    def of(self, scope: int) -> Memory:
        """What is added to it counts from the next call on."""
        key = scope if self._share is Share.client else 0
        if self._memories:
            self._measure(next(reversed(self._memories)))
        memory = self._memories.pop(key, None)
        self._memories[key] = memory = self._make() if memory is None else memory
        self._measure(key)
        while self._total > self._most and len(self._memories) > 1:
            oldest = next(iter(self._memories))
            del self._memories[oldest]
            self._total -= self._sizes.pop(oldest)
        return memory

    def _measure(self, key: int) -> None:
        size = max(1, self._size(self._memories[key]))
        self._total += size - self._sizes.get(key, 0)
        self._sizes[key] = size
