"""The coordinator's loop behind its hub: who is greeted, who is sent to, and how it ends."""

from __future__ import annotations

import itertools
import threading
import time

import pytest

from actors.conductor import CLIENT, Conductor, CoordinatorSpec
from actors.lifecycle import Failure, Hello, Ready, Stop
from actors.messages import (
    Abort,
    DraftBatch,
    ProposalBatch,
    Report,
    ReportOrder,
    Request,
    SamplingParams,
    Tokens,
    Verdict,
    VerdictBatch,
    VerifyBatch,
)
from actors.scheduler import Load
from actors.wire import Hub, Link

_names = itertools.count()
FACTS = {"kv_slots": 400, "max_model_len": 50}
WAIT_S = 10.0


class Stage:
    """A conductor in its thread, and a link for every part around it, spoken from the test."""

    def __init__(self, target_ranks=1, draft_ranks=1, watches=()) -> None:
        pipeline = "sync" if draft_ranks else "plain"
        spec = CoordinatorSpec(pipeline, 4, target_ranks, draft_ranks, (1,))
        self.hub = Hub(f"inproc://test-conductor-{next(_names)}")
        self.ranks = [*spec.identities("target"), *spec.identities("draft")]
        self.links = {name: Link(self.hub.address, name) for name in (*self.ranks, CLIENT)}
        self.ended: list[object] = []
        self.thread = threading.Thread(target=self.conduct, args=(Conductor(spec, self.hub, watches),))
        self.thread.start()

    def conduct(self, conductor) -> None:
        try:
            self.ended.append(conductor.run())
        except Exception as error:
            self.ended.append(error)

    def say(self, name, record) -> None:
        self.links[name].send(record)

    def hear(self, name, timeout_s=WAIT_S):
        return self.links[name].receive(timeout_s)

    def get_ready(self) -> list[Ready]:
        for name in self.ranks:
            role, _, rank = name.partition("-")
            self.say(name, Ready(role, int(rank), FACTS))
        self.say(CLIENT, Hello())
        return [self.hear(CLIENT) for _ in self.ranks]

    def stop(self) -> None:
        if self.thread.is_alive():
            self.say(CLIENT, Stop("the test is over"))
        self.thread.join(WAIT_S)
        for link in self.links.values():
            link.close()
        self.hub.close()


@pytest.fixture
def open_stage():
    stages = []

    def open_(*arguments, **options):
        stages.append(Stage(*arguments, **options))
        return stages[-1]

    yield open_
    for stage in stages:
        stage.stop()


def test_the_client_hears_of_all_ranks_once_the_last_is_there(open_stage):
    stage = open_stage(target_ranks=2)
    stage.say(CLIENT, Hello())
    stage.say("target-0", Ready("target", 0, FACTS))
    stage.say("draft-0", Ready("draft", 0, {}))
    assert stage.hear(CLIENT, 0.1) is None
    stage.say("target-1", Ready("target", 1, FACTS))
    assert {(ready.role, ready.rank) for ready in (stage.hear(CLIENT) for _ in range(3))} == {
        ("target", 0),
        ("target", 1),
        ("draft", 0),
    }


def test_every_rank_of_a_role_gets_its_records_and_the_client_the_tokens(open_stage):
    stage = open_stage(target_ranks=2)
    stage.get_ready()
    stage.say(CLIENT, Request(1, (3, 4), SamplingParams(max_tokens=2)))
    first, second = stage.hear("target-0"), stage.hear("target-1")
    assert isinstance(first, VerifyBatch) and first == second
    drafts = stage.hear("draft-0")
    assert isinstance(drafts, DraftBatch) and drafts.admits == first.admits
    stage.say("draft-0", ProposalBatch(drafts.round, (), 0.0, 0.0))
    stage.say("target-0", VerdictBatch(first.round, (Verdict(1, 0, 2, (), 7),), 0.0, 0.0, 2))
    assert stage.hear(CLIENT) == Tokens(1, 0, (7,))


