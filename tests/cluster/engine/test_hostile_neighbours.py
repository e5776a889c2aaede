"""Hostile traffic at the port of a running engine: right tokens, no lost role, nothing runs without the secret."""

from __future__ import annotations

import os
import random
import socket
import threading
import time
from contextlib import suppress

import pytest
import zmq
from zmq.utils import z85

from actors.protocol.membership import Stop
from actors.protocol.messages import Outputs, Request, SamplingParams
from actors.transport.channel import CODEC, Link
from actors.transport.keys import HubKeys
from cluster import client as client_module
from cluster.engine import EngineError, connect
from tests.actors.transport.test_channel import RECORDS

PROMPTS = ["def median(values):", "x", "class Stack:\n    def push"]
GREEDY = SamplingParams(max_tokens=30, ignore_eos=True)
SIGNATURE = b"\xff" + bytes(8) + b"\x7f\x03\x00"
CURVE = SIGNATURE + b"CURVE".ljust(20, b"\0") + bytes(32)


class Capture:
    """Forwards between one client and the engine, and keeps what the client sends; `flips` a bit in some chunks."""

    def __init__(self, address) -> None:
        self.flips, self.num_chunks = range(0), 0
        self.place = place_of(address)
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self.listener.getsockname()[1]}"
        self.sent: list[bytearray] = []
        self.start(self.accept)

    def start(self, work, *arguments) -> None:
        threading.Thread(target=work, args=arguments, daemon=True).start()

    def accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self.listener.accept()
                far = socket.create_connection(self.place)
                self.sent.append(bytearray())
                self.start(self.forward, near, far, self.sent[-1])
                self.start(self.forward, far, near, bytearray())

    def forward(self, source, to, kept) -> None:
        with suppress(OSError):
            while chunk := source.recv(1 << 16):
                kept += chunk
                self.num_chunks += 1
                if self.num_chunks in self.flips:
                    chunk = chunk[:-1] + bytes([chunk[-1] ^ 1])
                to.sendall(chunk)
        with suppress(OSError):
            to.shutdown(socket.SHUT_RDWR)


def place_of(address):
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    return host, int(port)


def say(address, *chunks, pause_s=0.0):
    """Bytes over a bare connection; what came back."""
    heard = b""
    with suppress(OSError), socket.create_connection(place_of(address)) as connection:
        connection.settimeout(0.3)
        for chunk in chunks:
            connection.sendall(chunk)
            time.sleep(pause_s)
        while chunk := connection.recv(1 << 16):
            heard += chunk
    return heard


def garbage(engine):
    chance = random.Random(0)
    for _ in range(40):
        say(engine.address, chance.randbytes(chance.randrange(1, 300)))


def huge_lengths(engine):
    for length in (2**31 - 1, 2**63, 2**64 - 1):
        frame = b"\x02" + (length % 2**64).to_bytes(8, "big")
        for begin in (b"", SIGNATURE, CURVE):
            say(engine.address, begin + frame + bytes(100), b"x" * 100_000)


def slow_loris(engine):
    held = [socket.create_connection(place_of(engine.address)) for _ in range(20)]
    for byte in CURVE[:12]:
        for connection in held:
            with suppress(OSError):
                connection.send(bytes([byte]))
        time.sleep(0.02)
    for connection in held:
        connection.close()


def thousand_connections(engine):
    held = []
    with suppress(OSError):  # the backlog may be full for a moment
        for _ in range(1000):
            held.append(socket.create_connection(place_of(engine.address), timeout=0.2))
    assert len(held) > 100
    for connection in held:
        connection.close()


def foreign_records(engine):
    """Every record under every name, without the secret: with another one, and without encryption."""
    with zmq.Context() as context:
        for is_curve in (True, False):
            for name in ("client", "client/out", "client:1", "target-0#0", "draft-0#0", "target-0#0/heart"):
                with context.socket(zmq.DEALER) as foreign:
                    foreign.linger, foreign.identity = 0, name.encode()
                    if is_curve:
                        foreign.curve_publickey, foreign.curve_secretkey = zmq.curve_keypair()
                        foreign.curve_serverkey = z85.encode(HubKeys(os.urandom(32)).of("client").hub)
                    foreign.connect(engine.address)
                    with suppress(zmq.Again):  # a connection that was refused already takes no more
                        for record in RECORDS:
                            foreign.send(CODEC.encode(record), zmq.NOBLOCK)
                    assert not foreign.poll(50), "a foreign client was answered"


def replays(engine):
    """What a client sent, again: its keys were those of its connection."""
    capture = Capture(engine.address)
    with connect(capture.address, engine.secret) as client:
        assert client.generate(["x"], GREEDY)
    capture.listener.close()
    assert len(capture.sent) == 2 and all(len(sent) > 300 for sent in capture.sent)
    for sent in capture.sent:
        pieces = [bytes(sent[i : i + 64]) for i in range(0, 400, 64)]
        heard = say(engine.address, bytes(sent)) + say(engine.address, *pieces)
        assert len(heard) < 2 * 400, "more than the greeting and the first step of a handshake"


ATTACKS = [garbage, huge_lengths, slow_loris, thousand_connections, foreign_records, replays]


def tokens_of(completions):
    return [completion.token_ids for completion in completions]


