"""Processes of one machine: who may connect, a peer that is frozen or killed, and bytes that are no frames."""

from __future__ import annotations

import os
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from actors.protocol.membership import Hello, Stop
from actors.protocol.messages import Abort, Report
from actors.transport import codec
from actors.transport.channel import Hub, Link, open_link
from actors.transport.keys import HubKeys
from actors.transport.local import LocalLink, socket_path
from tests.actors.service_harness import KEYS

ANY_PORT = "tcp://127.0.0.1:*"
NOBODY = 65534
NOT_CONNECTED, CLOSED, NOT_CLOSED = 1, 2, 3
PRELUDE = """
import sys, time
from actors.protocol.membership import Hello
from actors.protocol.messages import Abort
from actors.transport.channel import Hub, open_link
from tests.actors.service_harness import KEYS

folder, address = sys.argv[1:]
"""
ECHO_HUB = """
hub = Hub(address, KEYS, 30.0, folder=folder)
print(hub.address, flush=True)
while True:
    if (received := hub.receive(1.0)) is not None:
        hub.send([received[0]], received[1])
"""
ECHO_LINK = """
link = open_link(address, "target-1", KEYS.of("target-1"), folder=folder)
link.send(Hello())
while True:
    if (record := link.receive(1.0)) is not None:
        link.send(record)
"""


@pytest.fixture
def folder():
    with tempfile.TemporaryDirectory() as folder:
        yield folder


@pytest.fixture
def hub(folder):
    hub = Hub(ANY_PORT, KEYS, folder=folder)
    yield hub
    hub.close()


def link_of(hub, folder, name="target-0", keys=KEYS) -> LocalLink:
    link = open_link(hub.address, name, keys.of(name), folder=folder)
    assert isinstance(link, LocalLink)
    return link


def path_of(hub, folder) -> str:
    path = socket_path(folder, hub.address, KEYS.of("target-0").hub)
    assert path is not None
    return path


def serves(hub, link) -> bool:
    link.send(Hello())
    hub_has = hub.receive(10.0) == (link.identity, Hello())
    hub.send([link.identity], Stop("here"))
    return hub_has and link.receive(10.0) == Stop("here")


def is_closed(wire) -> bool:
    wire.settimeout(10.0)
    return not wire.recv(1)


def start_as_stranger(path) -> int:
    """A process of another user that connects; its exit code says what came of it."""
    if process := os.fork():
        return process
    result = 9
    try:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
        wire = socket.socket(socket.AF_UNIX)
        wire.settimeout(10.0)
        result = NOT_CONNECTED
        wire.connect(path)
        result = CLOSED
        wire.sendall(b"\0\0\0\0")
        result = NOT_CLOSED if wire.recv(1) else CLOSED
    finally:
        os._exit(result)


