"""The program of the first GPU session (`docs/gpu/session.py`), small and on the CPU."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from parallel.kernels.attention import has_attention

FILE = Path(__file__).resolve().parents[1] / "docs" / "gpu" / "session.py"


@pytest.fixture(scope="module")
def session():
    spec = importlib.util.spec_from_file_location("gpu_session", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


LEFT_OUT = ("kernels", "engine", "certify", "tests-kernels", "tests-parallel", "tests-actors")
"""Steps that import every library, start an engine or run tests."""


@pytest.mark.extended
@pytest.mark.parametrize(
    "left_out", [(*LEFT_OUT, "gemm", "packed"), pytest.param(LEFT_OUT, marks=pytest.mark.slow)], ids=len
)
def test_every_step_measures_something_and_the_report_shows_it(session, tmp_path, left_out):
    """By default without the products of codes, which take the interpreter longest."""
    machine = session.Machine("cpu", tiny=True)
    steps = [name for name in session.STEPS if name not in left_out]
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


@pytest.mark.extended
def test_a_wrong_kernel_is_named(session, tmp_path, monkeypatch):
    """The control: one row of attention is taken for another."""
    kernels = session.session_kernels
    run = kernels.AttentionPass.run
    monkeypatch.setattr(kernels.AttentionPass, "run", lambda one: run(one).roll(1, 0))
    session.run_step("exact", tmp_path, session.Machine("cpu", tiny=True))
    record = json.loads((tmp_path / "exact.json").read_text())
    assert record["status"].startswith(
        "failed: ArithmeticError: 4 of the kernels are wrong: attention 2 x 40, tree of 5"
    )
    assert [row["right"] for row in record["rows"] if row["kernel"] == "attention"] == [False] * 4


def test_bits_that_move_are_named(session, tmp_path, monkeypatch):
    """The control: of what is read in a tree one number is a little larger."""
    reader = session.session_bits.Reader
    in_a_tree = reader.in_a_tree

    def moved(one):
        *found, last = in_a_tree(one)
        last[0, 3] += 1e-6
        return [*found, last]

    monkeypatch.setattr(reader, "in_a_tree", moved)
    session.run_step("same-bits", tmp_path, session.Machine("cpu", tiny=True))
    record = json.loads((tmp_path / "same-bits.json").read_text())
    if not has_attention():
        assert record["status"].startswith("failed: ValueError: numerics=invariant")
        return
    assert record["status"] == "failed: ArithmeticError: bits move with company: invariant"
    assert [row["moved"] for row in record["rows"] if row["numerics"] == "invariant"] == [0, 0, 1, 0, 0]


@pytest.mark.slow  # an engine as a process
def test_the_certificate_of_an_invariant_target_is_a_step(session, tmp_path):
    session.run_step("certify", tmp_path, session.Machine("cpu", tiny=True))
    record = json.loads((tmp_path / "certify.json").read_text())
    assert (record["status"] == "done") == has_attention(), record
    assert all(row["passed"] for row in record["rows"])


def test_the_step_of_tests_fails_as_pytest_does(session, tmp_path, monkeypatch):
    machine = session.Machine("cpu", tiny=True)
    for code, status in ((0, "done"), (5, "done"), (1, "failed: RuntimeError: pytest ended with 1: 1 failed")):
        done = SimpleNamespace(stdout="FAILED a\n1 failed\n", stderr="", returncode=code)
        monkeypatch.setattr(session.subprocess, "run", lambda *_, done=done, **__: done)
        session.run_step("tests-actors", tmp_path, machine)
        assert json.loads((tmp_path / "tests-actors.json").read_text())["status"] == status


def test_what_a_machine_lacks_is_said_before_the_first_step(session, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(session, "find_spec", lambda name: None if name in ("zmq", "hydra") else name)
    keys = [
        "session.py",
        "--out",
        str(tmp_path),
        "--device",
        "cpu",
        "--tiny",
        "--steps",
        "engine,exact",
        "--seconds",
        "0",
    ]
    monkeypatch.setattr(sys, "argv", keys)
    assert session.main() == 0
    assert capsys.readouterr().out.splitlines()[0] == (
        "engine: cannot run here without zmq, hydra; install them from their wheels"
    )


@pytest.mark.slow  # the steps as processes: each imports PyTorch
def test_a_session_goes_on_where_it_was_cut(session, tmp_path, monkeypatch, capfd):
    keys = ["--out", str(tmp_path), "--device", "cpu", "--tiny", "--steps", "first-shapes,engine"]
    for seconds, said in ((0, "first-shapes: no time left"), (170, "engine: done"), (170, "")):
        monkeypatch.setattr(sys, "argv", ["session.py", *keys, "--seconds", str(seconds)])
        assert session.main() == 0
        assert said in capfd.readouterr().out
    rows = json.loads((tmp_path / "engine.json").read_text())["rows"]
    assert all(row["tokens are plain's"] for row in rows)
