"""How a Ray of an engine's own is settled, without starting it: its folder, its token, and what the guard ends."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[3]
WAIT_S = 60
SETTINGS = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_TMPDIR")


@pytest.fixture
def no_settings(monkeypatch):
    for name in SETTINGS:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.extended
@pytest.mark.parametrize("own", [{}, {"RAY_AUTH_MODE": "disabled"}, {"RAY_AUTH_TOKEN": "a" * 64}], ids=str)
def test_settings_are_the_users_or_new_and_are_put_back(own, no_settings, monkeypatch, tmp_path):
    from cluster.runtime.ray_local import LocalRay

    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    for name, value in own.items():
        monkeypatch.setenv(name, value)
    tokens = set()
    for _ in range(2):
        local = LocalRay()
        folder = Path(os.environ["RAY_TMPDIR"])
        assert folder.parent == tmp_path and folder.stat().st_mode & 0o777 == 0o700
        assert own.items() <= os.environ.items() and (local.token_file is None) is bool(own)
        if local.token_file is not None:
            assert os.environ["RAY_AUTH_MODE"] == "token"
            assert os.environ["RAY_AUTH_TOKEN_PATH"] == str(local.token_file)
            assert local.token_file.stat().st_mode & 0o777 == 0o600
            tokens.add(local.token_file.read_text())
        local.close()
        assert {name: os.environ[name] for name in SETTINGS if name in os.environ} == own | {
            "RAY_TMPDIR": str(tmp_path)
        }
        assert not list(tmp_path.iterdir())
    assert len(tokens) == (0 if own else 2), "a token for each cluster"


def test_a_folder_that_is_not_there_is_one_line(no_settings, monkeypatch, tmp_path):
    from cluster.runtime.ray_local import LocalRay

    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path / "missing"))
    with pytest.raises(ValueError, match=r"^cluster=local: Ray has no place for its files \(.*missing"):
        LocalRay()


def test_the_guard_outlives_an_interrupt_of_the_terminal(no_settings, monkeypatch, tmp_path):
    """Ctrl-C goes to every process of the owner's group; the guard, which cleans up behind it, is in none of these."""
    from cluster.runtime.ray_local import LocalRay

    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    local = LocalRay()
    try:
        assert os.getpgid(local._guard.pid) == local._guard.pid != os.getpgid(0)
    finally:
        local.close()


@pytest.mark.extended
def test_after_a_sigkill_of_the_owner_the_guard_ends_what_ray_left_and_deletes_its_files(tmp_path):
    """Two of three processes look like a worker and like an agent of Ray, which by itself would go on for a minute."""
    script = """
        import os, subprocess, time
        from cluster.runtime.ray_local import LocalRay

        LocalRay()
        folder = os.environ["RAY_TMPDIR"]
        worker = subprocess.Popen(["sleep", "100"], env={**os.environ, "RAY_RAYLET_PID": "1"})
        with open(folder + "/agent.log", "w") as log:
            agent = subprocess.Popen(["ray::Agent", "100"], executable="sleep", env={}, stderr=log)
            other = subprocess.Popen(["sleep", "100"], stderr=log)
        print(folder, worker.pid, agent.pid, other.pid, flush=True)
        time.sleep(100)
    """
    environment = {name: value for name, value in os.environ.items() if name not in SETTINGS}
    owner = subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)], cwd=ROOT, env=environment, stdout=-1)
    folder, *pids = owner.stdout.readline().split()
    worker, agent, other = (psutil.Process(int(pid)) for pid in pids)
    try:
        assert (Path(folder.decode()) / "ray-token").exists()
        owner.kill()
        worker.wait(WAIT_S)
        agent.wait(WAIT_S)
        deadline = time.monotonic() + WAIT_S
        while Path(folder.decode()).exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not Path(folder.decode()).exists() and other.is_running()
    finally:
        owner.stdout.close()
        other.kill()
        owner.wait()
