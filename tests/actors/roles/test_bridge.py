"""Hidden states from one end of a bridge to the other, between threads, and what each end does when one goes."""

from __future__ import annotations

import logging
import threading
import time

import pytest
import torch

from actors.drafters.interface import FeatureRows
from actors.protocol.membership import Bridge
from actors.roles.bridge import FeatureReceiver, FeatureSender
from parallel.comm.group import PeerLost
from parallel.comm.rendezvous import connect_store, host_store, join

WAIT_S = 20.0
LOGGER = logging.getLogger("test")


@pytest.fixture
def store():
    return host_store()


@pytest.fixture
def ends(store):
    sender, receiver = (end("127.0.0.1", "cpu", LOGGER) for end in (FeatureSender, FeatureReceiver))
    meet(store, 3, sender, receiver)
    yield sender, receiver
    sender.close()
    receiver.close()


def meet(store, number, *ends) -> None:
    for end in ends:
        end.form(Bridge(number, ("127.0.0.1", store.port)))
    deadline = time.monotonic() + WAIT_S
    while any(end.number != number for end in ends) and time.monotonic() < deadline:
        time.sleep(0.005)
    assert [end.number for end in ends] == [number] * len(ends)


def features(*spans, seed=0):
    rows = torch.Generator().manual_seed(seed)
    return [FeatureRows(one, start, torch.randn(count, 5, generator=rows)) for one, start, count in spans]


def same(found, sent) -> bool:
    pairs = zip(found, sent, strict=True)
    return all((a.request_id, a.start) == (b.request_id, b.start) and torch.equal(a.rows, b.rows) for a, b in pairs)


def test_rows_arrive_as_they_were_sent_and_the_sender_never_waits(ends):
    sender, receiver = ends
    passes = [features((1, 0, 4), (2, 7, 1), seed=1), features((2, 8, 3), seed=2), features((1, 4, 1), seed=3)]
    exports = []
    for rows in passes:
        exports.append(sender.announce(rows, 3, 0))
        sender.send()
    assert [(one.number, one.num_rows, one.num_bytes) for one in exports] == [(1, 5, 100), (2, 3, 60), (3, 1, 20)]
    assert same(receiver.receive(exports[:2]), passes[0] + passes[1])
    last = features((1, 5, 2))
    export = sender.announce(last, 3, 2)
    sender.send()
    assert len(sender._sendings) == 2, "what was received is kept no longer"
    assert same(receiver.receive([exports[2], export]), passes[2] + last)


def test_unwanted_rows_are_received_and_dropped(ends):
    sender, receiver = ends
    rows = features((1, 0, 2), (2, 0, 3), (3, 0, 1))
    export = sender.announce(rows, 3, 0)
    sender.send()
    (first, _, last) = export.spans
    export.check(most_rows=6)
    unwanted = type(export)(export.bridge, export.number, export.size, export.dtype, (first, (None, 0, 3), last))
    assert same(receiver.receive([unwanted]), [rows[0], rows[2]])


def test_a_tensor_that_was_not_announced_is_noticed_before_it_is_received(ends):
    sender, receiver = ends
    exports = []
    for _ in range(2):
        exports.append(sender.announce(features((1, 0, 2)), 3, 0))
        sender.send()
    with pytest.raises(PeerLost, match="tensor 2 of bridge 3 follows 0"):
        receiver.receive(exports[1:])


def test_nothing_is_announced_for_another_bridge_than_the_one_that_stands(ends):
    sender, receiver = ends
    assert sender.announce(features((1, 0, 2)), 2, 0) is None and sender.number == 0
    with pytest.raises(PeerLost):
        receiver._rows(sender_export(2))


def sender_export(bridge):
    from actors.protocol.messages import FeatureExport

    return FeatureExport(bridge, 1, 5, "float32", ((1, 0, 2),))


def test_a_drafter_that_goes_costs_the_target_nothing_but_its_bridge(ends, store):
    sender, receiver = ends
    sender.announce(features((1, 0, 2000)), 3, 0)
    sender.send()
    receiver.close()
    deadline = time.monotonic() + WAIT_S
    while sender.number and time.monotonic() < deadline:  # the send that finds out may be a later one
        if sender.announce(features((1, 0, 2)), 3, 0) is not None:
            sender.send()
        time.sleep(0.01)
    assert sender.number == 0 and not sender._sendings
    meet(store, 4, sender, receiver)
    export = sender.announce(rows := features((1, 0, 2)), 4, 0)
    sender.send()
    assert export.number == 1 and same(receiver.receive([export]), rows)


def test_a_target_that_goes_ends_what_the_drafter_waits_for(ends):
    sender, receiver = ends
    export = sender.announce(features((1, 0, 2)), 3, 0)
    threading.Timer(0.05, sender.close).start()
    with pytest.raises(PeerLost):
        receiver.receive([export])


def test_an_end_that_left_its_epoch_does_not_stand_once_the_other_comes(store):
    sender, receiver = (end("127.0.0.1", "cpu", LOGGER) for end in (FeatureSender, FeatureReceiver))
    sender.form(Bridge(5, ("127.0.0.1", store.port)))
    sender.close()
    receiver.form(Bridge(5, ("127.0.0.1", store.port)))
    deadline = time.monotonic() + WAIT_S
    while any(thread.name == "bridge-5" for thread in threading.enumerate()) and time.monotonic() < deadline:
        time.sleep(0.005)
    assert sender.number == 0
    meet(store, 6, sender, receiver)
    receiver.close()


def test_every_rank_of_the_drafter_gets_the_rows(ends, store):
    sender, receiver = ends
    other = FeatureReceiver("127.0.0.1", "cpu", LOGGER)
    found = {}
    export = sender.announce(rows := features((1, 0, 3), (4, 2, 2)), 3, 0)
    sender.send()

    def main(rank, end):
        end.group = join(connect_store("127.0.0.1", store.port), "draft", 1, rank, 2, timeout_s=WAIT_S)
        found[rank] = end.receive([export])

    threads = [threading.Thread(target=main, args=place) for place in enumerate((receiver, other))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert same(found[0], rows) and same(found[1], rows)


def test_an_order_that_comes_again_does_not_break_the_bridge_that_stands(ends, store):
    for end in ends:
        for number in (2, 3):
            end.form(Bridge(number, ("127.0.0.1", store.port)))
    assert [end.number for end in ends] == [3, 3]
