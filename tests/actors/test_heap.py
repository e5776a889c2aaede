"""What the garbage collector looks through in a process of the engine."""

from __future__ import annotations

import gc
from types import SimpleNamespace

import pytest

from actors import heap
from actors.coordinator.service import CoordinatorService
from actors.worker import factory


@pytest.fixture
def first_use():
    heap.freeze_libraries.cache_clear()
    yield
    heap.freeze_libraries.cache_clear()


@pytest.mark.usefixtures("first_use")
def test_what_was_imported_is_left_out_once():
    """What a closed engine has left behind can be collected, whatever starts in the process later."""
    heap.freeze_libraries()
    frozen, of_an_engine = gc.get_freeze_count(), [[] for _ in range(100)]
    assert frozen > 10_000
    heap.freeze_libraries()
    assert gc.get_freeze_count() <= frozen and of_an_engine


@pytest.mark.parametrize(
    ("module", "begin"), [("worker.factory", factory.serve), ("coordinator.service", CoordinatorService.run)]
)
def test_ranks_and_coordinators_begin_with_it(monkeypatch, module, begin):
    def began() -> None:
        raise InterruptedError

    monkeypatch.setattr(f"actors.{module}.freeze_libraries", began)
    with pytest.raises(InterruptedError):
        begin(SimpleNamespace())
