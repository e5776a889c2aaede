"""Heartbeats that the coordinator's loop receives, ranks that it reports as silent, and heartbeats that it sends."""

from __future__ import annotations

import threading
import time

import pytest

from actors.coordinator import loop_heartbeat
from actors.coordinator.clients import CLIENT
from actors.coordinator.membership import FACTOR, FLOOR_S
from actors.protocol.membership import HEARTBEAT_S, Alive, Bridge, Hello, RankLost, Ready, Recall, Silent
from actors.protocol.messages import Request, SamplingParams, Verdict, VerdictBatch
from actors.transport.channel import heart_of
from tests.actors.service_harness import FACTS, WAIT_S, link_to


def test_a_lost_order_is_noticed_by_heartbeats_and_a_long_pass_is_not_mistaken_for_one(open_stage):
    stage = open_stage(draft_ranks=0)
    stage.get_ready()
    stage.send(CLIENT, Request(1, (3, 4), SamplingParams(max_tokens=9)))
    batch = stage.receive("target-0")
    for _ in range(10):
        stage.send_heartbeat("target-0", epoch=1, waiting=False, round=batch.round, busy=True)
    assert stage.receive("target-0", 0.2) is None, "it is at work"
    deadline, order = time.monotonic() + WAIT_S, None
    while order is None:
        assert time.monotonic() < deadline
        stage.send_heartbeat("target-0", epoch=1, waiting=False, round=batch.round - 1, busy=False)
        order = stage.receive("target-0", 0.05)
    assert order == Recall(2)


def test_a_recall_also_goes_to_the_link_of_the_heartbeats(open_stage):
    """A rank that waits inside a pass for a dead peer reads no other."""
    stage = open_stage(target_ranks=2, draft_ranks=0)
    stage.get_ready()
    heart = stage.links["heart"] = link_to(stage.hub.address, heart_of("target-0#0"), keeps="newest")
    heart.send(Alive("target", 0, 0, 7, epoch=1, waiting=False, round=1, busy=True))
    stage.send(CLIENT, RankLost("target", 1, 0))
    assert stage.receive("heart") == Recall(2)


def test_the_order_for_a_bridge_also_goes_to_the_link_of_the_heartbeats(open_stage):
    """A target may wait inside a pass for the drafter that was at the end of the last one."""
    stage = open_stage(bridged=True)
    heart = stage.links["heart"] = link_to(stage.hub.address, heart_of("target-0#0"), keeps="newest")
    heart.send(Alive("target", 0, 0, 7))
    stage.join("target-0", "draft-0")
    assert isinstance(order := stage.receive("target-0"), Bridge)
    assert stage.receive("heart") == order


@pytest.mark.extended
def test_a_silent_rank_is_reported_and_its_role_goes_on_without_it(open_stage):
    stage = open_stage(silence_s=1.0)
    stage.get_ready()
    started = time.monotonic()
    stage.send_heartbeat("target-0", epoch=1, waiting=False)
    while stage.receive(CLIENT, 0.1) != Silent("draft", 0, 0, 7):  # the target too, if this thread stands still
        assert time.monotonic() < started + WAIT_S
        stage.send_heartbeat("target-0", epoch=1, waiting=False)
    assert time.monotonic() - started > 0.7


@pytest.mark.extended
def test_a_rank_that_froze_before_the_coordinator_was_replaced_is_reported_repeatedly(open_stage):
    stage = open_stage(silence_s=1.0, incarnation=1)
    heard, started = [], time.monotonic()
    while len(heard) < 2 and time.monotonic() - started < WAIT_S:
        stage.send_heartbeat("target-0")
        record = stage.receive(CLIENT, 0.1)
        heard += [record] if isinstance(record, Silent) and record.role == "draft" else []
    assert heard == [Silent("draft", 0)] * 2


def test_a_rank_whose_record_was_refused_is_reported_and_its_successor_gets_the_text(open_stage):
    stage = open_stage(draft_ranks=0, silence_s=1000.0)
    stage.get_ready()
    stage.send(CLIENT, Request(1, (3, 4), SamplingParams(max_tokens=9)))
    first = stage.receive("target-0")
    stage.send("target-0", VerdictBatch(first.round, (Verdict(1, 0, 2, (), (97,)),), 0.0, 0.1, 2))
    why = "sent a record that was refused (token_ids: names token 97, but the target has 97 tokens)"
    assert stage.receive(CLIENT) == Silent("target", 0, 0, 7, why)
    stage.links["target-0"].close()
    stage.links["target-0"] = link_to(stage.hub.address, "target-0#1")
    stage.send_heartbeat("target-0", incarnation=1)
    order = stage.receive("target-0")
    stage.send("target-0", Ready("target", 0, FACTS, order.epoch, 1))
    assert stage.receive("target-0").admits[0].token_ids == (3, 4)


def test_a_rank_whose_pass_never_ends_is_reported(open_stage):
    """Its heart beats, from a thread of its own."""
    stage = open_stage(draft_ranks=0, silence_s=1000.0)
    stage.get_ready()
    stage.send(CLIENT, Request(1, (3, 4), SamplingParams(max_tokens=9)))
    first = stage.receive("target-0")
    stage.send("target-0", VerdictBatch(first.round, (Verdict(1, 0, 2, (), (7,)),), 0.0, 0.1, 2))
    second = stage.receive("target-0")
    for _ in range(int((FLOOR_S + FACTOR * 0.1) / HEARTBEAT_S) + 2):
        stage.send_heartbeat("target-0", epoch=1, waiting=False, round=second.round, busy=True)
    while not isinstance(record := stage.receive(CLIENT), Silent):
        assert record is not None
    assert record == Silent("target", 0, 0, 7)


def test_the_client_hears_the_heart_of_the_coordinator(open_stage):
    stage = open_stage(draft_ranks=0)
    stage.send(CLIENT, Hello())
    before = stage.receive(CLIENT, heartbeats=True)
    assert (before.identity, before.waiting) == ("coordinator", True)
    stage.get_ready()
    beats = [stage.receive(CLIENT, heartbeats=True) for _ in range(3)]
    assert any(isinstance(beat, Alive) and not beat.waiting for beat in beats)


@pytest.fixture
def busy_stage(open_stage):
    """A stage whose loop stands still in a watch, as in a long record, until its `goes_on` is set."""
    stands, goes_on = threading.Event(), threading.Event()

    def stand(snapshot) -> None:
        stands.set()
        goes_on.wait(WAIT_S)

    stage = open_stage(draft_ranks=0, watches=(stand,))
    stage.goes_on = goes_on
    stage.get_ready()
    assert stands.wait(WAIT_S)
    yield stage
    goes_on.set()


def drain(stage) -> None:
    while stage.receive(CLIENT, 2 * HEARTBEAT_S, heartbeats=True) is not None:
        pass


@pytest.mark.extended
def test_a_long_record_does_not_stop_the_heart(busy_stage):
    busy_stage.send(CLIENT, Hello())
    beats = [busy_stage.receive(CLIENT, heartbeats=True) for _ in range(5)]
    assert all(isinstance(beat, Alive) and not beat.waiting for beat in beats), "the loop has not read the greeting"


@pytest.mark.extended
def test_the_heart_of_a_loop_that_hangs_stops_until_the_loop_goes_on(busy_stage, monkeypatch):
    monkeypatch.setattr(loop_heartbeat, "HUNG_S", 0.0)
    drain(busy_stage)
    busy_stage.goes_on.set()
    assert isinstance(busy_stage.receive(CLIENT, heartbeats=True), Alive)