@pytest.mark.extended
def test_neighbours_without_the_secret_change_nothing(open_engine):
    engine = open_engine()
    plain = tokens_of(engine.generate(PROMPTS, GREEDY, drafter="none"))
    engine.report(reset=True)
    for strange in ATTACKS:
        failed: list[Exception] = []

        def attack(strange=strange, failed=failed):
            try:
                strange(engine)
            except Exception as error:
                failed.append(error)

        attacker = threading.Thread(target=attack)
        attacker.start()
        served = 0
        while attacker.is_alive() or not served:
            assert tokens_of(engine.generate(PROMPTS, GREEDY)) == plain, strange.__name__
            served += 1
        attacker.join()
        assert not failed, f"{strange.__name__}: {failed}"
    counters = engine.report().counters
    assert not engine.supervisor.incidents and not counters["num_role_losses"], "no role was lost"
    assert counters["num_unreadable"] == 0 and counters["num_stale"] == 0, "nothing of theirs was read"


@pytest.mark.extended
def test_a_client_can_neither_end_the_engine_nor_play_another(open_engine):
    engine = open_engine()
    plain = tokens_of(engine.generate(PROMPTS, GREEDY, drafter="none"))
    running = [engine.submit(prompt, GREEDY) for prompt in PROMPTS]
    by_network = engine.address.replace("127.0.0.1", "localhost")  # not through the memory of this process
    hostile = Link(by_network, "client:default:bad", engine._backend.keys.of("client:default"))
    for record in RECORDS:
        hostile.send(record)
    same = Request(running[0].request_id, tuple(running[0].prompt_token_ids), GREEDY)
    for record in (same, Request(1 << 50, (3, 10**9)), Stop("foreign")):
        hostile.send(record)
    for noise in (b"", b"\x00" * 50, os.urandom(1000)):
        hostile._post(noise)
    assert tokens_of(completion.result(30) for completion in running) == plain
    answers, deadline = [], time.monotonic() + 0.5
    while (left_s := deadline - time.monotonic()) > 0:
        record = hostile.receive(left_s)
        answers += record.tokens if isinstance(record, Outputs) else ()
    errors = {record.request_id: record.error for record in answers if record.finish_reason == "error"}
    assert "has" in errors[1 << 50]
    assert {record.request_id for record in answers} <= {*errors, same.request_id, 5}, "tokens of others"
    hostile.close()
    assert tokens_of(engine.generate(PROMPTS, GREEDY)) == plain
    counters = engine.report().counters
    assert counters["num_unreadable"] > 15 and not engine.supervisor.incidents and not counters["num_role_losses"]


@pytest.mark.extended
def test_a_bit_that_flips_on_the_way_ends_a_connection_and_changes_no_token(open_engine, monkeypatch):
    monkeypatch.setattr(client_module, "_RESUME_S", 0.5)
    engine = open_engine()
    plain = tokens_of(engine.generate(PROMPTS, GREEDY, drafter="none"))
    capture = Capture(engine.address)
    with connect(capture.address, engine.secret) as client:
        capture.flips = range(capture.num_chunks + 5, capture.num_chunks + 80, 25)
        for _ in range(3):
            assert tokens_of(client.generate(PROMPTS, GREEDY)) == plain
    capture.listener.close()
    assert len(capture.sent) > 2, "connections were made anew"
    assert engine.report().counters["num_unreadable"] == 0 and not engine.supervisor.incidents


def test_the_owner_of_the_engine_can_end_it(open_engine):
    """The control: what the others send would end it, were it read."""
    engine = open_engine("none")
    owner = Link(engine._backend.address, "client/out", engine._backend.keys.of("client"))
    owner.send(Stop("by its name"))
    with pytest.raises(EngineError, match="by its name"):
        engine.submit("x", SamplingParams(max_tokens=400, ignore_eos=True)).result(20)
    owner.close()


def test_the_secret_is_asked_for_and_its_file_is_private(open_engine, tmp_path, monkeypatch):
    from cluster.engine import Engine

    lines: list[str] = []
    config = open_engine("none").config
    with Engine(config, progress=lines.append, log_dir=tmp_path / "logs") as engine:
        file = tmp_path / "logs" / "secret"
        assert file.stat().st_mode & 0o777 == 0o600
        assert f"listening at {engine.address}, secret in {file}" in lines
        assert engine.secret not in "".join(lines) + repr(engine._backend._specs) + repr(engine)
        with pytest.raises(EngineError, match=r"^tcp://127\.0\.0\.1:\d+: the engine there does not admit this key"):
            connect(engine.address, "default." + "ab" * 64)
        with pytest.raises(ValueError, match=r"^SPECDEC_SECRET: no key of a client there \(\w+\); give the file"):
            connect(engine.address)
        monkeypatch.setenv("SPECDEC_SECRET", str(file))
        with connect(engine.address) as client, connect(engine.address, file) as other:
            assert tokens_of(client.generate(["x"], GREEDY)) == tokens_of(other.generate(["x"], GREEDY))
        for log in (tmp_path / "logs").glob("*.log"):
            assert engine.secret not in log.read_text() and str(engine._backend.keys.secret) not in log.read_text()
    assert not file.exists()
