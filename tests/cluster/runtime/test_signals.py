"""A polite end reaches the launch also while Ray runs, whose own handler would end the process on the spot."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytestmark = pytest.mark.ray

ROOT = Path(__file__).parents[3]


def test_ray_leaves_sigterm_to_the_launch():
    script = """
        import os, signal, sys
        from cluster.runtime.ray_backend import RayBackend
        from tests.cluster.placement.test_nodes import CONFIG
        from dataclasses import replace

        def end(number, frame):
            raise KeyboardInterrupt

        signal.signal(signal.SIGTERM, end)
        backend = RayBackend(replace(CONFIG, cluster=replace(CONFIG.cluster, dashboard=False, num_cpus=1)))
        backend.connect()
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            signal.pause()
        except KeyboardInterrupt:
            print("terminated")
        finally:
            __import__("ray").shutdown()
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (result.returncode, result.stdout.strip()) == (0, "terminated"), result.stderr[-2000:]
