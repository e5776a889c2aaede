"""A heart beats at its interval whatever arrives, passes on orders alone, and closes its link as it stops."""

from __future__ import annotations

import queue
import threading
import time
from dataclasses import replace
from itertools import pairwise

import pytest

from actors.protocol.membership import Alive, Bridge, Join, Recall, Stop
from actors.worker import heartbeat
from actors.worker.heartbeat import Heartbeat

STATUS = Alive("draft", 1, 2, 4711, epoch=3, waiting=False, round=17, busy=True)


class Line:
    """A link whose other end is the test."""

    def __init__(self):
        self.to_rank, self.to_hub = queue.Queue(), queue.Queue()
        self.threads, self.closed_by = set(), None

    def receive(self, timeout_s):
        self.threads.add(threading.current_thread().name)
        try:
            return self.to_rank.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def send(self, record):
        self.to_hub.put((time.monotonic(), record))

    def close(self):
        self.closed_by = threading.current_thread().name


@pytest.fixture
def line(monkeypatch):
    monkeypatch.setattr(heartbeat, "HEARTBEAT_S", 0.03)
    return Line()


def test_the_present_status_is_sent_at_intervals(line):
    began, rounds = time.monotonic(), iter(range(1000))
    heart = Heartbeat(line, lambda: replace(STATUS, round=next(rounds)), lambda _: None)
    beats = [line.to_hub.get(timeout=20) for _ in range(4)]
    heart.stop()
    times = [began, *(at for at, _ in beats)]
    assert all(later - earlier >= 0.03 for earlier, later in pairwise(times))
    assert [beat.round for _, beat in beats] == [1, 2, 3, 4], "asked anew for each, after one for the thread's name"
    assert line.threads == {"heart-draft-1"} == {line.closed_by}


def test_orders_are_passed_on_and_delay_no_beat(line):
    heard = queue.Queue()
    heart = Heartbeat(line, lambda: STATUS, heard.put)
    orders = [Recall(4), Bridge(2, ("127.0.0.1", 1)), Recall(5)]
    for record in (Join(9, 0), orders[0], Join(9, 0), *orders[1:]):
        line.to_rank.put(record)
    assert [heard.get(timeout=20) for _ in orders] == orders
    end = threading.Event()
    flood = threading.Thread(
        target=lambda: [line.to_rank.put(Join(9, 0)) or end.wait(0.001) for _ in iter(end.is_set, True)]
    )
    flood.start()
    beats = [line.to_hub.get(timeout=20) for _ in range(3)]
    end.set()
    flood.join()
    heart.stop()
    assert all(beat == STATUS for _, beat in beats) and heard.empty(), "other records are none of its business"


def test_nothing_is_sent_after_the_stop(line):
    heart = Heartbeat(line, lambda: STATUS, lambda _: None)
    heart.stop()
    assert line.closed_by == "heart-draft-1"
    while not line.to_hub.empty():
        line.to_hub.get()
    time.sleep(0.08)
    assert line.to_hub.empty()


def test_the_end_of_the_session_ends_it_before_the_next_beat(line, monkeypatch):
    monkeypatch.setattr(heartbeat, "HEARTBEAT_S", 1e6)
    heart = Heartbeat(line, lambda: STATUS, lambda _: None)
    line.to_rank.put(Stop())
    heart.stop()
    assert line.closed_by == "heart-draft-1" and line.to_hub.empty()
