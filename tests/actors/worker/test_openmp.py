"""Threads with nothing to do give their core away, soon or at once, and the library that has them heeds it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from actors.worker import openmp

pytest.importorskip("ray")
ROOT = Path(openmp.__file__).parents[2]


@pytest.fixture
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in openmp.SETTINGS:
        monkeypatch.delenv(name, raising=False)


def test_shared_cores_are_given_up_at_once_and_the_users_choice_stands(unset, monkeypatch):
    with openmp.configured_children(shared=True):
        assert openmp.in_effect() == {"OMP_WAIT_POLICY": "PASSIVE"}
    with openmp.configured_children(shared=False):
        assert openmp.in_effect() == {"GOMP_SPINCOUNT": openmp.SPINS}
    assert not openmp.in_effect()
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    with openmp.configured_children(shared=True):
        assert openmp.in_effect() == {"OMP_WAIT_POLICY": "ACTIVE"}
    assert openmp.in_effect() == {"OMP_WAIT_POLICY": "ACTIVE"}


def test_too_late_is_not_done(unset):
    import torch  # noqa: F401

    openmp.configure_threads(shared=True)
    assert not openmp.in_effect(), "a fact that is reported has an effect"


def test_a_rank_settles_it_before_pytorch_loads(unset):
    """libgomp prints which settings it read; it reads them once."""
    code = "import actors.worker.ray_actors, sys; actors.worker.ray_actors.RankWorker('target-0', share=1.0)"
    environment = os.environ | {"OMP_DISPLAY_ENV": "verbose", "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert ended.returncode == 0, ended.stderr
    if "GOMP_SPINCOUNT" not in ended.stderr:
        pytest.skip("this PyTorch was built with another OpenMP")
    assert f"GOMP_SPINCOUNT = '{openmp.SPINS}'" in ended.stderr
