"""Several clients of one coordinator service: each gets the answers to what it asked, and may leave."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest

from actors.coordinator import clients, loop_heartbeat, service
from actors.coordinator.clients import CLIENT
from actors.protocol.grammar import Grammar
from actors.protocol.membership import Alive, ClientKeys, Hello, Ready, Stop
from actors.protocol.messages import (
    Outputs,
    Report,
    ReportOrder,
    Request,
    SamplingParams,
    Verdict,
    VerdictBatch,
    VerifyBatch,
)
from tests.actors.service_harness import KEYS, WAIT_S, Stage, link_to

OTHER = "client:other"
AWAY = "client:away"
MINE = 1
"""Every client's number of its request; at the coordinator they are FIRST and SECOND in order of arrival."""
FIRST, SECOND = 1, 2


@pytest.fixture
def stage(monkeypatch):
    for module in (loop_heartbeat, service):
        monkeypatch.setattr(module, "HEARTBEAT_S", 0.05)
    stage = Stage(draft_ranks=0)
    stage.get_ready()
    for name in (OTHER, f"{OTHER}/out"):
        stage.links[name] = link_to(stage.hub.client_address, name)
    stage.send(OTHER, Hello())
    assert receive(stage, OTHER, Alive), "records for a client that is not connected yet are dropped"
    yield stage
    stage.stop()


