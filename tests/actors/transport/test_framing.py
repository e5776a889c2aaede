"""Frames arrive whole and in order however the bytes are split, and a socket never connects to itself."""

from __future__ import annotations

import socket
import time
from pathlib import Path

import pytest

from actors.transport.framing import (
    ConnectionClosed,
    MalformedFrame,
    Poller,
    Stream,
    address_of,
    connect,
    framed,
    listen,
    resolve,
)


@pytest.fixture
def pair():
    """A stream, and the bare socket at the other end."""
    near, far = socket.socketpair()
    near.setblocking(False)
    stream = Stream(near, longest=100_000)
    yield stream, far
    stream.close()
    far.close()


def received(stream):
    frames = []
    while stream.fill():
        frames += stream.frames()
    return frames


@pytest.mark.parametrize("step", [1, 3, 5, 7, 64, 10_000])
def test_frames_come_whole_and_in_order_however_the_bytes_do(pair, step):
    stream, far = pair
    sent = [b"", b"a", b"bcd" * 30, b"", b"x" * 300]
    line = b"".join(framed(payload) for payload in sent)
    frames_read = []
    for begin in range(0, len(line), step):
        far.sendall(line[begin : begin + step])
        frames_read += received(stream)
    assert frames_read == sent


def test_frames_before_the_end_are_read_before_it(pair):
    stream, far = pair
    far.sendall(framed(b"last word") + framed(b"torn")[:-1])
    far.close()
    assert stream.fill() and list(stream.frames()) == [b"last word"]
    with pytest.raises(ConnectionClosed):
        stream.fill()


def test_a_frame_above_the_limit_is_malformed(pair):
    stream, far = pair
    far.sendall(framed(b"x") + framed(b"y" * 100_001)[:50])
    stream.fill()
    frames = stream.frames()
    assert next(frames) == b"x"
    with pytest.raises(MalformedFrame):
        next(frames)


def test_what_the_socket_does_not_take_waits_and_keeps_its_order(pair):
    stream, far = pair
    sent = [bytes([number]) * 50_000 for number in range(40)]
    started = time.monotonic()
    for payload in sent:
        stream.outgoing.append(framed(payload))
        stream.flush()
    assert stream.is_waiting and time.monotonic() - started < 1.0
    poller, line = Poller(), bytearray()
    poller.watch(stream.fileno(), writable=True)
    while len(line) < len(b"".join(map(framed, sent))):
        line += far.recv(1 << 16)
        if stream.is_waiting and poller.wait(0):
            stream.flush()
            poller.watch(stream.fileno(), writable=stream.is_waiting)
    assert line == b"".join(map(framed, sent)) and not poller.wait(0)
    poller.close()


def test_closing_does_not_discard_data_in_flight():
    """Closing a socket with unread bytes makes Linux send RST."""
    listener = listen("tcp://127.0.0.1:0", 3)
    far = socket.create_connection(listener.getsockname())
    accepted, _ = listener.accept()
    accepted.setblocking(False)
    stream = Stream(accepted)
    stream.outgoing.append(framed(b"last word"))
    stream.flush()
    far.sendall(framed(b"never read"))
    stream.close()
    assert far.recv(100) == framed(b"last word") and far.recv(100) == b""
    far.close()
    listener.close()


def test_a_socket_is_not_connected_to_itself():
    """Where no process listens, the kernel sooner or later chooses that port as the local one."""
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    place = resolve(f"tcp://127.0.0.1:{lowest + 2000}")
    for _ in range(30_000):
        connection = connect(place, 3)
        if connection is not None:
            assert connection.getsockname() != place[1]
            connection.close()


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:0", "tcp://127.0.0.1:*", "tcp://localhost:*", "tcp://[::1]:*"])
def test_an_address_is_that_of_its_listener(address):
    if "::1" in address and not socket.has_ipv6:
        pytest.skip("this machine has no IPv6")
    listener = listen(address, 3)
    connection = connect(resolve(address_of(listener)), 3)
    assert Poller().wait(0) == []
    assert connection.getpeername() == listener.getsockname()
    connection.close()
    listener.close()
