"""How long a thread that waits for the next parallel region keeps its core: libgomp's own answer is milliseconds.

Two ranks on the same cores, or a neighbour on one of them, then wait for threads that do nothing: rounds took ten to
forty times as long. PyTorch reads these settings as it is loaded, so they must stand before. Standard library only.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

SETTINGS = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
SPINS = "5000"
"""A fraction of a millisecond: bridges the gaps within a pass, whose threads would otherwise be woken at every matrix
(half as slow again), and is over before a neighbour misses the core."""


def waiting(*, shared: bool) -> Mapping[str, str]:
    """Settings for a rank whose cores are `shared` with another one, or are its own; none where the user has chosen."""
    if in_effect():
        return {}
    return {"OMP_WAIT_POLICY": "PASSIVE"} if shared else {"GOMP_SPINCOUNT": SPINS}


def in_effect() -> dict[str, str]:
    """What this process was told, by the user or by us."""
    return {name: os.environ[name] for name in SETTINGS if name in os.environ}


def settle(*, shared: bool) -> None:
    """For this process; too late, and not done, once PyTorch is loaded."""
    if "torch" not in sys.modules:
        os.environ.update(waiting(shared=shared))


@contextmanager
def inherited(*, shared: bool) -> Iterator[None]:
    """For processes that are started meanwhile."""
    settings = waiting(shared=shared)
    os.environ.update(settings)
    try:
        yield
    finally:
        for name in settings:
            del os.environ[name]
