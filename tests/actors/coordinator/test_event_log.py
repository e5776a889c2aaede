"""The coordinator's log tells the life of requests and, every few seconds, how speculation goes."""

from __future__ import annotations

import logging

import pytest

from actors.coordinator.event_log import PROGRESS_S, EventLog
from actors.coordinator.scheduler import Load
from actors.coordinator.stats import CoordinatorStats
from actors.protocol.membership import PassFailed, RankLost, Ready, Stop
from actors.protocol.messages import (
    Abort,
    ReportOrder,
    Request,
    RequestStats,
    SamplingParams,
    Tokens,
    VerdictBatch,
)

LOAD = Load(num_running=2, num_waiting=1, kv_slots_used=30, kv_slots=120)


@pytest.fixture
def logged(caplog):
    """Events so far, as (name, facts)."""
    caplog.set_level(logging.INFO, logger="specdec")
    return lambda: [(record.getMessage(), record.facts) for record in caplog.records]


def test_the_life_of_a_request(logged):
    event_log = EventLog()
    event_log.admitted(Request(7, (1, 2, 3)), "client:a", 2)
    event_log.received(VerdictBatch(1, (), 0.0, 0.0))
    event_log.finished(
        Tokens(7, 2, (6,), "stop", RequestStats(num_spec_steps=2, num_draft_tokens=4, num_accepted_tokens=1))
    )
    event_log.received(Abort(8))
    event_log.finished(Tokens(9, 0, (), "error", RequestStats(), "prompt: is empty"))
    names = [name for name, _ in logged()]
    assert names == ["request", "finished", "abort", "finished"], "rounds are not logged"
    first, ended, _, refused = (facts for _, facts in logged())
    assert (first["request"], first["prompt_tokens"], first["client"], first["number"]) == (7, 3, "client:a", 2)
    assert (ended["request"], ended["reason"], ended["tokens"], ended["acceptance_length"]) == (7, "stop", 3, 1.5)
    assert (refused["reason"], refused["why"]) == ("error", "prompt: is empty")


def test_losses_and_the_end_are_logged_with_their_reason(logged):
    event_log = EventLog()
    event_log.received(RankLost("draft", 1, 2))
    event_log.received(Stop("closed"))
    why = "process 2 of this rank has ended"
    assert logged() == [("lost", {"role": "draft", "rank": 1, "why": why}), ("stop", {"why": "closed"})]


def test_progress_is_of_the_last_seconds_and_only_while_there_is_work(logged):
    event_log, stats = EventLog(), CoordinatorStats(phase="speculative")
    event_log.progress(stats, LOAD)
    assert not logged()
    stats.active_s, stats.num_tokens, stats.target_busy_s = PROGRESS_S, 100, PROGRESS_S / 2
    event_log.progress(stats, LOAD)
    event_log.progress(stats, LOAD)
    stats.active_s += PROGRESS_S
    stats.num_tokens, stats.num_spec_rounds, stats.spec_round_s = 150, 10, 0.1
    stats.num_spec_steps, stats.num_draft_tokens, stats.num_accepted_tokens = 10, 40, 20
    stats.num_branch_lookups, stats.num_branch_hits, stats.num_stale = 8, 6, 1
    event_log.progress(stats, LOAD)
    (_, plain), (_, speculative) = logged()
    assert plain["tokens_per_s"] == 100 / PROGRESS_S and plain["target_busy"] == 0.5
    assert plain["kv_slots"] == "30/120" and "acceptance_length" not in plain
    assert speculative["tokens_per_s"] == 50 / PROGRESS_S and speculative["acceptance_length"] == 3.0
    assert speculative["hits"] == 0.75 and speculative["accepted"] == 0.5
    assert speculative["round_ms"] == 10.0 and speculative["stale"] == 1


def test_a_window_that_closes_is_logged_at_its_end(logged):
    event_log, stats = EventLog(), CoordinatorStats(phase="plain")
    stats.active_s, stats.num_tokens = PROGRESS_S - 1, 100
    event_log.progress(stats, LOAD)
    event_log.received(ReportOrder(reset=True, phase="next"))
    event_log.progress(CoordinatorStats(phase="next"), LOAD)
    assert [(name, facts["phase"]) for name, facts in logged()] == [("progress", "plain"), ("window", "next")]


LOST_WHY = "process 2 of this rank has ended"


