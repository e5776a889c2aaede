"""Processes that jobs start beside the engine, such as plain decoding by itself, begin with their libraries loaded."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable

import pytest

_PRELOADED = ["cluster.baseline", "actors.worker.factory", "actors.worker.target_rank"]
"""What plain decoding loads; a module that cannot be found from here costs the time that this saves."""


@pytest.fixture(autouse=True)
def forked_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new interpreter needs two seconds of CPU time to load PyTorch; `tests/cluster/test_baseline.py` starts one."""
    start: Callable[..., multiprocessing.context.BaseContext] = multiprocessing.get_context
    forking = start("forkserver")
    forking.set_forkserver_preload(_PRELOADED)
    monkeypatch.setattr(multiprocessing, "get_context", lambda kind=None: forking if kind == "spawn" else start(kind))
