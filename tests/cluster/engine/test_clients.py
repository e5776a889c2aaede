"""Several clients of one engine, one of them in another process: each receives the tokens of plain decoding."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time

import pytest

from actors.coordinator import clients
from actors.drafters.lookup.suffix import SuffixDrafterConfig
from actors.drafters.scoped import Share
from actors.protocol.membership import ClientKeys
from actors.protocol.messages import SamplingParams
from actors.transport.keys import LinkKey
from cluster.engine import EngineError, connect

PROMPTS = ["def median(values):", "x", "class Stack:\n    def push"]
GREEDY = SamplingParams(max_tokens=40, ignore_eos=True)
LONG = SamplingParams(max_tokens=450, ignore_eos=True)
OF_OTHERS = SamplingParams(max_tokens=150, ignore_eos=True)
ELSEWHERE = """
import json, sys
from actors.protocol.messages import SamplingParams
from cluster.engine import connect
address, secret, prompts, count, times = json.loads(sys.argv[1])
with connect(address, secret) as client:
    print("connected", flush=True)
    for _ in range(times):
        made = client.generate(prompts, SamplingParams(max_tokens=count, ignore_eos=True))
        print(json.dumps([completion.token_ids for completion in made]), flush=True)
"""


@pytest.fixture
def start_client():
    """A client in another process, which prints a line when connected and one per repetition."""
    started = []

    def start(engine, count, times=1):
        arguments = json.dumps([engine.address, engine.secret, PROMPTS, count, times])
        command = [sys.executable, "-c", ELSEWHERE, arguments]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


def tokens_of(completions):
    return [completion.token_ids for completion in completions]


def until(condition):
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def connect_with_own_key(engine):
    """A client with another key than `engine.secret`."""
    first = LinkKey.read(engine.secret)
    other = LinkKey.made_for("other", first.hub)
    engine._connection.send(ClientKeys(((first.public, "default"), (other.public, "other"))))
    engine.report()  # which is sent behind it
    return connect(engine.address, other.text)


def exchange(engine, plain):
    """Requests of the owner and of a client in this process at the same time."""
    with connect(engine.address, engine.secret) as client:
        assert client.address == engine.address
        submitted = [one.submit(prompt, GREEDY) for prompt in PROMPTS for one in (engine, client)]
        assert tokens_of(completion.result(60) for completion in submitted[0::2]) == plain
        assert tokens_of(completion.result(60) for completion in submitted[1::2]) == plain
        assert submitted[1].text == submitted[0].text
        assert {one.request_id for one in submitted[1::2]} == {1, 2, 3}, "every client counts from one"
    assert tokens_of(engine.generate(PROMPTS, GREEDY)) == plain


def test_each_client_receives_the_tokens_of_plain_decoding(open_engine, start_client):
    with open_engine("none") as engine:
        plain = tokens_of(engine.generate(PROMPTS, GREEDY))
    engine = open_engine()
    elsewhere = start_client(engine, GREEDY.max_tokens, times=2)
    assert elsewhere.stdout.readline() == "connected\n"
    exchange(engine, plain)
    assert [json.loads(elsewhere.stdout.readline()) for _ in range(2)] == [plain] * 2
    assert elsewhere.wait(30) == 0


@pytest.mark.extended
@pytest.mark.parametrize("share", Share)
def test_acceptance_tells_no_client_what_another_asked(open_engine, share):
    """The second request for a text is drafted from the answer to the first, if both are of one client."""
    engine = open_engine(SuffixDrafterConfig(share=share))
    with connect(engine.address, engine.secret) as client, connect_with_own_key(engine) as other:
        asked = [one.generate(PROMPTS[:1], GREEDY)[0] for one in (client, other, client)]
        assert len({tuple(one.token_ids) for one in asked}) == 1
        first, of_other, again = [(one.stats.num_draft_tokens, one.stats.num_accepted_tokens) for one in asked]
    assert again[1] > first[1]
    assert (of_other == first) is (share is Share.client)


@pytest.mark.slow
def test_a_client_that_dies_does_not_disturb_the_others(open_engine, start_client, monkeypatch):
    monkeypatch.setattr(clients, "ABSENT_S", 0.1)
    with open_engine("none") as engine:
        plain = tokens_of(engine.generate(PROMPTS, OF_OTHERS))
    engine = open_engine()
    elsewhere = start_client(engine, LONG.max_tokens)
    assert elsewhere.stdout.readline() == "connected\n"
    submitted = [engine.submit(prompt, OF_OTHERS) for prompt in PROMPTS]
    prompt_tokens = sum(len(completion.prompt_token_ids) for completion in submitted)
    until(lambda: engine.report().counters["num_prompt_tokens"] == 2 * prompt_tokens)
    elsewhere.send_signal(signal.SIGKILL)
    assert tokens_of(completion.result(60) for completion in submitted) == plain
    until(lambda: engine.report().counters["num_requests_aborted"] == len(PROMPTS))
    assert tokens_of(engine.generate(PROMPTS, OF_OTHERS)) == plain


def test_a_client_outlives_neither_the_engine_nor_its_own_end(open_engine):
    engine = open_engine("none", pace_ms=10)
    client, other = connect(engine.address, engine.secret), connect(engine.address, engine.secret, sampling=GREEDY)
    completion = client.submit(PROMPTS[0], LONG)
    client.close()
    client.close()
    with pytest.raises(EngineError, match="^the client was closed$"):
        completion.result(0)
    assert len(other.generate(["x"])[0].token_ids) == GREEDY.max_tokens, "its own default"
    until(lambda: engine.report().counters["num_requests_aborted"] == 1)  # or its tokens are counted between reports
    assert other.report().counters["num_tokens"] == engine.report().counters["num_tokens"]
    running = other.submit(PROMPTS[0], LONG)
    engine.close()
    with pytest.raises(EngineError, match="^the engine was closed$"):
        running.result(10)
    other.close()


def test_without_an_engine_connecting_fails_after_its_timeout():
    with pytest.raises(EngineError, match=r"^tcp://127\.0\.0\.1:9: no engine answered within 0 s$"):
        connect("tcp://127.0.0.1:9", "default." + "01" * 64, timeout_s=0.3)


@pytest.mark.extended
def test_a_client_asks_the_successor_of_a_coordinator_again(open_engine, monkeypatch):
    from actors.coordinator.scheduler import Scheduler

    engine = open_engine()
    with connect(engine.address, engine.secret) as client:
        plain = tokens_of(client.generate(PROMPTS, GREEDY))
        right, calls = Scheduler.plan, iter(range(100_000))

        def wrong(self, *arguments):
            if next(calls) == 8:
                raise RuntimeError("broken")
            return right(self, *arguments)

        monkeypatch.setattr(Scheduler, "plan", wrong)
        submitted = [one.submit(prompt, GREEDY) for prompt in PROMPTS for one in (engine, client)]
        assert tokens_of(completion.result(60) for completion in submitted[0::2]) == plain
        assert tokens_of(completion.result(60) for completion in submitted[1::2]) == plain
    assert [incident.identity for incident in engine.supervisor.incidents] == ["coordinator"]
