"""The coordinator's log tells the life of requests and, every few seconds, how speculation goes."""

from __future__ import annotations

import logging

import pytest

from actors.coordinator.event_log import PROGRESS_S, EventLog
from actors.coordinator.scheduler import Load
from actors.coordinator.stats import CoordinatorStats
from actors.protocol.membership import RankLost, Stop
from actors.protocol.messages import Abort, ReportOrder, Request, RequestStats, Tokens, VerdictBatch

LOAD = Load(num_running=2, num_waiting=1, kv_slots_used=30, kv_slots=120)


@pytest.fixture
def logged(caplog):
    """Events so far, as (name, facts)."""
    caplog.set_level(logging.INFO, logger="specdec")
    return lambda: [(record.getMessage(), record.facts) for record in caplog.records]


def test_the_life_of_a_request(logged):
    event_log = EventLog()
    event_log.admitted(Request(7, (1, 2, 3)), "client:a", 2)
    event_log.sent(Tokens(7, 0, (4, 5)))
    event_log.received(VerdictBatch(1, (), 0.0, 0.0))
    event_log.sent(
        Tokens(7, 2, (6,), "stop", RequestStats(num_spec_steps=2, num_draft_tokens=4, num_accepted_tokens=1))
    )
    event_log.received(Abort(8))
    event_log.sent(Tokens(9, 0, (), "error", RequestStats(), "prompt: is empty"))
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
