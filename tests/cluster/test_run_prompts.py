"""Driving prompts through an engine, with a scripted one in its place."""

from __future__ import annotations

import threading
import time
from typing import Any, cast

import pytest

from actors.protocol.messages import Report, RequestStats, SamplingParams
from cluster.completion import EngineError
from cluster.io.prompts import Prompt
from cluster.observability.results import Run, Served
from cluster.run_prompts import all_completed, serve_prompts

GIVE_UP_S = 30
PROMPTS = [Prompt(f"prompt {index}") for index in range(6)]


class ScriptedCompletion:
    """Ends once as many requests as the engine waits for were in flight together, or never but by an abort."""

    def __init__(self, engine: ScriptedEngine, prompt: str) -> None:
        self.token_ids, self.text, self.stats = [1, 2], prompt.upper(), RequestStats()
        self.finish_reason = "length"
        self.submitted_at = time.monotonic()
        self.first_token_at: float | None = None
        self.finished_at: float | None = None
        self._engine = engine
        self._prompt = prompt
        self._aborted = threading.Event()

    def result(self) -> ScriptedCompletion:
        if self._prompt in self._engine.endless:
            assert self._aborted.wait(GIVE_UP_S)
            self.finish_reason = "abort"
        else:
            assert self._engine.gathered.wait(GIVE_UP_S)
        self.first_token_at = time.monotonic()
        self.finished_at = self.first_token_at + 0.001
        self._engine.ended(self)
        if self._prompt in self._engine.failing:
            raise EngineError("prompt: too long")
        return self

    def abort(self) -> None:
        self._aborted.set()


class ScriptedEngine:
    def __init__(
        self, *, waits_for: int = 1, failing: tuple[str, ...] = (), endless: tuple[str, ...] = (), dead: bool = False
    ) -> None:
        self.failing, self.endless, self.dead = failing, endless, dead
        self.waits_for = waits_for
        self.gathered = threading.Event()
        self.in_flight: set[ScriptedCompletion] = set()
        self.most_in_flight = 0
        self.submitted: list[tuple[object, str | None]] = []
        self.salts: list[str] = []
        self.num_resets = 0
        self.winds_down = False
        self.phases: list[str] = []
        self._lock = threading.Lock()

    def submit(self, content, sampling, *, drafter, cache_salt):
        self.salts.append(cache_salt)
        if self.dead:
            raise EngineError("target-0: died")
        with self._lock:
            completion = ScriptedCompletion(self, content)
            self.submitted.append((content, drafter))
            self.in_flight.add(completion)
            self.most_in_flight = max(self.most_in_flight, len(self.in_flight))
            if len(self.in_flight) >= self.waits_for:
                self.gathered.set()
        return completion

    def wind_down(self) -> None:
        self.winds_down = True

    def ended(self, completion: ScriptedCompletion) -> None:
        with self._lock:
            self.in_flight.discard(completion)

    def report(self, *, reset: bool, phase: str = "") -> Report:
        if self.dead and self.num_resets:
            raise EngineError("target-0: died")
        self.num_resets += reset
        self.phases.append(phase)
        return Report({"num_rounds": self.num_resets}, (("target", "verify", 0.0, 1.0, {"round": 1}),))


def serve(engine: Any, concurrency: int, **more):
    return serve_prompts(engine, PROMPTS, SamplingParams(), speculate=True, concurrency=concurrency, **more)


@pytest.mark.parametrize(("speculate", "expected"), [(True, ["ngram", None]), (False, ["none", "none"])])
def test_a_prompt_may_name_its_drafter_unless_all_are_decoded_plainly(speculate, expected):
    prompts = [Prompt("a", drafter="ngram"), Prompt("b")]
    engine: Any = ScriptedEngine(waits_for=1)
    serve_prompts(engine, prompts, SamplingParams(), speculate=speculate, concurrency=1, cache_salt="mine")
    assert engine.submitted == [*zip(["a", "b"], expected, strict=True)]
    assert engine.salts == ["mine", "mine"]


@pytest.mark.parametrize(("concurrency", "most"), [(1, 1), (2, 2), (0, 6)])
def test_so_many_requests_are_in_flight(concurrency, most):
    engine = ScriptedEngine(waits_for=most)
    run = serve(engine, concurrency)
    assert engine.most_in_flight == most
    assert sorted(engine.submitted) == [(prompt.text, None) for prompt in PROMPTS]
    assert [one.text for one in run.completed] == [prompt.text.upper() for prompt in PROMPTS]
    assert run.num_tokens == 12


def test_the_time_of_a_run_lies_within_that_of_its_caller():
    began = time.monotonic()
    run = serve(ScriptedEngine(), 0)
    assert 0 < run.wall_s <= time.monotonic() - began


