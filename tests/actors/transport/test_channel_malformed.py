"""Connections that are not authenticated send nothing, and peers that stop reading or send garbage disturb no other."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import socket
import termios
import time

import pytest
import zmq
from zmq.utils import z85

from actors.protocol.membership import Hello, Stop
from actors.protocol.messages import Abort, Report, Request
from actors.transport import channel, codec
from actors.transport.channel import CODEC, Hub, Link
from actors.transport.keys import HubKeys
from tests.actors.service_harness import KEYS, link_to


def connect_raw(hub, sent=b""):
    """A bare connection to the hub, and bytes sent over it."""
    host, _, port = hub.address.removeprefix("tcp://").rpartition(":")
    connection = socket.create_connection((host, int(port)))
    connection.sendall(sent)
    return connection


def is_closed(connection):
    connection.settimeout(5.0)
    try:
        while connection.recv(100):
            pass
    except ConnectionResetError:
        return True
    return True


def num_waiting(hub, link):
    """Bytes of a client's link that have arrived and that the hub has not read, at most 1000 too few."""
    connection = hub._guard._of_link.get(link.identity)  # None while a busy machine has it open another
    return connection.num_waiting(connection.opened_at) if connection is not None else 0


def is_taken(hub, link):
    """Whether ZeroMQ has taken from the kernel what arrived over a client's link."""
    connection = hub._guard._of_link.get(link.identity)
    return connection is not None and not any(fcntl.ioctl(connection.wire, termios.FIONREAD, bytes(4)))


def until(condition):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def serves(hub, link):
    link.send(Hello())
    return hub.receive(20.0) == (link.identity, Hello())


@pytest.mark.parametrize(
    "payload",
    [b"\xc1not msgpack", b"", b"\x00", b"\xff\x80", CODEC.encode(Stop("x"))[:-1]],
    ids=["bytes", "nothing", "no-fields", "no-such-record", "torn"],
)
def test_what_cannot_be_read_is_counted_logged_and_skipped(hub, open_link, payload, caplog):
    link = open_link("sender")
    with caplog.at_level(logging.WARNING):
        for _ in range(5):
            link._post(payload)
        link.send(Abort(4))
        assert hub.receive(20.0) == ("sender", Abort(4)) and hub.num_unreadable == 5
    (line,) = caplog.records
    assert line.getMessage() == "refused" and line.facts["sender"] == "sender"


@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HTTP/1.1\r\nHost: here\r\n\r\n",
        os.urandom(500),
        b"\xff" * 9,
        b"\xff" + b"\x00" * 7 + b"\x01\x7f" + b"\x03\x00" + b"NULL".ljust(20, b"\0") + b"\x00" * 32,
        b"\xff" + b"\x00" * 7 + b"\x01\x7f" + b"\x03\x00" + b"CURVE".ljust(20, b"\0") + b"\x00" * 32 + os.urandom(300),
        b"",
    ],
    ids=["http", "random", "signature", "no-authentication", "no-handshake", "silence"],
)
def test_a_connection_that_is_not_authenticated_in_time_is_closed(monkeypatch, sent):
    monkeypatch.setattr(channel, "HANDSHAKE_MS", 200)
    hub = Hub("tcp://127.0.0.1:*", KEYS)
    connection, link = connect_raw(hub, sent), link_to(hub.address, "client")
    assert serves(hub, link) and hub.receive(0.05) is None and is_closed(connection)
    link.close()
    hub.close()


@pytest.mark.extended
@pytest.mark.parametrize("mechanism", ["another hub", "another key", "none", "plain"])
def test_without_a_key_nothing_is_received_in_either_direction(hub, open_link, mechanism):
    with zmq.Context() as context, context.socket(zmq.DEALER) as other:
        other.linger, other.identity = 0, b"client"
        if "another" in mechanism:
            other.curve_publickey, other.curve_secretkey = zmq.curve_keypair()
            keys = KEYS if mechanism == "another key" else HubKeys(os.urandom(32))
            other.curve_serverkey = z85.encode(keys.of("client").hub)
        elif mechanism == "plain":
            other.plain_username, other.plain_password = b"client", KEYS.secret.hex().encode()
        other.connect(hub.address)
        for _ in range(3):
            other.send(CODEC.encode(Stop("foreign")))
        link = open_link("client")
        assert serves(hub, link) and hub.receive(0.3) is None
        hub.send(["client"], Stop("yours"))
        assert link.receive(20.0) == Stop("yours") and not other.poll(50)


@pytest.mark.parametrize("secret", [bytes(32), KEYS.secret], ids=["another hub", "a key that is not admitted"])
def test_a_link_knows_that_it_is_refused(hub, open_link, secret):
    link = Link(hub.address, "target-9", HubKeys(secret).of("target-9"))
    assert link.is_refused(20.0) and not open_link("another").is_refused(0.2)
    link.close()


def test_a_thousand_silent_connections_disturb_no_link(hub, open_link):
    link, connections = open_link("client"), []
    assert serves(hub, link)
    with contextlib.suppress(OSError):  # the backlog may be full
        for _ in range(1000):
            connections.append(connect_raw(hub))
    assert len(connections) > 100 and serves(hub, link) and serves(hub, open_link("another"))
    for connection in connections:
        connection.close()


def test_a_frame_above_the_limit_ends_the_connection_and_nothing_else(hub, open_link):
    link, other = open_link("client:1"), open_link("client:2")
    assert serves(hub, link) and serves(hub, other)
    link._post(b"\0" * (codec.LONGEST_TO_HUB + 1))
    assert serves(hub, other)
    until(lambda: serves(hub, link))  # what it sends before it knows that its connection has ended is lost
    assert hub.num_unreadable == 0


@pytest.mark.extended
def test_a_peer_that_reads_nothing_delays_no_other_and_fills_no_memory(hub, open_link):
    stopped, link = open_link("target-0"), open_link("target-1")
    assert serves(hub, stopped) and serves(hub, link)
    stopped._socket.rcvhwm = 1
    for _ in range(30_000):
        hub.send(["target-0"], Report({"x": "y" * 1000}, ()))
    hub.send(["target-0", "target-1"], Stop("arrived"))
    assert link.receive(60.0) == Stop("arrived")
    received = 0
    while stopped.receive(1.0 if received else 20.0) is not None:
        received += 1
    assert 100 < received < 30_000, "what exceeded the queue is lost"
    hub.send(["target-0"], Stop("again"))
    while (record := stopped.receive(20.0)) != Stop("again"):
        assert isinstance(record, Report), "what came late on a busy machine"


def test_a_peer_that_sends_without_pause_delays_no_other(hub, open_link):
    flood, link = open_link("client:1"), open_link("client:2")
    assert serves(hub, flood) and serves(hub, link)
    for number in range(10_000):
        flood.send(Abort(number))
    last = Request(1, (5,) * 3000)
    link.send(last)
    until(lambda: all(num_waiting(hub, one) > 1000 for one in (flood, link)))
    until(lambda: is_taken(hub, link))
    time.sleep(0.2)  # what ZeroMQ has taken is there to be received
    before = 0
    while hub.receive(20.0) != ("client:2", last):
        before += 1
    assert before < 100, "peers are read in turn"


def test_a_rank_is_read_however_many_invalid_records_it_sent(hub, open_link):
    link = open_link("target-0")
    for _ in range(1000):
        link._post(b"torn")
    assert serves(hub, link) and hub.num_unreadable == 1000