@contextmanager
def running(program, *arguments):
    """A process with this program, which is killed at the end."""
    command = [sys.executable, "-c", PRELUDE + program, *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


# --- who may connect --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [0o750, 0o701, 0o777])
def test_a_folder_that_others_can_enter_is_not_used(folder, mode):
    os.chmod(folder, mode)
    hub = Hub(ANY_PORT, KEYS, folder=folder)
    link = open_link(hub.address, "target-0", KEYS.of("target-0"), folder=folder)
    assert isinstance(link, Link) and os.listdir(folder) == [] and serves(hub, link)
    link.close()
    hub.close()


@pytest.mark.parametrize("place", ["a link to it", "of another user", "missing", "too long"])
def test_a_folder_that_is_not_this_users_own_is_not_used(folder, place):
    other = Path(folder, "other")
    if place == "a link to it":
        other.symlink_to(folder)
    elif place == "of another user":
        if os.getuid():
            pytest.skip("needs root")
        other.mkdir(0o700)
        os.chown(other, NOBODY, NOBODY)
    elif place == "too long":
        other = Path(folder, "x" * 90)
        other.mkdir(0o700)
    assert socket_path(str(other), "tcp://127.0.0.1:1", bytes(32)) is None
    assert socket_path(folder, "tcp://127.0.0.1:1", bytes(32)) is not None


@pytest.mark.skipif(os.getuid() != 0, reason="needs root")
@pytest.mark.parametrize("mode", [0o700, 0o711])
def test_another_user_is_not_let_in_even_if_the_folder_was_opened_since(hub, folder, mode):
    path = path_of(hub, folder)
    os.chmod(path, 0o777)
    os.chmod(folder, mode)
    stranger, ended = start_as_stranger(path), (0, 0)
    while not ended[0]:
        assert hub.receive(0.02) is None
        ended = os.waitpid(stranger, os.WNOHANG)
    assert os.waitstatus_to_exitcode(ended[1]) == (NOT_CONNECTED if mode == 0o700 else CLOSED)
    os.chmod(folder, 0o700)
    link = link_of(hub, folder)
    assert serves(hub, link)
    link.close()


@pytest.mark.extended
@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("target-0", KEYS.of("target-1")),
        ("target-0#1/heart", KEYS.of("draft-0")),
        ("client", KEYS.of("target-0")),
        ("client:1", KEYS.of("client:1")),
        ("stranger-0", KEYS.of("stranger-0")),
        ("target-0", HubKeys(bytes(32)).of("target-0")),
    ],
)
def test_a_link_needs_the_key_of_its_peer(hub, folder, name, key):
    """That of a client is none: clients have a port of their own, with limits."""
    link = LocalLink(path_of(hub, folder), name, key)
    link.send(Stop("foreign"))
    assert hub.receive(0.2) is None and hub.identities() == []
    done = threading.Event()

    def receive():
        while not done.is_set():
            assert hub.receive(0.02) is None

    refusing = threading.Thread(target=receive)
    refusing.start()
    assert link.is_refused(10.0)
    done.set()
    refusing.join()
    own = link_of(hub, folder)
    assert serves(hub, own) and not own.is_refused(0.05)
    own.close()
    link.close()


def test_a_hub_of_another_key_is_not_found(hub, folder):
    key = HubKeys(bytes(32)).of("target-0")
    link = open_link(hub.address, "target-0", key, folder=folder)
    assert isinstance(link, Link)
    link.close()


@pytest.mark.parametrize("sent", [b"", b"\1", struct.pack("=I", 3) + b"abc", b"\xff" * 40], ids=len)
def test_bytes_that_are_no_proof_are_not_read(hub, folder, sent):
    with socket.socket(socket.AF_UNIX) as wire:
        wire.connect(path_of(hub, folder))
        wire.sendall(sent)
        link = link_of(hub, folder)
        assert hub.receive(0.05) is None and serves(hub, link) and hub.identities() == ["target-0"]
        if len(sent) > 4:
            assert is_closed(wire)
        link.close()


# --- frames -----------------------------------------------------------------------------------------------------------


def test_a_frame_above_the_limit_ends_the_connection_and_nothing_else(hub, folder):
    link, other = link_of(hub, folder), link_of(hub, folder, "target-1")
    assert serves(hub, link) and serves(hub, other)
    link._post(b"\0" * (codec.LONGEST_TO_HUB + 1))
    assert hub.receive(0.2) is None
    assert serves(hub, other) and serves(hub, link) and hub.num_unreadable == 0
    link.close()
    other.close()


def test_what_cannot_be_read_is_counted_and_skipped(hub, folder):
    link = link_of(hub, folder)
    for _ in range(1000):
        link._post(b"torn")
    assert serves(hub, link) and hub.num_unreadable == 1000
    link.close()


def test_a_record_that_arrives_in_parts_is_one(hub, folder):
    link = link_of(hub, folder)
    payload = codec.CODEC.encode(Stop("in parts"))
    whole = struct.pack("=I", len(payload)) + payload
    for byte in whole:
        assert hub.receive(0) is None
        link._stream.wire.send(bytes([byte]))
    assert hub.receive(10.0) == ("target-0", Stop("in parts"))
    link.close()


def test_links_are_read_in_turn(hub, folder):
    flood, link = link_of(hub, folder), link_of(hub, folder, "target-1")
    assert serves(hub, flood) and serves(hub, link)
    for number in range(2000):
        flood.send(Abort(number))
    link.send(Hello())
    arrived = [hub.receive(10.0) for _ in range(10)]
    assert ("target-1", Hello()) in arrived
    flood.close()
    link.close()


