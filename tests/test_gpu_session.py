"""The program of the first GPU session (`docs/gpu/session.py`), small and on the CPU."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

FILE = Path(__file__).resolve().parents[1] / "docs" / "gpu" / "session.py"


@pytest.fixture(scope="module")
def session():
    spec = importlib.util.spec_from_file_location("gpu_session", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_step_measures_something_and_the_report_shows_it(session, tmp_path):
    """All but those that import every library, start an engine or run tests."""
    machine = session.Machine("cpu", tiny=True)
    steps = [name for name in session.STEPS if name not in ("environment", "kernels", "engine", "tests")]
    for name in steps:
        session.run_step(name, tmp_path, machine)
        record = json.loads((tmp_path / f"{name}.json").read_text())
        assert record["status"] == "done" and record["rows"], record
        assert all(row.get("equal", True) for row in record["rows"])
    session.write_report(tmp_path)
    report = (tmp_path / "session.md").read_text()
    assert [name for name in session.STEPS if f"## {name}\n" in report] == steps
    assert "| sequences | context | rows | attention | kind |" in report


def test_a_step_that_fails_is_named_and_the_others_go_on(session, tmp_path, monkeypatch):
    def broken(machine):
        yield {"rows": 1}
        raise RuntimeError("CUDA error: an illegal memory access\nmore")

    monkeypatch.setitem(session.STEPS, "gemm", (1, broken))
    session.run_step("gemm", tmp_path, None)
    record = json.loads((tmp_path / "gemm.json").read_text())
    assert record["status"] == "failed: RuntimeError: CUDA error: an illegal memory access" and record["rows"]


@pytest.mark.slow  # the steps as processes: each imports PyTorch
def test_a_session_goes_on_where_it_was_cut(session, tmp_path, monkeypatch, capfd):
    keys = ["--out", str(tmp_path), "--device", "cpu", "--tiny", "--steps", "first-shapes,engine"]
    for seconds, said in ((0, "first-shapes: no time left"), (170, "engine: done"), (170, "")):
        monkeypatch.setattr(sys, "argv", ["session.py", *keys, "--seconds", str(seconds)])
        assert session.main() == 0
        assert said in capfd.readouterr().out
    rows = json.loads((tmp_path / "engine.json").read_text())["rows"]
    assert all(row["tokens are plain's"] for row in rows)