def test_the_scheduler_is_sized_by_what_the_target_measured(open_stage):
    stage = open_stage(draft_ranks=0)
    stage.get_ready()
    stage.say(CLIENT, Request(1, (3,) * FACTS["max_model_len"]))
    assert "context of 50" in stage.hear(CLIENT).error


def test_a_second_hello_is_answered_and_forgets_no_request(open_stage):
    stage = open_stage(draft_ranks=0)
    stage.get_ready()
    stage.say(CLIENT, Request(1, (3, 4), SamplingParams(max_tokens=1)))
    batch = stage.hear("target-0")
    stage.say(CLIENT, Hello())
    assert isinstance(stage.hear(CLIENT), Ready)
    stage.say("target-0", VerdictBatch(batch.round, (Verdict(1, 0, 2, (), 7),), 0.0, 0.0, 2))
    assert stage.hear(CLIENT).token_ids == (7,)


def test_failures_and_reports_reach_the_client(open_stage):
    stage = open_stage()
    stage.get_ready()
    stage.say("draft-0", Failure("draft", 0, "out of memory"))
    assert stage.hear(CLIENT) == Failure("draft", 0, "out of memory")
    stage.say(CLIENT, ReportOrder())
    assert isinstance(stage.hear(CLIENT), Report)


def test_stop_ends_everyone(open_stage):
    stage = open_stage(target_ranks=2)
    stage.get_ready()
    stage.say(CLIENT, Stop("closed"))
    assert [stage.hear(name) for name in (*stage.ranks, CLIENT)] == [Stop("closed")] * 4
    stage.thread.join(WAIT_S)
    assert stage.ended == ["closed"]


def test_a_conductor_that_breaks_leaves_no_rank_waiting(open_stage):
    stage = open_stage()
    stage.get_ready()
    stage.say(CLIENT, Tokens(1, 0, ()))
    assert [stage.hear(name) for name in stage.ranks] == [Stop("the coordinator failed")] * 2
    stage.thread.join(WAIT_S)
    (error,) = stage.ended
    assert isinstance(error, TypeError) and "client sent Tokens" in str(error)


def test_the_watch_sees_the_tally_about_once_a_second(open_stage):
    seen = []
    stage = open_stage(draft_ranks=0, watches=[lambda glance: seen.append(glance.tally.num_prompt_tokens)])
    stage.get_ready()
    stage.say(CLIENT, Request(1, (3, 4, 5)))
    assert isinstance(stage.hear("target-0"), VerifyBatch)
    for _ in range(100):
        if not seen:
            stage.say(CLIENT, Abort(99))
            time.sleep(0.1)
    assert seen and seen[-1] == 3


def test_a_watch_misses_no_window(open_stage):
    """However short: it looks before every reset, and once more at the end."""
    seen = []
    stage = open_stage(draft_ranks=0, watches=[lambda glance: seen.append((glance.tally.phase, glance.load))])
    stage.get_ready()
    for phase in ("first", "second", "third"):
        stage.say(CLIENT, ReportOrder(reset=True, phase=phase))
        assert isinstance(stage.hear(CLIENT), Report)
    stage.stop()
    assert list(dict.fromkeys(phase for phase, _ in seen)) == ["", "first", "second", "third"]
    assert seen[-1][1] == Load(num_running=0, num_waiting=0, kv_slots_used=0, kv_slots=FACTS["kv_slots"])


def test_link_time_is_the_time_away_beside_the_pass(open_stage):
    stage = open_stage(draft_ranks=0)
    stage.get_ready()
    stage.say(CLIENT, Request(1, (3, 4), SamplingParams(max_tokens=1)))
    batch = stage.hear("target-0")
    time.sleep(0.1)
    stage.say("target-0", VerdictBatch(batch.round, (Verdict(1, 0, 2, (), 7),), 1.0, 1.06, 2))
    assert stage.hear(CLIENT).token_ids == (7,)
    stage.say(CLIENT, ReportOrder())
    counters = stage.hear(CLIENT).counters
    assert counters["num_link_trips"] == 1 and counters["link_s"] >= 0.04
