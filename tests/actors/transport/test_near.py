"""Records between threads of one process: who handles them, in which order, and where an error goes."""

import itertools
import threading
import time
from contextlib import nullcontext
from typing import Any

import pytest

from actors.protocol.membership import Hello
from actors.protocol.messages import Abort
from actors.transport import near
from actors.transport.channel import Hub, open_link
from tests.actors.service_harness import KEYS

NUM_RECORDS = 400


@pytest.fixture
def hub():
    hub = Hub("tcp://127.0.0.1:*", KEYS, near=True)
    yield hub
    hub.close()


def link_to(hub, name):
    return open_link(hub.address, name, KEYS.of(name))


def test_a_record_is_handled_in_the_thread_that_sends_it_and_its_answer_is_there(hub):
    handled = []

    def handle(name, record):
        handled.append((threading.get_ident(), name))
        hub.send([name], record)

    hub.serve_near(handle)
    link = link_to(hub, "target-0")
    link.send(Abort(1))
    assert handled == [(threading.get_ident(), "target-0")]
    assert link.receive(0) == Abort(1) and hub.receive(0) is None


def test_records_of_many_threads_are_handled_one_at_a_time_in_the_order_of_each(hub):
    handled, at_once, lock = {}, [], threading.Lock()

    def handle(name, record):
        at_once.append(lock.acquire(blocking=False))
        handled.setdefault(name, []).append(record.request_id)
        lock.release()

    def send(link):
        for number in range(NUM_RECORDS):
            link.send(Abort(number))

    hub.serve_near(handle)
    links = [link_to(hub, f"target-{rank}") for rank in range(4)]
    threads = [threading.Thread(target=send, args=(link,)) for link in links]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(at_once) and len(at_once) == 4 * NUM_RECORDS
    assert handled == {link.identity: list(range(NUM_RECORDS)) for link in links}


def test_what_comes_during_a_turn_is_handled_at_its_end(hub):
    handled = []
    hub.serve_near(lambda _, record: handled.append(record))
    link = link_to(hub, "target-0")
    with hub.turn():
        link.send(Abort(1))
        assert not handled
    assert handled == [Abort(1)]


class LateLock:
    """A lock; what `before` does comes after the last look of the thread that releases it, and before it is free."""

    def __init__(self, before) -> None:
        self._lock = threading.Lock()
        self._before = iter(before)

    def acquire(self, blocking=True) -> bool:
        return self._lock.acquire(blocking)

    def release(self) -> None:
        if (do := next(self._before, None)) is not None:
            thread = threading.Thread(target=do)
            thread.start()
            thread.join()
        self._lock.release()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *error) -> None:
        self.release()


@pytest.mark.parametrize("is_turn", [False, True], ids=["handling", "turn"])
def test_what_comes_while_a_thread_leaves_is_handled_by_that_thread(hub, is_turn):
    handled = []
    hub.serve_near(lambda _, record: handled.append((threading.get_ident(), record)))
    link, late = link_to(hub, "target-0"), link_to(hub, "target-1")
    hub._near.turn = LateLock([lambda: late.send(Abort(2)), lambda: late.send(Abort(3))])
    with hub.turn() if is_turn else nullcontext():
        link.send(Abort(1))
    me = threading.get_ident()
    assert sorted(handled, key=str) == [(me, Abort(1)), (me, Abort(2)), (me, Abort(3))]


def test_an_error_is_the_receivers_and_what_follows_waits_for_the_next_one_to_handle(hub):
    def fail(_, record):
        raise RuntimeError(f"about {record}")

    link = link_to(hub, "target-0")
    hub.serve_near(fail)
    link.send(Abort(1))
    link.send(Abort(2))
    with pytest.raises(RuntimeError, match="about"):
        hub.receive(20.0)
    hub.serve_near(None)
    handled = []
    hub.serve_near(lambda _, record: handled.append(record))
    assert handled == [Abort(2)] and hub.receive(0) is None


def test_a_call_ends_the_wait_without_a_record(hub):
    received = []
    thread = threading.Thread(target=lambda: received.append(hub.receive(60.0)))
    thread.start()
    hub.wake()
    thread.join()
    assert received == [None]