class EndedCompletion(ScriptedCompletion):
    """Had its end with its submission."""

    def result(self) -> EndedCompletion:
        self.submitted_at, self.first_token_at, self.finished_at = 100.0, 100.5, 102.0
        if self._prompt in self._engine.failing:
            self.finish_reason, self.first_token_at, self.token_ids = None, None, []
            self.finished_at = None
            raise EngineError("prompt: too long")
        return self


def test_what_is_recorded_of_a_request_is_what_its_completion_says(monkeypatch):
    monkeypatch.setattr(f"{__name__}.ScriptedCompletion", EndedCompletion)
    stats, (good, bad) = RequestStats(), PROMPTS[:2]
    run = serve_prompts(
        cast(Any, ScriptedEngine(failing=("prompt 1",))), [good, bad], SamplingParams(), speculate=True, concurrency=1
    )
    assert run.completed == [Served(0, good, (1, 2), "PROMPT 0", "length", None, stats, ttft_s=0.5, latency_s=2.0)]
    assert run.failed == [Served(1, bad, (), "PROMPT 1", "error", "prompt: too long", stats)]


def test_the_window_is_labelled_with_the_phase_and_closed_without():
    engine = ScriptedEngine()
    serve(engine, 1, phase="warm-up")
    assert engine.phases == ["warm-up", ""]


def test_of_a_run_all_completions_are_wanted_or_the_reason_why_not():
    good, later = (Served(index, PROMPTS[index]) for index in (0, 4))
    bad = Served(2, PROMPTS[2], error="prompt: too long")
    assert all_completed(Run([later, good])) == [good, later]
    with pytest.raises(EngineError, match="^prompt 3: prompt: too long$"):
        all_completed(Run([later, bad, good]))
    with pytest.raises(KeyboardInterrupt):
        all_completed(Run([good, bad], interrupted=True))


def test_counters_are_those_of_the_window():
    run = serve(ScriptedEngine(), 1)
    assert run.counters == {"num_rounds": 2}  # the first report only opened the window
    assert len(run.spans) == 1


def test_each_request_is_heard_of_once_as_it_ends():
    heard = []
    run = serve(ScriptedEngine(), 2, on_finished=heard.append)
    assert heard == run.requests and len(heard) == 6
    assert all(0 < one.ttft_s < one.latency_s for one in heard)


def test_a_failed_request_does_not_end_the_others():
    run = serve(ScriptedEngine(failing=("prompt 2",)), 2)
    assert [one.index for one in run.failed] == [2]
    assert run.failed[0].error == "prompt: too long"
    assert len(run.completed) == 5


def test_a_dead_engine_fails_every_request_in_words():
    run = serve(ScriptedEngine(dead=True), 2)
    assert [one.error for one in run.failed] == ["target-0: died"] * 6
    assert run.counters == {} and not run.completed


def test_an_interrupt_aborts_what_is_in_flight_and_keeps_what_there_is():
    heard = []

    def interrupt_at_second(served):
        heard.append(served)
        if len(heard) == 2:
            raise KeyboardInterrupt

    engine = ScriptedEngine(endless=tuple(prompt.text for prompt in PROMPTS[2:]))
    run = serve(engine, 2, on_finished=interrupt_at_second)
    assert run.interrupted and engine.winds_down and heard == run.requests
    assert [one.index for one in run.completed[:2]] == [0, 1]
    assert len(run.requests) < 6 and {one.finish_reason for one in run.requests[2:]} <= {"abort"}
    assert not engine.in_flight


def test_what_is_submitted_behind_an_interrupt_is_aborted_too():
    """Its thread was on the way when the others were aborted."""

    class SlowEngine(ScriptedEngine):
        ending = threading.Event()

        def submit(self, content, sampling, *, drafter, cache_salt):
            completion = super().submit(content, sampling, drafter=drafter, cache_salt=cache_salt)
            if content in self.endless:
                assert self.ending.wait(GIVE_UP_S)
                time.sleep(0.05)  # in which those known are aborted
            return completion

        def wind_down(self) -> None:
            super().wind_down()
            self.ending.set()

    engine = SlowEngine(endless=("prompt 1", "prompt 2"))

    def interrupt(served):
        if not engine.winds_down:
            raise KeyboardInterrupt

    run = serve(engine, 3, on_finished=interrupt)
    assert run.interrupted and not engine.in_flight
    assert {one.finish_reason for one in run.requests if one.index in (1, 2)} == {"abort"}


def test_an_end_that_cannot_be_written_down_ends_the_run():
    engine = ScriptedEngine(endless=tuple(prompt.text for prompt in PROMPTS[1:]))

    def full_disk(served):
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        serve(engine, 2, on_finished=full_disk)
    assert engine.winds_down and not engine.in_flight and len(engine.submitted) < 6