@pytest.mark.parametrize(
    ("record", "level", "name", "facts"),
    [
        (Abort(8), "INFO", "abort", {"request": 8}),
        (ReportOrder(reset=True, phase="p"), "INFO", "window", {"phase": "p"}),
        (Ready("draft", 1, {"pid": 77}), "INFO", "joined", {"role": "draft", "rank": 1, "rank_pid": 77}),
        (
            *(PassFailed("target", 1, 3, 4, "oh"), "ERROR", "failed"),
            {"role": "target", "rank": 1, "round": 4, "why": "oh"},
        ),
        (RankLost("draft", 1, 2), "ERROR", "lost", {"role": "draft", "rank": 1, "why": LOST_WHY}),
        (Stop("closed"), "INFO", "stop", {"why": "closed"}),
    ],
)
def test_a_record_is_a_line_with_its_level_and_facts(caplog, record, level, name, facts):
    caplog.set_level(logging.INFO, logger="specdec")
    EventLog().received(record)
    ((found,),) = [caplog.records]
    assert (found.levelname, found.getMessage(), found.facts) == (level, name, facts)


def test_what_is_no_event_is_no_line(logged):
    for record in (ReportOrder(phase="p"), ReportOrder(reset=True), VerdictBatch(1, (), 0.0, 0.0)):
        EventLog().received(record)
    assert not logged()


def test_all_of_a_request_and_of_its_end(caplog):
    caplog.set_level(logging.INFO, logger="specdec")
    event_log = EventLog()
    sampling = SamplingParams(temperature=0.5, max_tokens=9)
    event_log.admitted(Request(7, (1, 2, 3), sampling=sampling), "client:a", 2)
    event_log.admitted(Request(8, (1,), drafter="ngram"), "client", 4)
    event_log.refused("draft", 1, "no")
    event_log.finished(Tokens(7, 2, (6,), "stop", RequestStats(num_preemptions=2)))
    first, second, refused, ended = caplog.records
    asked = {"request": 7, "prompt_tokens": 3, "max_tokens": 9, "temperature": 0.5, "drafter": "any"}
    assert first.facts == {**asked, "client": "client:a", "number": 2} and second.facts["drafter"] == "ngram"
    assert (refused.levelname, refused.facts) == ("ERROR", {"role": "draft", "rank": 1, "why": "no"})
    assert ended.facts == {"request": 7, "reason": "stop", "tokens": 3, "preemptions": 2}


def test_all_of_a_line_of_progress(logged):
    """Counters since the last line, each over the seconds of work or the rounds."""
    event_log, stats = EventLog(), CoordinatorStats()
    counted = dict(num_tokens=30, target_busy_s=5.0, num_spec_rounds=4, num_spec_steps=8, num_accepted_tokens=12)
    counted |= dict(num_draft_tokens=16, num_branch_lookups=5, num_branch_hits=2, draft_busy_s=2.5, num_stale=3)
    counted |= dict(spec_round_s=0.5, spec_round_overhead_s=0.125, num_preemptions=6, active_s=2 * PROGRESS_S)
    for _ in range(2):
        for name, count in counted.items():
            setattr(stats, name, getattr(stats, name) + count)
        event_log.progress(stats, LOAD)
    expected = {"phase": "-", "running": 2, "waiting": 1, "tokens_per_s": 3.0, "acceptance_length": 2.5}
    expected |= {"accepted": 0.75, "hits": 0.4, "draft_busy": 0.25, "target_busy": 0.5, "round_ms": 125.0}
    expected |= {"overhead_ms": 31.25, "kv_slots": "30/120", "preemptions": 6, "stale": 3}
    assert logged() == [("progress", expected)] * 2


@pytest.mark.parametrize(("active_s", "is_logged"), [(0.49, False), (0.5, True)])
def test_half_a_second_at_the_end_of_a_window_has_a_line(logged, active_s, is_logged):
    event_log = EventLog()
    event_log.received(ReportOrder(reset=True))
    event_log.progress(CoordinatorStats(active_s=active_s, num_tokens=1), LOAD)
    event_log.received(ReportOrder(reset=True))
    assert bool(logged()) == is_logged


@pytest.mark.parametrize(("active_s", "is_logged"), [(PROGRESS_S - 0.01, False), (PROGRESS_S, True)])
def test_progress_has_a_line_every_few_seconds(logged, active_s, is_logged):
    EventLog().progress(CoordinatorStats(active_s=active_s), LOAD)
    assert bool(logged()) == is_logged