def test_a_record_that_cannot_be_read_does_not_use_a_call_up(hub):
    """A client that sends such records without pause would else keep the thread that receives from what it is called
    for."""
    far = open_link(hub.address.replace("127.0.0.1", "localhost"), "target-1", KEYS.of("target-1"))
    far._post(b"garbage")
    assert hub._socket.poll(10_000)
    hub.wake()
    received = []
    thread = threading.Thread(target=lambda: received.append(hub.receive()))
    thread.start()
    thread.join(10.0)
    ended = [*received]
    hub.wake()
    thread.join()
    assert ended == [None] and hub.num_unreadable == 1
    far.close()


def test_a_record_to_another_process_is_sent_while_a_thread_waits_for_one(hub):
    far = open_link(hub.address.replace("127.0.0.1", "localhost"), "target-1", KEYS.of("target-1"))
    far.send(Hello())
    assert hub.receive(20.0) == ("target-1", Hello())
    thread = threading.Thread(target=lambda: hub.receive(60.0))
    thread.start()
    hub.send(["target-1"], Abort(7))
    assert far.receive(10.0) == Abort(7)
    hub.wake()
    thread.join()
    far.close()


def test_a_link_that_is_closed_or_replaced_has_nothing_any_more(hub):
    first, second = link_to(hub, "target-0"), link_to(hub, "target-0")
    second.send(Hello())
    assert hub.receive(20.0) == ("target-0", Hello()) and hub.identities() == ["target-0"]
    first.close()
    hub.send(["target-0"], Abort(1))
    assert second.receive(0) == Abort(1) and first.receive(0) is None
    second.close()
    hub.send(["target-0"], Abort(2))
    assert hub.identities() == [] and second.receive(0) is None


def test_a_reader_sleeps_through_what_may_wait_and_gets_all_in_order(hub, monkeypatch):
    monkeypatch.setattr(near, "HELD_S", 60.0)
    link = open_link(hub.address, "target-0", KEYS.of("target-0"), may_wait=lambda record: record.request_id < 10)
    hub.send(["target-0"], Abort(0))
    assert link.receive(0) == Abort(0), "it has got nothing yet"
    woken = []
    reader = threading.Thread(target=lambda: woken.append(link.receive(60.0)))
    reader.start()
    for number in range(3):
        hub.send(["target-0"], Abort(number))
    reader.join(0.05)
    assert reader.is_alive() and not woken, "what may wait wakes no thread"
    hub.send(["target-0"], Abort(10))
    reader.join()
    assert [*woken, *[link.receive(0) for _ in range(4)]] == [*map(Abort, (0, 1, 2, 10)), None]


def test_what_may_wait_is_there_for_a_reader_that_looks_and_after_a_while(hub, monkeypatch):
    monkeypatch.setattr(near, "HELD_S", 0.2)
    link = open_link(hub.address, "target-0", KEYS.of("target-0"), may_wait=lambda _: True)
    hub.send(["target-0"], Abort(1))
    hub.send(["target-0"], Abort(2))
    assert [link.receive(0) for _ in range(3)] == [Abort(1), Abort(2), None]
    woken, numbers = [], itertools.count()
    reader = threading.Thread(target=lambda: woken.append(link.receive(60.0)))
    reader.start()
    while reader.is_alive():
        hub.send(["target-0"], Abort(next(numbers)))
        time.sleep(0.01)
    records = [*woken, *iter(lambda: link.receive(0), None)]
    assert records == [*map(Abort, range(next(numbers)))]


def test_records_of_several_threads_come_in_the_order_of_each_whichever_may_wait(hub):
    link = open_link(hub.address, "target-0", KEYS.of("target-0"), may_wait=lambda record: record.request_id % 5)

    def send(sender):
        for number in range(NUM_RECORDS):
            hub.send(["target-0"], Abort(number * 4 + sender))

    threads = [threading.Thread(target=send, args=(sender,)) for sender in range(4)]
    for thread in threads:
        thread.start()
    records: list[Any] = [link.receive(1.0) for _ in range(4 * NUM_RECORDS)]
    for thread in threads:
        thread.join()
    assert link.receive(0) is None
    for sender in range(4):
        assert [one.request_id for one in records if one.request_id % 4 == sender] == [
            n * 4 + sender for n in range(NUM_RECORDS)
        ]