def receive(stage, name, kind, timeout_s=WAIT_S) -> Any:
    """The next record of this kind, or None after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while (left_s := deadline - time.monotonic()) > 0:
        if isinstance(record := stage.links[name].receive(left_s), kind):
            return record
    return None


def verify_until(stage, *request_ids):
    """Answer target passes until one verifies all of these requests, each with token 7."""
    while True:
        batch = receive(stage, "target-0", VerifyBatch)
        present = [item.request_id for item in batch.items]
        lengths = {item.request_id: item.num_tokens for item in batch.items}
        verdicts = [Verdict(request_id, 0, lengths[request_id], (), (7,)) for request_id in present]
        stage.links["target-0"].send(VerdictBatch(batch.round, tuple(verdicts), 0.0, 0.0))
        if set(request_ids) <= set(present):
            return


def await_abort(stage):
    """It comes `ABSENT_S` and a heartbeat later, or later still on a busy machine."""
    deadline = time.monotonic() + WAIT_S
    counters = {"num_requests_aborted": 0}
    while not counters["num_requests_aborted"]:
        assert time.monotonic() < deadline
        stage.links[CLIENT].send(ReportOrder())
        counters = receive(stage, CLIENT, Report).counters


def submit(stage, link, max_tokens=1):
    stage.links[link].send(Request(MINE, (3, 4), SamplingParams(max_tokens=max_tokens, ignore_eos=True)))


def test_each_client_gets_the_tokens_and_the_report_it_asked_for(stage):
    submit(stage, CLIENT)
    verify_until(stage, FIRST)
    submit(stage, f"{OTHER}/out")
    verify_until(stage, SECOND)
    for name in (CLIENT, OTHER):
        assert [one.request_id for one in receive(stage, name, Outputs).tokens] == [MINE]
    stage.links[f"{OTHER}/out"].send(ReportOrder())
    assert isinstance(receive(stage, OTHER, Report), Report)
    assert receive(stage, CLIENT, Outputs | Report, 0.3) is None
    assert receive(stage, OTHER, Outputs | Report, 0.3) is None


def test_every_client_receives_heartbeats_and_the_end(stage):
    for name in (CLIENT, OTHER):
        assert receive(stage, name, Alive).role == "coordinator"
    stage.links[CLIENT].send(Stop("over"))
    for name in (CLIENT, OTHER):
        assert receive(stage, name, Stop) == Stop("over")


def test_requests_of_a_client_that_left_are_aborted_and_the_others_go_on(stage, monkeypatch):
    monkeypatch.setattr(clients, "ABSENT_S", 0.3)
    submit(stage, f"{OTHER}/out", max_tokens=40)
    batch = receive(stage, "target-0", VerifyBatch)
    for name in (OTHER, f"{OTHER}/out"):
        stage.links.pop(name).close()
    submit(stage, CLIENT)
    await_abort(stage)
    stage.links["target-0"].send(VerdictBatch(batch.round, (Verdict(FIRST, 0, 2, (), (7,)),), 0.0, 0.0))
    batch = receive(stage, "target-0", VerifyBatch)
    assert [item.request_id for item in batch.items] == [SECOND] and FIRST in batch.releases
    stage.links["target-0"].send(VerdictBatch(batch.round, (Verdict(SECOND, 0, 2, (), (7,)),), 0.0, 0.0))
    assert [one.request_id for one in receive(stage, CLIENT, Outputs).tokens] == [MINE]


def test_requests_of_a_client_whose_key_was_taken_away_are_aborted(stage, monkeypatch):
    monkeypatch.setattr(clients, "ABSENT_S", 0.3)
    submit(stage, f"{OTHER}/out", max_tokens=40)
    batch = receive(stage, "target-0", VerifyBatch)
    stage.links[CLIENT].send(ClientKeys(((KEYS.of("client:1").public, "1"),)))
    await_abort(stage)
    submit(stage, CLIENT)
    stage.links["target-0"].send(VerdictBatch(batch.round, (Verdict(FIRST, 0, 2, (), (7,)),), 0.0, 0.0))
    batch = receive(stage, "target-0", VerifyBatch)
    assert [item.request_id for item in batch.items] == [SECOND] and FIRST in batch.releases


def test_a_greeting_is_answered_to_its_client_alone(stage):
    """Else many connections that greet cost the square of their number."""
    stage.links[CLIENT].send(Hello())
    assert receive(stage, CLIENT, Ready).role == "target"
    assert receive(stage, OTHER, Alive) and receive(stage, OTHER, Ready, 0.5) is None
    stage.send(OTHER, Hello())
    assert receive(stage, OTHER, Ready).role == "target"


class Connected:
    """A hub with these links."""

    def __init__(self, *names: str) -> None:
        self.names = list(names)

    def identities(self) -> list[str]:
        return self.names


@pytest.mark.parametrize(
    "held", [{"grammar": Grammar("regex", "a" * 800)}, {"reference": (5,) * 100}, {"prompt_logprobs": 200}]
)
def test_what_a_request_brings_beside_its_prompt_counts_in_the_quota(monkeypatch, held):
    monkeypatch.setattr(clients, "MOST_TOKENS", 100)
    hub: Any = Connected(OTHER)
    known = clients.Clients(hub)
    link, first = f"{OTHER}/out", Request(MINE, (3, 4))
    known.admit(link, first)
    assert known.quota_refusal(link, replace(first, request_id=9)) is None
    refusal = known.quota_refusal(link, replace(first, request_id=9, **held))
    assert refusal is not None and "submit this one again" in refusal


def test_requests_of_a_client_are_abandoned_once_it_has_been_away_long_enough():
    """The time counts from the moment at which it was found missing; coming back begins anew, and the owner is never
    missing."""
    hub: Any = Connected(CLIENT, OTHER, AWAY)
    known = clients.Clients(hub)
    for name in (CLIENT, OTHER, AWAY):
        known.admit(f"{name}/out", Request(MINE, (3, 4)))
    assert known.abandoned(100.0) == []
    hub.names = [OTHER]
    for now in (100.0, 100.0 + clients.ABSENT_S - 0.1):
        assert known.abandoned(now) == []
    hub.names = [OTHER, AWAY]
    assert known.abandoned(100.0 + clients.ABSENT_S) == []
    hub.names = [OTHER]
    assert known.abandoned(200.0) == [] and known.abandoned(200.0 + clients.ABSENT_S) == [3]