def test_other_threads_send_while_one_receives(hub, folder):
    link, done = link_of(hub, folder), threading.Event()
    assert serves(hub, link)

    def receive():
        while not done.is_set():
            hub.receive(0.01)

    def send(first):
        for number in range(first, first + 500):
            hub.send(["target-0"], Abort(number))

    threads = [threading.Thread(target=send, args=(1000 * place,)) for place in range(3)]
    receiver = threading.Thread(target=receive)
    for thread in (receiver, *threads):
        thread.start()
    numbers = [link.receive(10.0).request_id for _ in range(1500)]
    assert sorted(numbers) == [1000 * place + k for place in range(3) for k in range(500)]
    assert all(
        [n for n in numbers if n // 1000 == place] == list(range(1000 * place, 1000 * place + 500))
        for place in range(3)
    )
    done.set()
    for thread in (receiver, *threads):
        thread.join()
    link.close()


# --- peers that stop --------------------------------------------------------------------------------------------------


@pytest.mark.extended
def test_a_frozen_peer_delays_no_other_and_reads_on_when_it_is_back(hub, folder):
    link = link_of(hub, folder)
    with running(ECHO_LINK, folder, hub.address) as peer:
        assert hub.receive(30.0) == ("target-1", Hello())
        os.kill(peer.pid, signal.SIGSTOP)
        for number in range(3000):
            hub.send(["target-1"], Abort(number))
            if number % 500 == 0:
                hub.send(["target-1"], Report({"x": "y" * 200_000}, ()))
        assert serves(hub, link)
        os.kill(peer.pid, signal.SIGCONT)
        numbers = []
        while len(numbers) < 3000:
            _, record = hub.receive(30.0)
            numbers += [record.request_id] if isinstance(record, Abort) else []
        assert numbers == list(range(3000))
    link.close()


def test_what_exceeds_the_queue_of_a_frozen_peer_is_lost(hub, folder, monkeypatch):
    monkeypatch.setattr(codec, "MOST_QUEUED", 100)
    link = link_of(hub, folder)
    assert serves(hub, link)
    for number in range(20_000):
        hub.send(["target-0"], Abort(number))
    numbers = []
    while (record := link.receive(0.5)) is not None:
        numbers.append(record.request_id)
    assert 100 <= len(numbers) < 20_000 and numbers == sorted(numbers)
    assert serves(hub, link)
    link.close()


@pytest.mark.extended
def test_a_killed_peer_is_gone_at_once_and_its_successor_takes_its_name(hub, folder):
    for _ in range(2):
        with running(ECHO_LINK, folder, hub.address) as peer:
            assert hub.receive(30.0) == ("target-1", Hello())
            hub.send(["target-1"], Abort(1))
            assert hub.receive(30.0) == ("target-1", Abort(1))
            peer.kill()
            peer.wait()
            assert hub.receive(0.05) is None and hub.identities() == []
            hub.send(["target-1"], Abort(2))


@pytest.mark.extended
def test_a_link_finds_the_successor_of_a_killed_hub(folder):
    with running(ECHO_HUB, folder, ANY_PORT) as first:
        address = first.stdout.readline().strip()
        link = open_link(address, "target-0", KEYS.of("target-0"), folder=folder)
        assert isinstance(link, LocalLink)
        link.send(Abort(1))
        assert link.receive(30.0) == Abort(1)
        os.kill(first.pid, signal.SIGKILL)
        first.wait()
        assert link.receive(0.05) is None
        for number in range(2, 5):
            link.send(Abort(number))
    assert len(os.listdir(folder)) == 1, "the socket of the one that was killed is still there"
    with running(ECHO_HUB, folder, address):
        assert [link.receive(30.0) for _ in range(3)] == [Abort(number) for number in range(2, 5)]
    link.close()


def test_a_link_that_was_closed_while_its_hub_was_away_does_not_come_back(folder, monkeypatch):
    monkeypatch.setattr("actors.transport.local.RECONNECT_MS", 300)
    first = Hub(ANY_PORT, KEYS, folder=folder)
    link = link_of(first, folder)
    assert serves(first, link)
    first.close()
    assert link.receive(0.05) is None
    link.close()
    with closing(Hub(first.address, KEYS, 30.0, folder=folder)) as second:
        assert second.receive(0.6) is None and second.identities() == []


def test_a_hub_leaves_nothing_behind(hub, folder):
    assert len(os.listdir(folder)) == 1
    hub.close()
    assert os.listdir(folder) == []
