"""What a client sends to the coordinator's hub and to a successor of it, over a line in memory.

Its reader thread runs; `hear` returns once it has read a record, so that what it sends can be counted.
"""

from __future__ import annotations

import queue
import random
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest

from actors.coordinator.stats import CoordinatorStats
from actors.protocol.membership import Alive, Hello
from actors.protocol.messages import Abort, ReportOrder, Request, SamplingParams, Tokens
from cluster import client as module
from cluster.client import Client
from cluster.io.text import load_tokenizer

READY = {"target-0": SimpleNamespace(facts={"max_model_len": 99, "vocab_size": 97})}


class Line:
    """A connection whose other end is the test."""

    address = "tcp://here:1"

    def __init__(self) -> None:
        self.sent: list[object] = []
        self._coming: queue.Queue[object] = queue.Queue()
        self._is_read = False

    def send(self, record) -> None:
        self.sent.append(record)

    def receive(self, timeout_s):
        if self._is_read:
            self._coming.task_done()
        try:
            record = self._coming.get(timeout=timeout_s)
        except queue.Empty:
            self._is_read = False
            return None
        self._is_read = True
        return record

    def close(self) -> None:
        """Nothing is open."""

    def hear(self, record) -> list[object]:
        """What the client sends because of this record."""
        self.sent.clear()
        self._coming.put(record)
        self._coming.join()
        return list(self.sent)


@pytest.fixture
def opened(tiny_checkpoint, monkeypatch):
    """A client and its line; time alone makes it send nothing."""
    monkeypatch.setattr(module, "_RESUME_S", 1e9)
    line = Line()
    tokenizer = load_tokenizer(tiny_checkpoint("Llama"))
    with Client(line, tokenizer, SamplingParams(max_tokens=50), ready=READY) as client:
        yield client, line


def heartbeat(incarnation: int, *, waiting: bool = False) -> Alive:
    return Alive("coordinator", 0, incarnation, 7, waiting=waiting)


@pytest.mark.parametrize("seed", range(20))
def test_a_successor_is_sent_what_is_live_once_and_from_where_it_stands(opened, seed):
    client, line = opened
    draw, known = random.Random(seed), 0
    live: dict[int, tuple[Request, list[int]]] = {}
    aborted: set[int] = set()
    for _ in range(60):
        action = draw.choice(["submit", "tokens", "tokens", "end", "abort", "heartbeat", "heartbeat"])
        if action == "submit":
            line.sent.clear()
            client.submit([draw.randrange(90) for _ in range(draw.randint(1, 4))])
            (request,) = line.sent
            live[request.request_id] = request, []
        elif action == "heartbeat":
            number, waiting = known + draw.choice([-1, 0, 1, 2]), draw.random() < 0.4
            heard = line.hear(heartbeat(number, waiting=waiting))
            if number <= known:
                assert heard == []
            elif waiting:
                assert heard == [Hello()], "it cannot take requests yet"
            else:
                known = number
                expected = [
                    record
                    for request, tokens in live.values()
                    for record in (
                        replace(request, generated=tuple(tokens)),
                        *[Abort(request.request_id)] * (request.request_id in aborted),
                    )
                ]
                assert heard == expected
        elif live:
            request_id = draw.choice(list(live))
            _, tokens = live[request_id]
            if action == "abort":
                line.sent.clear()
                client._live[request_id].abort()
                assert line.sent == [Abort(request_id)]
                aborted.add(request_id)
            else:
                news = tuple(draw.randrange(90) for _ in range(draw.randint(1, 3)))
                end = "length" if action == "end" else None
                assert line.hear(Tokens(request_id, len(tokens), news, end)) == []
                tokens += news
                if end is not None:
                    del live[request_id]


def test_a_gap_in_the_tokens_is_asked_for_again_and_old_tokens_are_not(opened):
    client, line = opened
    completion = client.submit([3, 4])
    (request,) = line.sent
    assert line.hear(Tokens(1, 0, (5, 6), None)) == []
    assert line.hear(Tokens(1, 1, (6, 7), None)) == [] and completion.token_ids == [5, 6, 7]
    assert line.hear(Tokens(1, 4, (9,), None)) == [replace(request, generated=(5, 6, 7))]
    assert completion.token_ids == [5, 6, 7]


def test_a_successor_is_asked_for_the_report_that_the_last_one_owed(opened):
    client, line = opened
    reports: list[object] = []
    asking = threading.Thread(target=lambda: reports.append(client.report(reset=True, phase="warm")))
    asking.start()
    while ReportOrder(True, "warm") not in line.sent:
        assert asking.is_alive()
    assert line.hear(heartbeat(1)) == [ReportOrder(True, "warm")]
    line.hear(report := CoordinatorStats(since=0.0).report(1.0))
    asking.join()
    assert reports == [report] and line.hear(heartbeat(2)) == []
