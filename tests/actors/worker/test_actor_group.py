"""What the handles of an engine's Ray actors do while there are none; `test_ray_backend.py` has them at work."""

from __future__ import annotations

import time

import pytest

pytest.importorskip("ray")

from actors.worker.actor_group import ActorGroup


def test_without_actors_deaths_are_awaited_as_long_as_with_some():
    started = time.monotonic()
    assert ActorGroup().deaths(0.1) == []
    assert time.monotonic() - started >= 0.1
