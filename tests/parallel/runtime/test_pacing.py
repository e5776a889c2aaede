"""A pace of passes: a lower bound by rows, the same results, and nothing where there is none."""

from __future__ import annotations

import time

import pytest
import torch

from parallel.kv.pass_plan import Span
from parallel.runtime import pacing
from parallel.runtime.pacing import pace
from parallel.runtime.runner import open_model

TEXT = [3, 1, 4, 1, 5]


class StoppedClock:
    """Time that passes in sleeps only."""

    def __init__(self) -> None:
        self.now, self.sleeps = 0.0, list[float]()

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.sleeps.append(pytest.approx(seconds, abs=1e-9))
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    stopped = StoppedClock()
    monkeypatch.setattr(pacing, "time", stopped)
    return stopped


@pytest.fixture(scope="module")
def checkpoint(make_checkpoint):
    return make_checkpoint("Llama")


@pytest.fixture
def opened(checkpoint):
    def open_(pace_ms=0.0):
        runner = open_model(checkpoint.path, num_slots=64)
        pace(runner, pace_ms)
        for name in "ab":
            runner.open(name)
        return runner

    return open_


class Likeliest:
    """Three steps of the likeliest token."""

    def __len__(self) -> int:
        return 3

    def choose(self, logits, step):
        return logits.argmax(-1)

    def race(self):
        return None


def read(runner):
    """Logits of a text, and the tokens of a chain behind it, for each of two sequences."""
    logits = runner.forward([Span("a", 3, num_logits=1), Span("b", 2, num_logits=1)], TEXT).logits
    return logits, runner.extend([Span("a", 1), Span("b", 1)], logits.argmax(-1), Likeliest())


def test_passes_last_by_their_rows_and_compute_the_same(opened, clock):
    logits, chain = read(opened({1: 10, 3: 30}))
    assert clock.sleeps == [0.05, 0.02, 0.02, 0.02], "five rows, then three passes of two"
    expected_logits, expected_chain = read(opened())
    assert torch.equal(logits, expected_logits) and torch.equal(chain, expected_chain)


def test_a_chain_that_is_one_graph_lasts_as_its_passes(opened, clock, monkeypatch):
    chain = read(opened())[1]
    runner = opened()
    monkeypatch.setattr(runner, "extend", lambda *_, **__: chain)
    pace(runner, 7)
    read(runner)
    assert clock.sleeps == [0.007, 0.021]


def test_a_pass_that_takes_longer_does_not_wait(opened, clock, monkeypatch):
    runner = opened()
    forward = runner.forward

    def slow(*arguments, **options):
        clock.now += 0.03
        return forward(*arguments, **options)

    monkeypatch.setattr(runner, "forward", slow)
    pace(runner, 25)
    runner.forward([Span("a", 5)], TEXT)
    assert not clock.sleeps


def test_only_whole_passes_of_this_runner_are_paced(opened, clock):
    """A drafter that runs layers of the target keeps its own pace."""
    runner = opened(9)
    runner.run(runner.plan([Span("a", 5)]), TEXT)
    assert not clock.sleeps


def test_the_clock_is_the_wall_clock(opened):
    runner = opened(40.0)
    began = time.perf_counter()
    runner.forward([Span("a", 5)], TEXT)
    assert time.perf_counter() - began >= 0.04


@pytest.mark.parametrize("off", [0, 0.0])
def test_without_a_pace_nothing_is_replaced(opened, off):
    assert not {"forward", "extend"} & vars(opened(off)).keys()
    assert {"forward", "extend"} <= vars(opened(1)).keys()
