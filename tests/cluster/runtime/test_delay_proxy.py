"""A line with a delay: what goes in comes out, in order, and not before its time."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from itertools import pairwise

import pytest

from actors.options import PipelineConfig, PipelineName
from actors.policy.draft_wait import DraftWait
from actors.protocol.messages import Abort
from actors.protocol.sampling_params import SamplingParams
from actors.transport.channel import Hub
from cluster.config.schema import ClusterConfig, ClusterName
from cluster.runtime.delay_proxy import Relay
from tests.actors.service_harness import KEYS, link_to

DELAY_S = 0.05
ANY_PORT = "tcp://127.0.0.1:*"


@pytest.fixture(scope="module", autouse=True)
def quick_ends() -> Iterator[None]:
    """In place of that of `tests/cluster/conftest.py`: a rank that sends several heartbeats while a record is on its
    way, or which a busy machine lets wait, seems to have missed it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("actors.coordinator.membership.MISSED_BEATS", 40)
        yield


@pytest.fixture
def line():
    hub = Hub(ANY_PORT, KEYS)
    relay = Relay(hub.address, DELAY_S, ANY_PORT)
    link = link_to(relay.address, "draft-0")
    yield hub, link
    link.close()
    relay.close()
    hub.close()


def test_records_arrive_late_in_order_and_under_the_name_of_the_rank(line):
    hub, link = line
    started = time.monotonic()
    for number in range(50):
        link.send(Abort(number))
    arrivals = [started]
    for number in range(50):
        assert hub.receive(timeout_s=10) == ("draft-0", Abort(number))
        arrivals.append(time.monotonic())
    num_waits = sum(later - earlier >= DELAY_S / 2 for earlier, later in pairwise(arrivals))
    assert arrivals[1] - started >= DELAY_S and num_waits < 25, "held back together, not one after the other"

    started = time.monotonic()
    hub.send(["draft-0"], Abort(7))
    assert link.receive(timeout_s=10) == Abort(7)
    assert time.monotonic() - started >= DELAY_S


def test_who_leaves_one_end_is_gone_at_the_other_behind_the_last_word(line):
    hub, link = line
    link.send(Abort(1))
    assert hub.receive(timeout_s=10) == ("draft-0", Abort(1))
    hub.send(["draft-0"], Abort(2))
    hub.close()
    assert link.receive(timeout_s=10) == Abort(2)
    successor, deadline = Hub(hub.address, KEYS, bind_wait_s=30.0), time.monotonic() + 30
    heard = None
    while heard is None and time.monotonic() < deadline:  # what it sends before it is connected anew may be lost
        link.send(Abort(3))
        heard = successor.receive(timeout_s=4 * DELAY_S)
    assert heard == ("draft-0", Abort(3))
    successor.close()


def test_a_relay_that_is_closed_listens_no_more_and_ends_its_connections():
    with socket.create_server(("127.0.0.1", 0)) as hub:
        relay = Relay(f"tcp://127.0.0.1:{hub.getsockname()[1]}", DELAY_S, ANY_PORT)
        place = ("127.0.0.1", int(relay.address.rpartition(":")[2]))
        with socket.create_connection(place) as link, hub.accept()[0] as at_hub:
            relay.close()
            for end in (link, at_hub):
                end.settimeout(10)
                assert end.recv(1) == b""
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(place)


FAR = PipelineConfig(PipelineName.tree, adaptive=False, local_drafter="ngram")


@pytest.mark.extended
def test_a_drafter_behind_a_slow_line_is_not_waited_for(open_engine, monkeypatch):
    prompts, sampling = ["def median(values):", "x"], SamplingParams(max_tokens=24, ignore_eos=True)
    expected = [completion.token_ids for completion in open_engine("none").generate(prompts, sampling)]
    asked = []
    monkeypatch.setattr(DraftWait, "wait_s", lambda wait, *counts, **parts: asked.append(counts) or 0.0)
    cluster = ClusterConfig(ClusterName.inprocess, oversubscribe=True, link_delay_ms=DELAY_S * 1e3)
    engine = open_engine("model", pipeline=FAR, cluster=cluster)
    assert [completion.token_ids for completion in engine.generate(prompts, sampling)] == expected
    counters = engine.report().counters
    by_source = counters["drafts_by_source"].values()
    assert sum(one["num_draft_tokens"] for one in by_source) == counters["num_draft_tokens"] > 0 and not asked


@pytest.mark.extended
@pytest.mark.parametrize("pipeline", [PipelineName.sync, pytest.param(PipelineName.branches, marks=pytest.mark.slow)])
def test_an_engine_with_a_slow_line_commits_the_same_tokens_later(open_engine, pipeline):
    prompts, sampling = ["def median(values):", "x"], SamplingParams(max_tokens=16, ignore_eos=True)
    expected = [completion.token_ids for completion in open_engine("none").generate(prompts, sampling)]
    cluster = ClusterConfig(ClusterName.inprocess, oversubscribe=True, link_delay_ms=DELAY_S * 1e3)
    engine = open_engine("model", pipeline=PipelineConfig(pipeline, adaptive=False), cluster=cluster)
    engine.report(reset=True)
    started = time.monotonic()
    assert [completion.token_ids for completion in engine.generate(prompts, sampling)] == expected
    rounds = engine.report().counters["num_spec_rounds"]
    if pipeline == PipelineName.sync:
        assert rounds and time.monotonic() - started >= 2 * DELAY_S * rounds / len(prompts)
