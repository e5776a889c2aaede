"""`job=train` with stand-ins for what trains: where files go, and what is printed."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cluster.config.jobs import TrainConfig
from cluster.jobs import train
from cluster.tools.training.speculators import run as training

OUTCOME = {
    "held_out_before": {"length": 1.5, "accept_1": 0.5, "accept_2": 0.25, "length_at_0.8": 1.25, "accept_1_at_0.8": 0.4}
    | {"accept_2_at_0.8": 0.3, "loss": 3.0},
    "held_out": {"length": 2.5, "accept_1": 0.75, "accept_2": 0.5, "length_at_0.8": 2.25, "accept_1_at_0.8": 0.6}
    | {"accept_2_at_0.8": 0.35, "loss": 2.0},
}
TABLE = [
    ["T=0 before", "1.50", "0.50", "0.25"],
    ["T=0 after", "2.50", "0.75", "0.50"],
    ["T=0.8 before", "1.25", "0.40", "0.30"],
    ["T=0.8 after", "2.25", "0.60", "0.35"],
]


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What PyTorch was asked for."""
    asked: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    return asked


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_drafter_is_trained_here_or_on_ranks_and_reported(threads, tmp_path, monkeypatch, capsys, ranks):
    calls: list[Any] = []
    checked = SimpleNamespace(folder=tmp_path / "curves", options=lambda: calls.append("options"))

    def course(config: TrainConfig, target: str, out: str, work: str) -> Any:
        calls.append((target, out, work))
        return checked

    monkeypatch.setattr(training, "Course", course)
    monkeypatch.setattr(training, "prepare", lambda given, say: calls.append("prepare") or "texts")
    monkeypatch.setattr(training, "train_rank", lambda given, texts, rank: calls.append((texts, rank.count)) or OUTCOME)
    monkeypatch.setattr(training, "draw_curves", lambda folder, path: calls.append((folder, path)))
    monkeypatch.setattr(
        "cluster.tools.training.ray_ranks.train_on_ranks",
        lambda launched, given, texts: calls.append((texts, "ranks")) or OUTCOME,
    )
    out = tmp_path / "deep" / "out"
    config = TrainConfig(recipe="medusa", ranks=ranks, out=str(out), threads=2)
    launched: Any = SimpleNamespace(job=config, target=SimpleNamespace(path="/t"))
    train.run(launched, tmp_path / "run")
    assert calls == [
        ("/t", str(out), str(tmp_path / "run" / "work")),
        "options",
        "prepare",
        ("texts", "ranks" if ranks > 1 else 1),
        (tmp_path / "curves", out / "curves.png"),
    ]
    assert json.loads((out / "report.json").read_text()) == OUTCOME and threads == [2]
    assert f"written to {out}" in capsys.readouterr().out
    calls.clear()
    launched.job = replace(config, out=None, threads=0, work=str(tmp_path / "kept"))
    assert train.run(launched, tmp_path) == OUTCOME, "its folder is there already"
    assert calls[0] == ("/t", str(tmp_path), str(tmp_path / "kept")) and threads == [2]


def test_acceptance_is_shown_by_depth_and_temperature_before_and_after():
    config = TrainConfig(temperatures=[0.0, 0.8])
    assert train._acceptance_table(OUTCOME, config.temperatures) == (
        ["", "tokens per round", "depth 1", "depth 2"],
        TABLE,
    )


@pytest.mark.parametrize("device", ["cuda:99", "abacus"])
def test_a_device_that_is_not_there_is_refused_before_anything_is_read(tmp_path, device):
    launched: Any = SimpleNamespace(job=TrainConfig(device=device, out=str(tmp_path / "out")))
    with pytest.raises(ValueError, match=rf"^job.device={device}: PyTorch has no such device here; use cpu"):
        train.run(launched, tmp_path)
    assert not (tmp_path / "out").exists()
