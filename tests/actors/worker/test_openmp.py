"""Threads with nothing to do give their core away, soon or at once, and the library that has them heeds it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
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


def test_the_number_of_threads_is_each_threads_own():
    """PyTorch gives a thread, at its first operation, the number that any thread has set last."""
    import torch

    seen: dict[int, int] = {}
    both_set = threading.Barrier(2)

    def rank(count: int) -> None:
        openmp.set_num_threads(count)
        both_set.wait(timeout=60)
        torch.ones(2).sum()
        seen[count] = torch.get_num_threads()

    ranks = [threading.Thread(target=rank, args=(count,)) for count in (2, 3)]
    for thread in ranks:
        thread.start()
    for thread in ranks:
        thread.join()
    assert seen == {2: 2, 3: 3}


_IN_AN_ACTOR = "import actors.worker.ray_actors, sys; actors.worker.ray_actors.RankWorker('target-0', share=1.0)"
_IN_A_PROGRAM = """
from cluster.config.compose import load_config
from cluster.runtime.backend import make_backend
make_backend(load_config(["cluster=inprocess"]), None, print).close()
"""


@pytest.mark.extended
@pytest.mark.parametrize(
    "code",
    [_IN_AN_ACTOR, pytest.param(_IN_A_PROGRAM, marks=pytest.mark.slow)],
    ids=["an actor", "an engine in a program of its own"],
)
def test_what_holds_ranks_settles_it_before_pytorch_loads(code, unset):
    """libgomp prints which settings it read; it reads them once."""
    environment = os.environ | {"OMP_DISPLAY_ENV": "verbose", "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert ended.returncode == 0, ended.stderr
    if "GOMP_SPINCOUNT" not in ended.stderr:
        pytest.skip("this PyTorch was built with another OpenMP")
    assert f"GOMP_SPINCOUNT = '{openmp.SPINS}'" in ended.stderr
