"""The OpenMP threads of a rank: how many compute, and how long an idle one spins before it gives up its core.

libgomp's default is milliseconds. While threads spin, another rank on the same cores waits for threads that compute
nothing: rounds took 10 to 40 times as long. libgomp reads these settings once, when PyTorch loads it, and the kernels'
own threads read them too (`parallel/kernels/team.cpp`); of ranks that are threads of one process both let none spin for
long once their threads outnumber the cores. Loads PyTorch only to set the number of threads.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

SETTINGS = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
SPINS = "5000"
"""A fraction of a millisecond: long enough for the gaps within a pass, whose threads would otherwise be woken for every
matrix (1.5 times as slow), and short beside a scheduler's time slice."""


_own: dict[str, str] = {}
"""What `configure_threads` has put into the environment."""


def settings_for(*, shared: bool) -> Mapping[str, str]:
    """Environment of a rank, whose cores may be `shared` with another one; nothing where the user has chosen."""
    if in_effect():
        return {}
    return {"OMP_WAIT_POLICY": "PASSIVE"} if shared else {"GOMP_SPINCOUNT": SPINS}


def in_effect() -> dict[str, str]:
    """The settings in the environment of this process."""
    return {name: os.environ[name] for name in SETTINGS if name in os.environ}


def configure_threads(*, shared: bool) -> None:
    """Configure this process; not done once PyTorch is loaded, since it would have no effect."""
    if "torch" not in sys.modules:
        _own.update(settings_for(shared=shared))
        os.environ.update(_own)


@contextmanager
def configured_children(*, shared: bool) -> Iterator[None]:
    """Sets the environment variables of OpenMP for processes that are started inside the block."""
    settings = settings_for(shared=shared)
    os.environ.update(settings)
    try:
        yield
    finally:
        for name in settings:
            del os.environ[name]


@contextmanager
def unconfigured_children() -> Iterator[None]:
    """Removes the variables of `configured_children`, so that processes started inside the block choose their own."""
    for name in _own:
        del os.environ[name]
    try:
        yield
    finally:
        os.environ.update(_own)


def set_num_threads(count: int) -> None:
    """Compute with so many threads in the calling thread, whatever other threads of this process choose.

    The first call into PyTorch's pool from a thread adopts the number that any thread has set last, which would replace
    this one; a question beforehand is that first call.
    """
    import torch

    torch.get_num_threads()
    torch.set_num_threads(count)
