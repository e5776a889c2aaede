"""Whoever finds the hub's port, and peers that stop reading: nobody else notices."""

from __future__ import annotations

import os
import socket
import time

import pytest

from actors.protocol.membership import Hello, Stop
from actors.protocol.messages import Abort, Report
from actors.transport.channel import CODEC, GREETING, pack
from actors.transport.framing import framed


def knock(hub, *chunks):
    """Connect and send bytes, as a stranger would."""
    host, _, port = hub.address.removeprefix("tcp://").rpartition(":")
    stranger = socket.create_connection((host, int(port)))
    for chunk in chunks:
        stranger.sendall(chunk)
    return stranger


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
    stranger = knock(hub, greeting(b"someone"), framed(payload), framed(pack(Abort(4))))
    assert hub.receive(5.0) == ("someone", Abort(4)) and hub.num_unreadable == 1
    stranger.close()


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\nHost: here\r\n\r\n",
        framed(b"hello"),
        framed(GREETING + b"\xff\xfe"),
        framed(GREETING + b"x" * 10_000),
        greeting(b"someone") + b"\xff\xff\xff\xff",
    ],
    ids=["http", "no-greeting", "no-text-name", "long-name", "long-frame"],
)
def test_who_does_not_speak_as_we_do_is_shown_the_door(hub, open_link, said):
    stranger = knock(hub, said)
    assert hub.receive(0.1) is None and hub.num_unreadable == 1
    assert is_closed(stranger)
    assert serves(hub, open_link("client"))
    assert hub.num_unreadable == 1


def test_strangers_who_say_nothing_crowd_nobody_out(hub, open_link):
    before = len(os.listdir("/proc/self/fd"))
    strangers = []
    for _ in range(6):
        strangers += [knock(hub) for _ in range(50)]
        assert hub.receive(0.0) is None
    assert len(os.listdir("/proc/self/fd")) - before - len(strangers) == 256 and is_closed(strangers[0])
    assert serves(hub, open_link("client"))
    for stranger in strangers:
        stranger.close()


def test_a_peer_that_reads_nothing_holds_up_nobody(hub, open_link):
    stopped, link = knock(hub, greeting(b"target-0")), open_link("target-1")
    assert serves(hub, link)
    record, started = Report({"x": "y" * 1_000_000}, ()), time.monotonic()
    for _ in range(40):
        hub.send(["target-0"], record)
    hub.send(["target-0", "target-1"], Stop("heard"))
    assert link.receive(5.0) == Stop("heard") and time.monotonic() - started < 2.0
    stopped.close()
