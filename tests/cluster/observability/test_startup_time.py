"""The stopwatch that was running before it was made."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from cluster.observability.startup_time import StartUp

ROOT = Path(__file__).parents[3]


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


def test_stretches_follow_each_other_from_the_beginning_of_the_process():
    watch = StartUp()
    watch.mark("imports")
    time.sleep(0.05)
    watch.mark("cluster")
    watch.mark("cluster")
    seconds = watch.seconds(first_token_s=2.0)
    assert list(seconds) == ["imports", "cluster", "first_token", "total"]
    assert 0.05 <= seconds["cluster"] < 5 and seconds["first_token"] == 2.0
    assert abs(seconds["total"] - 2.0 - (time.time() - psutil.Process().create_time())) < 1.0
    assert list(watch.seconds()) == ["imports", "cluster", "total"]
