"""`job=train` with stand-ins for what trains: which stages run, where files go, and what is printed."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cluster.config.jobs import STAGES, TrainConfig
from cluster.jobs import train
from cluster.tools.training.speculators import run as training
from cluster.tools.training.trainer import TrainingRecord

RECORD = TrainingRecord(3, 4, 5.0, 6.0)
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


@pytest.fixture
def staged(monkeypatch: pytest.MonkeyPatch, threads: list[int]) -> list[Any]:
    """The stages that ran, and the place that they were given."""
    ran: list[Any] = []

    def stage(name: str, value: Any) -> Any:
        return lambda place: ran.append((name, place.out, place.work, place.corpus)) or value

    results = {"tokenizer": None, "target": RECORD, "continuations": 12, "drafter": RECORD}
    for name, value in results.items():
        monkeypatch.setattr(train.stages, f"make_{name}", stage(name, value))
    monkeypatch.setattr(train, "load_corpus", lambda seed: f"corpus {seed}")
    monkeypatch.setattr(train.report, "describe_run", lambda *given: {"described": len(given)})
    monkeypatch.setattr(train.report, "measure", lambda *given: {"acceptance_length": {1: 1.5, 2: 2.0}})
    monkeypatch.setattr(train.report, "draw_losses", lambda work, path: ran.append(("drawn", work, path)))
    monkeypatch.setattr(train.report, "write_readme", lambda config, found, path: ran.append(("readme", path, found)))
    return ran


PARTS = {"target": {"steps": 3, "tokens": 4, "seconds": 5.0, "final_loss": 6.0}}


@pytest.mark.parametrize(
    ("chosen", "outcome"),
    [
        (["tokenizer"], {}),
        (["target"], PARTS),
        (["continuations"], {"continuation_tokens": 12}),
        (["drafter", "target"], PARTS | {"drafter": PARTS["target"]}),
    ],
)
def test_the_chosen_stages_run_in_their_order(staged, tmp_path, chosen, outcome):
    config = TrainConfig(stages=chosen, seed=8, out=str(tmp_path / "deep" / "out"), work=str(tmp_path / "work"))
    assert train.make_pair(config, tmp_path / "run") == outcome
    expected = [name for name in STAGES if name in chosen]
    assert staged == [(name, tmp_path / "deep" / "out", tmp_path / "work", "corpus 8") for name in expected]
    assert (tmp_path / "deep" / "out").is_dir() and not (tmp_path / "run").exists()


def test_the_report_is_written_beside_the_pair_and_shown(staged, threads, tmp_path, capsys):
    found = {"described": 4, "acceptance_length": {1: 1.5, 2: 2.0}}
    for _ in range(2):
        staged.clear()
        assert train.make_pair(TrainConfig(stages=["report"], threads=3), tmp_path) == found
    assert staged == [("drawn", tmp_path / "work", tmp_path / "loss.png"), ("readme", tmp_path / "README.md", found)]
    assert json.loads((tmp_path / "report.json").read_text())["described"] == 4 and threads == [3, 3]
    shown = capsys.readouterr().out
    assert "draft tokens      1      2" in shown and "1.50   2.00" in shown and f"written to {tmp_path}" in shown
    threads.clear()
    train.make_pair(TrainConfig(stages=["tokenizer"], threads=0), tmp_path)
    assert threads == [], "PyTorch's choice"


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
    assert train.make_drafter(launched, tmp_path) == OUTCOME, "its folder is there already"
    assert calls[0] == ("/t", str(tmp_path), str(tmp_path / "kept")) and threads == [2]


def test_acceptance_is_shown_by_depth_and_temperature_before_and_after():
    config = TrainConfig(temperatures=[0.0, 0.8])
    assert train._acceptance_table(config, OUTCOME) == (["", "tokens per round", "depth 1", "depth 2"], TABLE)


def test_the_recipe_pair_makes_a_pair(monkeypatch, tmp_path):
    made: list[Any] = []
    monkeypatch.setattr(train, "make_pair", lambda job, run_dir: made.append(("pair", run_dir)))
    monkeypatch.setattr(train, "make_drafter", lambda launched, run_dir: made.append(("drafter", run_dir)))
    for recipe in ("pair", "medusa"):
        launched: Any = SimpleNamespace(job=TrainConfig(recipe=recipe))
        train.run(launched, tmp_path)
    assert made == [("pair", tmp_path), ("drafter", tmp_path)]
