"""What tests of engines in this process share."""

from __future__ import annotations

import threading
import time

import pytest

from actors.roles.bridge import MEETING_S

GRACE_S = MEETING_S + 5.0
"""Seconds in which a thread that was meeting a peer ends: no other meeting takes longer, and none is cut short."""


@pytest.fixture
def no_thread_is_left():
    """Fails the test whose engine leaves a thread behind."""
    before = set(threading.enumerate())
    yield
    deadline = time.monotonic() + GRACE_S
    for thread in set(threading.enumerate()) - before:
        thread.join(max(0.0, deadline - time.monotonic()))
    left = [thread.name for thread in threading.enumerate() if thread not in before]
    assert not left, f"threads left behind: {left}"
