"""The stopwatch that was running before it was made."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from cluster.observability.startup_time import StartUp

ROOT = Path(__file__).parents[3]


@pytest.mark.extended
@pytest.mark.parametrize(
    ("modules", "heavy"),
    [
        ("cluster.engine, cluster.runtime.ray_backend, cluster.jobs.generate", {"torch", "transformers", "matplotlib"}),
        ("actors.worker.factory", {"ray", "transformers", "matplotlib"}),
    ],
    ids=["who starts ranks on Ray", "a rank"],
)
def test_no_process_loads_what_only_others_need(modules, heavy):
    probe = f"import sys, {modules}; print(*({heavy!r} & set(sys.modules)))"
    out = subprocess.run([sys.executable, "-c", probe], cwd=ROOT, capture_output=True, text=True, check=True)
    assert out.stdout.strip() == ""


def test_phases_follow_each_other_from_the_beginning_of_the_process(monkeypatch):
    now = [psutil.Process().create_time() + 3.0]
    monkeypatch.setattr("cluster.observability.startup_time.time", SimpleNamespace(time=lambda: now[0]))
    watch = StartUp()
    watch.mark("imports")
    now[0] += 0.5
    watch.mark("cluster")
    now[0] += 4.0
    watch.mark("cluster")
    seconds = watch.seconds(first_token_s=2.0)
    assert seconds == pytest.approx({"imports": 3.0, "cluster": 0.5, "first_token": 2.0, "total": 5.5})
    assert list(seconds) == ["imports", "cluster", "first_token", "total"]
    assert list(watch.seconds()) == ["imports", "cluster", "total"]
