"""How a client reaches a coordinator: keys, greetings, the links it uses, and what it does without an answer."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from actors.protocol.membership import Hello, Ready, Stop
from actors.protocol.messages import Abort, Request, SamplingParams
from actors.transport import admission
from actors.transport.channel import Hub
from actors.transport.keys import FIRST_CLIENT, OUT, HubKeys, LinkKey
from cluster import client as module
from cluster.client import Connection, connect
from cluster.completion import EngineError

KEYS = HubKeys(b"k" * 32)
KEY = KEYS.of(FIRST_CLIENT)


class Coordinator:
    """A hub that a thread serves: what it `heard`, as (link, record), and what `answer` sends back for each record."""

    def __init__(self, answer: Callable[[Any], list[Any]] = lambda record: []) -> None:
        self._hub = Hub("tcp://127.0.0.1:*", KEYS)
        self.address = self._hub.client_address
        self.heard: list[tuple[str, Any]] = []
        self.falls_silent = False
        self._answer = answer
        self._changed = threading.Condition()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while not self._ended.is_set():
            if (received := self._hub.receive(0.01)) is not None:
                link, record = received
                with self._changed:  # before it is answered: who has the answer finds it here
                    self.heard.append((link, record))
                    self._changed.notify_all()
                for answer in () if self.falls_silent else self._answer(record):
                    self._hub.send([link], answer)

    def wait_for(self, *records: tuple[str, Any]) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: all(record in self.heard for record in records), 20), self.heard

    def close(self) -> None:
        self._ended.set()
        self._thread.join()
        self._hub.close()


@pytest.fixture
def serve():
    """Coordinators, and connections to them, closed at the end."""
    opened: list[Any] = []

    def open_(made: Any) -> Any:
        opened.append(made)
        return made

    yield open_
    for one in reversed(opened):
        one.close()


NAME = f"{FIRST_CLIENT}:7"


@pytest.fixture
def patient(monkeypatch):
    """Connections greet once, however long the answer takes."""
    monkeypatch.setattr(module, "_GREET_S", 1e9)


@pytest.mark.usefixtures("patient")
def test_a_connection_greets_on_its_name_and_sends_on_a_link_beside_it(serve):
    coordinator = serve(Coordinator(lambda record: [Stop("one")] if isinstance(record, Hello) else []))
    connection = serve(Connection(coordinator.address, NAME, KEY))
    connection.send(Abort(3))
    assert connection.receive(20.0) == Stop("one")
    coordinator.wait_for((NAME, Hello()), (NAME + OUT, Abort(3)))
    assert len(coordinator.heard) == 2 and connection.receive(0.05) is None
    assert not connection.is_refused()
    connection.close()
    connection.send(Abort(4))
    assert (NAME + OUT, Abort(4)) not in coordinator.heard, "what is sent after the end is dropped"


def test_a_hub_that_is_silent_is_greeted_again(serve, monkeypatch):
    monkeypatch.setattr(module, "_GREET_S", 0.03)
    coordinator = serve(Coordinator())
    connection = serve(Connection(coordinator.address, NAME, KEY))
    while [record for _, record in coordinator.heard].count(Hello()) < 4:
        assert connection.receive(0.01) is None
    monkeypatch.setattr(module, "_GREET_S", 1e9)
    sent: list[Any] = []
    monkeypatch.setattr(connection._receiver, "send", sent.append)
    assert connection.receive(0.3) is None and not sent, "not before that time"


@pytest.mark.usefixtures("patient")
def test_a_connection_follows_the_hub_to_its_new_address(serve):
    first, second = serve(Coordinator()), serve(Coordinator(lambda _: [Stop("two")]))
    connection = serve(Connection(first.address, NAME, KEY))
    first.wait_for((NAME, Hello()))
    connection.move(second.address)
    assert connection.address == second.address
    connection.send(Abort(5))
    assert connection.receive(20.0) == Stop("two")
    second.wait_for((NAME, Hello()), (NAME + OUT, Abort(5)))
    assert first.heard == [(NAME, Hello())]
    connection.close()
    connection.move(first.address)
    connection.send(Abort(6))
    assert connection.address == first.address and first.heard == [(NAME, Hello())], "a closed one stays closed"


@pytest.fixture
def engine(serve, tiny_checkpoint):
    """A coordinator that answers a greeting with what its ranks measured, the lead of the target the last of them."""
    facts = {"max_model_len": 99, "vocab_size": 97, "checkpoint": str(tiny_checkpoint("Llama"))}
    ranks = [Ready("draft", 0, {}), Ready("target", 1, {"checkpoint": "/nowhere"}), Ready("target", 0, facts)]
    return serve(Coordinator(lambda record: ranks if isinstance(record, Hello) else []))


@pytest.mark.parametrize("given", ["text", "file", "environment", "file in the environment"])
def test_a_key_is_a_text_or_a_file_given_or_in_the_environment(engine, tmp_path, monkeypatch, given):
    path = tmp_path / "secret"
    path.write_text(KEY.text + "\n")
    secret = {"text": KEY.text, "file": path}.get(given)
    monkeypatch.setenv(
        "SPECDEC_SECRET", {"environment": KEY.text, "file in the environment": str(path)}.get(given, "-")
    )
    with connect(engine.address, secret) as client:
        client.submit((3,))
        request = Request(1, (3,), SamplingParams())
        assert client.ready["target-0"].facts["vocab_size"] == 97 and client.address == engine.address
        while request not in [record for _, record in engine.heard]:
            assert client._reader.is_alive()
    assert {link.rpartition(":")[0] for link, _ in engine.heard} == {KEY.peer}


def test_two_clients_with_one_key_have_links_of_their_own(engine):
    with connect(engine.address, KEY.text), connect(engine.address, KEY.text):
        assert len({link for link, record in engine.heard if isinstance(record, Hello)}) == 2


def test_a_client_whose_key_connects_too_often_waits(engine, monkeypatch):
    """Its handshakes fail unanswered, which is no refusal of its key."""
    monkeypatch.setattr(admission, "CONNECTS_BURST", 2)
    monkeypatch.setattr(admission, "CONNECTS_PER_S", 1.0)
    with connect(engine.address, KEY.text), connect(engine.address, KEY.text) as late:
        assert late.ready["target-0"].facts["vocab_size"] == 97


def test_the_defaults_of_a_client_are_those_it_was_given(engine, tiny_checkpoint):
    sampling = SamplingParams(temperature=0.5, max_tokens=9)
    other = tiny_checkpoint("Llama", num_hidden_layers=1)
    with connect(engine.address, KEY.text, sampling=sampling, checkpoint=other) as client:
        assert client.submit((3,)).sampling == sampling
    with pytest.raises(ValueError, match="^target.path: .* has no tokenizer.json"):
        connect(engine.address, KEY.text, checkpoint=tiny_checkpoint("Llama") / "none")


def test_a_client_fails_after_the_same_time_without_a_heartbeat(engine, monkeypatch):
    monkeypatch.setattr(module, "_POLL_S", 0.01)
    with connect(engine.address, KEY.text, timeout_s=20.0) as client:
        assert client._silence_s == 20.0
        completion = client.submit((3,))
        engine.falls_silent, client._silence_s = True, 1.0
        with pytest.raises(EngineError, match=": no heartbeat of the engine for 1 s$"):
            completion.result(20)


def test_without_the_lead_of_the_target_or_with_another_key_no_client_is_made(serve, monkeypatch):
    monkeypatch.setattr(module, "_POLL_S", 0.05)
    others = serve(Coordinator(lambda _: [Ready("target", 1, {}), Ready("draft", 0, {})]))
    with pytest.raises(EngineError, match=f"^{others.address}: no engine answered within 1 s$"):
        connect(others.address, KEY.text, timeout_s=0.6)
    foreign = LinkKey.made_for("other", KEY.hub)
    with pytest.raises(EngineError, match=f"^{others.address}: the engine there does not admit this key; see SPECDEC_"):
        connect(others.address, foreign.text)


class Unanswered:
    """A connection that never hears anything, on a clock of its own; its key is refused at these times."""

    address = "tcp://here:1"

    def __init__(self, refused_at: dict[float, bool]) -> None:
        self.now = 0.0
        self._refused_at = refused_at

    def receive(self, timeout_s: float) -> None:
        assert 0 < timeout_s <= 0.5
        self.now = round(self.now + timeout_s, 3)

    def is_refused(self) -> bool:
        return self._refused_at.get(self.now, False)


@pytest.mark.parametrize(
    ("refused_at", "reason", "given_up_at"),
    [
        ([], "no engine answered within 3 s", 3.0),
        ([0.4], "no engine answered within 3 s", 3.0),
        ([0.4, 2.0], "no engine answered within 3 s", 3.0),
        ([0.4, 1.8], "the engine there does not admit this key; see SPECDEC_SECRET", 1.8),
        ([0.4, 2.0, 2.2], "the engine there does not admit this key; see SPECDEC_SECRET", 2.2),
    ],
    ids=["silent", "once", "too often", "refused", "refused later"],
)
def test_a_key_is_not_admitted_where_it_is_refused_twice_in_a_short_time(monkeypatch, refused_at, reason, given_up_at):
    """One that connects too often fails every two seconds at the most."""
    line: Any = Unanswered(dict.fromkeys(refused_at, True))
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: line.now))
    with pytest.raises(EngineError, match=f"^tcp://here:1: {reason}$"):
        module._first_ready(line, 3.0)
    assert line.now == given_up_at


@pytest.mark.parametrize("secret", [None, "", "short", "no/such/file"])
def test_what_is_no_key_is_refused_in_one_line(monkeypatch, secret):
    monkeypatch.delenv("SPECDEC_SECRET", raising=False)
    with pytest.raises(ValueError, match="^SPECDEC_SECRET: no key of a client there .*; give the file") as refusal:
        connect("tcp://127.0.0.1:9", secret)
    assert "\n" not in str(refusal.value) and refusal.value.__cause__ is not None
