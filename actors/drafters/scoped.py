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
"""Memories that are kept: the one that was used longest ago is dropped for another."""


class Share(StrEnum):
    """Which clients share what a drafter remembers of ended requests: none, or all."""

    client = "client"
    all = "all"


class ScopedMemory(Generic[Memory]):
    """One memory for each scope, or, shared by `all`, one."""

    def __init__(self, make: Callable[[], Memory], share: Share) -> None:
        self._make = make
        self._share = share
        self._memories: dict[int, Memory] = {}  # that of the latest use last

    def of(self, scope: int) -> Memory:
        key = scope if self._share is Share.client else 0
        memory = self._memories.pop(key, None)
        if memory is None:
            memory = self._make()
            if len(self._memories) >= MOST_SCOPES:
                del self._memories[next(iter(self._memories))]
        self._memories[key] = memory
        return memory
