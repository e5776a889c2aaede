"""A key admits one peer: at its port, under its own names, and only as long as it is not taken away."""

from __future__ import annotations

import time

import pytest
import zmq

from actors.protocol.membership import Hello, Stop
from actors.transport import admission, work_meter
from actors.transport.admission import CLIENTS, Admission
from actors.transport.channel import Hub, Link
from actors.transport.keys import HubKeys, LinkKey, peer_of
from tests.actors.service_harness import KEYS, link_to
from tests.actors.transport.test_channel import far_address, greet

ALICE = LinkKey.made_for("alice", KEYS.of("client").hub)


@pytest.fixture
def open_as(hub):
    """A link to one of the hub's ports under any name, with the key of any peer."""
    links = []

    def open_(name, peer, address=hub.address) -> Link:
        links.append(Link(address, name, KEYS.of(peer)))
        return links[-1]

    yield open_
    for link in links:
        link.close()


@pytest.mark.parametrize(
    ("link", "peer"),
    [
        ("target-0#3/heart", "target-0"),
        ("draft2-1#0", "draft2-1"),
        ("client", "client"),
        ("client/out", "client"),
        ("client:alice", "client:alice"),
        ("client:alice:5f/out", "client:alice"),
        ("client:alice#1:x", "client:alice#1"),
        ("", ""),
    ],
)
def test_the_peer_of_a_link(link, peer):
    assert peer_of(link) == peer


def test_keys_differ_are_words_and_are_not_shown():
    keys = [KEYS.of(peer) for peer in KEYS.admitted]
    assert len({key.public for key in keys}) == len({key.private for key in keys}) == len(keys)
    assert LinkKey.read(f" {ALICE.text}\n") == ALICE and ALICE.text.startswith("alice.")
    assert ALICE.private.hex() not in repr(ALICE) and str(ALICE.private) not in repr(ALICE)
    assert str(KEYS.secret) not in repr(KEYS) and HubKeys(bytes(32)).of("client").hub != KEYS.of("client").hub
    for text in ("", "alice", ALICE.text[:-1], f"{ALICE.text}0", f"a b.{ALICE.text.partition('.')[2]}", "x" * 10**6):
        with pytest.raises(ValueError, match="not a key"):
            LinkKey.read(text)


@pytest.mark.parametrize("peer", ["client:1", "client:default"])
def test_the_key_of_a_client_does_not_open_the_port_of_ranks(hub, open_as, peer):
    for name in (peer, "client", "client/out", "target-0#0"):
        assert open_as(name, peer).is_refused(20.0)
    assert hub.receive(0.2) is None


def test_a_refusal_is_known_that_came_before_it_was_asked_for(hub, open_as):
    link = open_as("client:1", "client:1")
    time.sleep(0.3)
    assert link.is_refused(20.0)


@pytest.mark.parametrize("peer", ["client", "target-0"])
def test_keys_of_ranks_and_of_the_owner_do_not_open_the_port_of_clients(hub, open_as, peer):
    assert open_as(peer, peer, hub.client_address).is_refused(20.0)


@pytest.mark.extended
def test_whether_it_is_refused_may_be_asked_again_at_once():
    """As by a client that waits for its engine: ZeroMQ closes what watched the last attempt a moment later."""
    link = link_to("tcp://127.0.0.1:9", "client:1")
    assert not any(link.is_refused(0.0) for _ in range(300))
    link.close()


def await_refusals(hub, count):
    """Waits until so many records were refused; no other comes."""
    deadline = time.monotonic() + 30
    while hub.num_unreadable < count:
        assert hub.receive(0.05) is None and time.monotonic() < deadline


@pytest.mark.parametrize(
    ("peer", "names"),
    [
        ("client:1", ["client", "client/out", "client:2", "client:2:5f/out", "target-0#0", "draft-0#0/heart"]),
        ("target-0", ["client", "client/out", "target-1#0", "draft-0#0"]),
        ("draft-0", ["target-0#0", "client/out", "client:1"]),
    ],
)
def test_records_under_the_name_of_another_peer_are_refused(hub, open_as, peer, names):
    address = hub.client_address if peer == "client:1" else hub.address
    links = [open_as(name, peer, address) for name in names]
    for link in links:
        link.send(Stop("not mine"))
    await_refusals(hub, len(names))
    assert hub.num_unreadable == len(names) and hub.identities() == []
    own = open_as(peer, peer, address)
    greet(hub, own)


def test_a_client_takes_no_record_of_a_rank_by_its_name(hub, open_link, open_as):
    rank = open_link("target-0#0")
    greet(hub, rank)
    thief = open_as("target-0#0", "client:1", hub.client_address)
    thief.send(Hello())
    assert hub.receive(0.3) is None
    hub.send(["target-0#0"], Stop("yours"))
    assert rank.receive(20.0) == Stop("yours") and thief.receive(0.1) is None


