"""Connections that send no records, and peers that stop reading, disturb no other link."""

from __future__ import annotations

import os
import socket
import time

import pytest

from actors.protocol.membership import Hello, Stop
from actors.protocol.messages import Abort, Report
from actors.transport.channel import CODEC, GREETING, pack
from actors.transport.framing import framed


def connect_raw(hub, *chunks):
    """A bare connection to the hub, and bytes sent over it."""
    host, _, port = hub.address.removeprefix("tcp://").rpartition(":")
    connection = socket.create_connection((host, int(port)))
    for chunk in chunks:
        connection.sendall(chunk)
    return connection


def greeting(identity):
    return framed(GREETING + identity)


def is_closed(connection):
    connection.settimeout(5.0)
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def serves(hub, link):
    link.send(Hello())
    return hub.receive(5.0) == (link.identity, Hello())


@pytest.mark.parametrize(
    "payload",
    [
        b"\xc1not msgpack",
        b"",
        b"\x92\x00\x90",
        b"\x92\xcd\x03\xe7\x90",
        CODEC.encode(Hello()),
        pack(Abort(3))[:-1] + b"x",
    ],
    ids=["bytes", "nothing", "no-fields", "no-such-record", "no-checksum", "torn"],
)
def test_what_cannot_be_read_is_counted_and_skipped(hub, payload):
    connection = connect_raw(hub, greeting(b"someone"), framed(payload), framed(pack(Abort(4))))
    assert hub.receive(5.0) == ("someone", Abort(4)) and hub.num_unreadable == 1
    connection.close()


@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HTTP/1.1\r\nHost: here\r\n\r\n",
        framed(b"hello"),
        framed(GREETING + b"\xff\xfe"),
        framed(GREETING + b"x" * 10_000),
        greeting(b"someone") + b"\xff\xff\xff\xff",
    ],
    ids=["http", "no-greeting", "no-text-name", "long-name", "long-frame"],
)
def test_a_connection_that_breaks_the_protocol_is_closed(hub, open_link, sent):
    connection = connect_raw(hub, sent)
    assert hub.receive(0.1) is None and hub.num_unreadable == 1
    assert is_closed(connection)
    assert serves(hub, open_link("client"))
    assert hub.num_unreadable == 1


def test_connections_without_a_greeting_are_bounded_in_number(hub, open_link):
    before = len(os.listdir("/proc/self/fd"))
    connections = []
    for _ in range(6):
        connections += [connect_raw(hub) for _ in range(50)]
        assert hub.receive(0.0) is None
    assert len(os.listdir("/proc/self/fd")) - before - len(connections) == 256 and is_closed(connections[0])
    assert serves(hub, open_link("client"))
    for connection in connections:
        connection.close()


def test_a_peer_that_reads_nothing_delays_no_other(hub, open_link):
    stopped, link = connect_raw(hub, greeting(b"target-0")), open_link("target-1")
    assert serves(hub, link)
    record, started = Report({"x": "y" * 1_000_000}, ()), time.monotonic()
    for _ in range(40):
        hub.send(["target-0"], record)
    hub.send(["target-0", "target-1"], Stop("arrived"))
    assert link.receive(5.0) == Stop("arrived") and time.monotonic() - started < 2.0
    stopped.close()
