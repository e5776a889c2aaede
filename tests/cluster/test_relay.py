"""A line with a delay: what goes in comes out, in order, and not before its time."""

from __future__ import annotations

import itertools
import time

import pytest

from actors.messages import Abort
from actors.options import PipelineConfig, PipelineName
from actors.params import SamplingParams
from actors.wire import Hub, Link
from cluster.config import ClusterConfig, ClusterName
from cluster.relay import Relay

DELAY_S = 0.05
_names = itertools.count()


@pytest.fixture(params=["inproc", "tcp"])
def line(request):
    def address(what):
        return f"inproc://{what}-{next(_names)}" if request.param == "inproc" else "tcp://127.0.0.1:*"

    hub = Hub(address("hub"))
    relay = Relay(hub.address, DELAY_S, address("relay"))
    link = Link(relay.address, "draft-0")
    yield hub, link
    link.close()
    relay.close()
    hub.close()


def test_records_arrive_late_in_order_and_under_the_name_of_the_rank(line):
    hub, link = line
    started = time.monotonic()
    for number in range(50):
        link.send(Abort(number))
    received = [hub.receive(timeout_s=10) for _ in range(50)]
    assert received == [("draft-0", Abort(number)) for number in range(50)]
    assert DELAY_S <= time.monotonic() - started < 20 * DELAY_S, "held back together, not one after the other"

    started = time.monotonic()
    hub.send(["draft-0"], Abort(7))
    assert link.receive(timeout_s=10) == Abort(7)
    assert time.monotonic() - started >= DELAY_S


@pytest.mark.parametrize("pipeline", [PipelineName.sync, PipelineName.branches])
def test_an_engine_with_a_slow_line_commits_the_same_tokens_later(open_engine, pipeline):
    prompts, sampling = ["def median(values):", "x"], SamplingParams(max_tokens=16, ignore_eos=True)
    expected = [completion.token_ids for completion in open_engine("none").generate(prompts, sampling)]
    cluster = ClusterConfig(ClusterName.inprocess, oversubscribe=True, link_delay_ms=DELAY_S * 1e3)
    engine = open_engine("model", pipeline=PipelineConfig(pipeline), cluster=cluster)
    engine.report(reset=True)
    started = time.monotonic()
    assert [completion.token_ids for completion in engine.generate(prompts, sampling)] == expected
    rounds = engine.report().counters["num_spec_rounds"]
    if pipeline == PipelineName.sync:
        assert rounds and time.monotonic() - started >= 2 * DELAY_S * rounds / len(prompts)