def test_refused_records_under_another_name_cost_their_sender(hub, open_link, open_as, monkeypatch):
    monkeypatch.setattr(work_meter, "KEY_BURST_S", 100 * work_meter.RECEIVE_S)
    monkeypatch.setattr(work_meter, "KEY_SHARE", 0)
    thief = open_as("client:2", "client:1", hub.client_address)
    for _ in range(1000):
        thief.send(Hello())
    await_refusals(hub, 1000)
    greet(hub, open_link("client:2/out"))
    open_link("client:1").send(Hello())
    assert hub.receive(0.2) is None, "the thief has used up what it may send"


@pytest.mark.extended
def test_a_client_that_connects_too_often_is_not_answered_and_the_others_are(hub, open_link, monkeypatch):
    monkeypatch.setattr(admission, "CONNECTS_BURST", 2)
    monkeypatch.setattr(admission, "CONNECTS_PER_S", 0)
    greet(hub, *[open_link(f"client:1:{i}") for i in range(3)])
    late = open_link("client:1:late")
    late.send(Hello())
    greet(hub, open_link("client:2"), open_link("target-0"))
    assert hub.receive(0.3) is None
    hub._admission._connects.clear()
    deadline = time.monotonic() + 20
    while hub.receive(0.05) != ("client:1:late", Hello()):  # what it sent arrives with a later attempt
        assert time.monotonic() < deadline


def test_clients_are_added_and_taken_away_while_the_hub_runs(hub, open_link):
    first = open_link("client:1")
    greet(hub, first)
    refused = Link(hub.client_address, "client:alice", ALICE)
    assert refused.is_refused(20.0)
    hub.admit_clients({ALICE.public: "client:alice"})
    alice = Link(hub.client_address, "client:alice", ALICE)
    greet(hub, alice)
    assert first.is_refused(30.0), "its connection was closed, and the next one refused"
    first.send(Hello())
    assert hub.receive(0.2) is None
    hub.send(["client:1", "client:alice"], Stop("arrived"))
    assert alice.receive(20.0) == Stop("arrived") and first.receive(0.1) is None
    deadline = time.monotonic() + 30
    while "client:1" in hub.identities():
        assert time.monotonic() < deadline, "it counts as connected"
        hub.send(["client:1"], Hello())
    for link in (refused, alice):
        link.close()


def test_a_key_is_worthless_once_its_name_has_another(hub):
    """Also where the name was never missing: its connection is no longer that of the client."""
    hub.admit_clients({ALICE.public: "client:alice"})
    before = Link(hub.client_address, "client:alice", ALICE)
    greet(hub, before)
    new = LinkKey.made_for("alice", ALICE.hub)
    hub.admit_clients({new.public: "client:alice"})
    before.send(Hello())
    assert hub.receive(0.2) is None, "it was read under the name that it had"
    assert before.is_refused(30.0), "its connection was closed, and the next one refused"
    after = Link(hub.client_address, "client:alice", new)
    greet(hub, after)
    hub.send(["client:alice"], Stop("arrived"))
    assert after.receive(20.0) == Stop("arrived") and before.receive(0.1) is None
    for link in (before, after):
        link.close()


def test_a_link_that_was_refused_connects_once_its_key_is_admitted(hub):
    """As at the successor of a coordinator, which is sent the keys of clients a moment after it listens."""
    alice = Link(hub.client_address, "client:alice", ALICE)
    alice.send(Hello())
    assert alice.is_refused(20.0) and hub.receive(0.1) is None
    hub.admit_clients({ALICE.public: "client:alice"})
    deadline = time.monotonic() + 20
    while hub.receive(0.05) is None:
        assert time.monotonic() < deadline
        assert alice.receive(0.05) is None
        alice.send(Hello())
    hub.send(["client:alice"], Stop("arrived"))
    while (answer := alice.receive(1.0)) is None:
        assert time.monotonic() < deadline
    assert answer == Stop("arrived")
    alice.close()


def test_a_client_that_is_taken_away_while_its_handshake_is_answered_ends_no_thread():
    with zmq.Context() as context:
        answering = Admission(context, KEYS)
        with answering.asked, context.socket(zmq.REQ) as asker:
            asker.connect("inproc://zeromq.zap.01")
            key = KEYS.of("client:default").public
            asker.send_multipart((b"1.0", b"1", CLIENTS, b"127.0.0.1", b"", b"CURVE", key))
            answering.answer(lambda _: bool(answering.admit_clients({})) and False)
            assert asker.poll(10_000) and asker.recv_multipart()[2] == b"200", "its first record is refused"
            assert answering.peer(key.hex()) == ""


def test_a_client_in_the_same_process_is_taken_away_too():
    hub = Hub("tcp://127.0.0.1:*", KEYS, near=True)
    near, far = link_to(hub.client_address, "client:1"), link_to(far_address(hub), "target-0")
    greet(hub, near, far)
    hub.admit_clients({})
    near.send(Hello())
    far.send(Hello())
    assert hub.receive(20.0) == ("target-0", Hello()) and hub.receive(0.2) is None
    for end in (near, far, hub):
        end.close()
