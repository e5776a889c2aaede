"""What tests of engines in this process share."""

from __future__ import annotations

import threading

import pytest


@pytest.fixture
def no_thread_is_left():
    """Fails the test whose engine leaves a thread behind."""
    before = set(threading.enumerate())
    yield
    left = [thread.name for thread in threading.enumerate() if thread not in before]
    assert not left, f"threads left behind: {left}"
