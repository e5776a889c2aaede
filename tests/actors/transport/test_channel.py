"""Hub and link: multicast, unknown identities, a hub's successor, slow readers, and records of any size; over a network
and between processes of one machine."""

from __future__ import annotations

import socket
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack, contextmanager, suppress

import pytest
import zmq

from actors.protocol.leases import LeaseAnswer, LeaseOrder, LeaseQuery, LeaseTerms
from actors.protocol.membership import (
    Alive,
    Bridge,
    ClientKeys,
    Hello,
    Join,
    PassFailed,
    RankLost,
    Ready,
    Recall,
    RoleBack,
    RoleLost,
    Silent,
    Stop,
    Weights,
)
from actors.protocol.messages import (
    Abort,
    Admit,
    Commit,
    DraftBatch,
    DraftOrder,
    DraftPreview,
    DraftPreviewBatch,
    FeatureExport,
    Outputs,
    Proposal,
    ProposalBatch,
    Report,
    ReportOrder,
    Request,
    RequestStats,
    SamplingParams,
    SparseDistribution,
    Tokens,
    TokenTree,
    UpdateWeights,
    Verdict,
    VerdictBatch,
    VerifyBatch,
    VerifyItem,
    WeightsUpdated,
)
from actors.transport import channel, codec
from actors.transport.channel import CODEC, Hub, Link, open_link
from actors.transport.keys import HubKeys, is_client, peer_of
from actors.transport.local import LocalLink
from actors.transport.near import NearLink
from tests.actors.service_harness import KEYS, link_to

ANY_PORT = "tcp://127.0.0.1:*"
SAMPLING = SamplingParams(temperature=0.7, logit_bias=((3, -1.5),), bad_words=((1, 2), (3,)), stop=("é", "\n"), seed=9)
PROPOSAL = Proposal(
    5,
    1,
    3,
    2**64 - 1,
    TokenTree((7, 8, 9), (-1, 0, 0)),
    (0, 4, 4),
    (SparseDistribution((8, 9), (0.25, 0.75)), None, None),
)
RECORDS = [
    Request(5, (1, 2, 3), SAMPLING, "none"),
    Abort(5),
    Outputs((Tokens(5, 2, (7, 8), "stop", RequestStats(1, 2, 1, (0, 1), 3), "why"), Tokens(6, 0, (7,)))),
    DraftBatch(
        4, (Admit(5, 1, (1, 2, 3), 2, SAMPLING),), (Commit(5, 1, 3, (1,), (8, 9)),), (3, 4), (DraftOrder(5, 4),)
    ),
    ProposalBatch(4, (PROPOSAL,), 1.5, 2.5),
    DraftPreviewBatch((DraftPreview(5, 1, 3, 12345, TokenTree((9, 7, 8), (-1, 0, 0)), (0.0, -0.5, -1.5)),)),
    VerifyBatch(4, (), (), (6,), (VerifyItem(5, 1, PROPOSAL), VerifyItem(6, 8))),
    VerdictBatch(4, (Verdict(5, 1, 3, (2,), (11,)),), 1.5, 2.5, 3),
    Hello(),
    Ready("target", 1, {"device": "cpu", "cores": [0, 1], "load_s": 0.5, "kv_slots": 4096}),
    Alive("draft", 1, 2, 4711, 3, False, 17, True),
    Recall(4),
    Join(4, 17, ("127.0.0.1", 2345)),
    Bridge(4, ("127.0.0.1", 2345)),
    DraftBatch(5, exports=(FeatureExport(4, 1, 8, "bfloat16", ((5, 0, 3), (None, 2, 1))),)),
    RankLost("target", 1, 2),
    ClientKeys(((bytes(32), "alice"),)),
    RoleLost("draft2"),
    RoleBack("draft2"),
    Silent("target", 1, 2, 4711),
    PassFailed("target", 1, 2, 17, "RuntimeError: out of memory"),
    ReportOrder(True),
    Report({"num_tokens": 3, "acceptance_histogram": [1, 2]}, (("target", "verify", 0.0, 1.0, {"round": 1}),)),
    LeaseOrder(
        3, "tcp://127.0.0.1:2345", bytes(32), LeaseTerms("coupled", "tree", "digest"), 97, 50, 4, bytes(range(32))
    ),
    LeaseQuery(LeaseTerms("coupled", "branches"), 4),
    LeaseAnswer(3, 5.0, "no room"),
    UpdateWeights(Weights("run/step-3", 3)),
    WeightsUpdated(3, "lm_head.weight is missing", is_lost=False),
    Stop("closed"),
]


class Line:
    """Opens hubs and links that reach each other in one way."""

    def __init__(self, folder="") -> None:
        self._folder = folder

    def open_hub(self, address=ANY_PORT, **options) -> Hub:
        return Hub(address, KEYS, folder=self._folder, **options)

    def open_link(self, address, name, **options):
        link = open_link(address, name, KEYS.of(peer_of(name)), folder=self._folder, **options)
        assert isinstance(link, LocalLink) is bool(self._folder and not options and not is_client(name))
        return link

    def post(self, hub, name, payload) -> None:
        """Send bytes."""
        if self._folder:
            assert hub._local.send(name, payload)
        else:
            hub._post(name, payload)


@pytest.fixture(params=["network", "machine"])
def line(request):
    with tempfile.TemporaryDirectory() as folder:
        yield Line(folder if request.param == "machine" else "")


@pytest.fixture
def hub(line):
    hub = line.open_hub()
    yield hub
    hub.close()


@pytest.fixture
def open_end(line, hub):
    """Opens links to `hub`."""
    links = []

    def open_(identity):
        links.append(line.open_link(hub.client_address if is_client(identity) else hub.address, identity))
        return links[-1]

    yield open_
    for link in links:
        link.close()


def greet(hub, *links):
    """Wait until the hub has received a record of each link."""
    for link in links:
        link.send(Hello())
        assert hub.receive(30.0) == (link.identity, Hello())


def test_every_record_type_is_tested():
    assert {type(record) for record in RECORDS} == set(CODEC.record_types)


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: type(record).__name__)
def test_a_record_arrives_as_it_left(hub, open_end, record):
    link = open_end("target-0")
    link.send(record)
    assert hub.receive(30.0) == ("target-0", record)
    hub.send(["target-0"], record)
    assert link.receive(30.0) == record


def test_records_to_a_role_reach_every_rank_in_order(hub, open_end):
    links = [open_end(f"target-{rank}") for rank in range(3)]
    outsider = open_end("draft-0")
    greet(hub, *links, outsider)
    for round_ in range(20):
        hub.send([link.identity for link in links], DraftBatch(round_))
    for link in links:
        assert [link.receive(30.0).round for _ in range(20)] == list(range(20))
    assert outsider.receive(0.05) is None


def test_records_to_an_unknown_identity_are_lost_and_block_nothing(hub, open_end):
    hub.send(["unknown-0"], Stop())
    link = open_end("target-0")
    greet(hub, link)
    hub.send(["unknown-0", "target-0"], Stop("arrived"))
    assert link.receive(30.0) == Stop("arrived")


def test_a_link_without_a_hub_blocks_neither_on_sending_nor_on_closing():
    link = link_to("tcp://127.0.0.1:9", "client")
    for _ in range(3_000):
        link.send(Hello())
    assert link.receive(0.01) is None
    link.close()


def test_a_link_outlives_its_hub(line):
    hub = line.open_hub()
    link = line.open_link(hub.address, "target-0")
    greet(hub, link)
    hub.close()
    for _ in range(10):
        link.send(Hello())
    assert link.receive(0.01) is None
    link.close()


def test_what_a_hub_sent_last_is_read_though_more_was_sent_to_it_since(line):
    hub = line.open_hub()
    link = line.open_link(hub.address, "target-0")
    greet(hub, link)
    for number in range(3):
        hub.send(["target-0"], Abort(number))
    hub.send(["target-0"], Stop("closed"))
    hub.close()
    for _ in range(3):
        link.send(Hello())
    assert [link.receive(30.0) for _ in range(4)] == [*map(Abort, range(3)), Stop("closed")]
    link.close()


@pytest.mark.extended
def test_a_slow_reader_loses_nothing(hub, open_end):
    """More than the kernel buffers, either way: the sender keeps the rest."""
    link, count = open_end("client"), 3_000
    padding = tuple(range(2**31, 2**31 + 500))
    for request_id in range(count):
        link.send(Request(request_id, padding, SAMPLING))
    arrived = []
    while len(arrived) < count:
        arrived += [record.request_id for _, record in iter(lambda: hub.receive(0.0), None)]
    assert arrived == list(range(count))
    for position in range(count):
        hub.send(["client"], Outputs((Tokens(1, position, padding),)))
    arrived = []
    while len(arrived) < count:
        arrived += [record.tokens[0].position for record in iter(lambda: link.receive(0.0), None)]
    assert arrived == list(range(count))


def test_a_record_may_have_megabytes(hub, open_end):
    report = Report({}, tuple(("target", "verify", float(number), 1.0, {"round": number}) for number in range(50_000)))
    link, arrived = open_end("client"), []
    greet(hub, link)
    thread = threading.Thread(target=lambda: arrived.append(link.receive(60.0)))
    thread.start()
    hub.send(["client"], report)
    thread.join()
    assert arrived == [report] and len(CODEC.encode(report)) > 2_000_000


def test_a_link_finds_a_hub_that_opens_after_it():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
    link = link_to(address, "draft-0")
    link.send(Abort(1))
    late = threading.Timer(0.1, link.close)  # it lingers until there is a hub
    hub = Hub(address, KEYS, bind_wait_s=30.0)
    late.start()
    assert hub.receive(30.0) == ("draft-0", Abort(1))
    late.join()
    hub.close()


def test_a_hub_delivers_pending_records_before_it_closes(line, monkeypatch):
    monkeypatch.setattr(codec, "LINGER_MS", 60_000)  # a loaded machine takes longer than the default
    monkeypatch.setattr(channel, "GIVE_UP_MS", 60_000)  # and may keep ZeroMQ from answering for seconds
    hub = line.open_hub()
    link, arrived, record = line.open_link(hub.address, "client"), [], Report({"x": "y" * 20_000_000}, ())
    greet(hub, link)
    thread = threading.Thread(target=lambda: arrived.append(link.receive(60.0)))
    thread.start()
    hub.send(["client"], record)
    hub.close()
    thread.join()
    assert arrived == [record]
    link.close()


def test_a_link_skips_what_it_cannot_read(line, hub, open_end):
    link = open_end("target-0")
    greet(hub, link)
    line.post(hub, "target-0", b"torn")
    hub.send(["target-0"], Stop("arrived"))
    assert link.receive(30.0) == Stop("arrived") and link.num_unreadable == 1


def test_a_link_finds_the_successor_of_its_hub_at_the_same_port(line):
    hub = line.open_hub()
    link = line.open_link(hub.address, "target-0")
    beats = line.open_link(hub.address, "target-0/heart", keeps="newest")
    greet(hub, link, beats)
    with ExitStack() as stack:
        ended = [stack.enter_context(monitored(end)) for end in (link, beats) if isinstance(end, Link)]
        hub.close()
        assert all(monitor.poll(20_000) for monitor in ended), "what is sent before that may be lost"
    link.send(Abort(1))
    for round_ in range(50):
        beats.send(Recall(round_))
    successor = line.open_hub(hub.address, bind_wait_s=30.0)
    arrived = [successor.receive(30.0), successor.receive(30.0)]
    assert ("target-0", Abort(1)) in arrived and ("target-0/heart", Recall(49)) in arrived, "only the last beat matters"
    assert successor.receive(0.0) is None
    successor.send(["target-0"], Stop("again"))
    assert link.receive(30.0) == Stop("again")
    for end in (link, beats, successor):
        end.close()


@contextmanager
def monitored(link):
    """A socket that has something to read once the link's connection has ended."""
    with link._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED, f"inproc://end-of-{id(link)}") as monitor:
        yield monitor
        link._socket.disable_monitor()


def test_a_fraction_of_a_millisecond_is_waited_as_such(hub, open_end):
    """A busy machine makes some waits longer, but not thousands."""

    def waited_s(end):
        started = time.monotonic()
        assert end.receive(0.0003) is None
        return time.monotonic() - started

    for end in (hub, open_end("client")):
        waits = (waited_s(end) for _ in range(3_000))
        assert next((wait for wait in waits if wait < 0.0009), 0.0) >= 0.0003


def test_waiting_ends_with_the_time_or_with_a_record(hub, open_end):
    link = open_end("client")
    assert hub.receive(0.01) is None and link.receive(0.01) is None
    arrived = []
    thread = threading.Thread(target=lambda: arrived.append(hub.receive()))
    thread.start()
    link.send(Hello())
    thread.join(30.0)
    assert arrived == [("client", Hello())]


def test_a_port_in_use_is_one_clear_line():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            ValueError, match=rf"cannot listen on tcp://127\.0\.0\.1:{port}: .*; choose a free port"
        ) as caught:
            Hub(f"tcp://127.0.0.1:{port}", KEYS)
    assert "\n" not in str(caught.value)
    hub = Hub(f"tcp://127.0.0.1:{port}", KEYS)  # nothing of the failed one is left
    hub.close()


def test_a_hub_waits_for_a_port_that_its_predecessor_still_holds():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        release = threading.Timer(0.3, taken.close)
        release.start()
        hub = Hub(address, KEYS, bind_wait_s=20.0)
    assert hub.address == address
    hub.close()
    release.join()


def test_a_free_port_is_found():
    hub = Hub(ANY_PORT, KEYS)
    assert hub.address.startswith("tcp://127.0.0.1:") and int(hub.address.rpartition(":")[2]) > 0
    hub.close()


def test_a_process_that_was_cut_off_takes_its_name_over(hub, open_end):
    """Its first connection is still open at the hub, as if its end had not been noticed."""
    first = open_end("target-0")
    greet(hub, first)
    if isinstance(first, Link):
        first._socket.reconnect_ivl = -1  # it is gone, so it does not come back
    else:
        first._path = ""
    second = open_end("target-0")
    greet(hub, second)
    hub.send(["target-0"], Stop("arrived"))
    assert second.receive(30.0) == Stop("arrived") and first.receive(0.05) is None


def test_an_identity_counts_as_connected_until_a_record_for_it_is_lost(hub, open_end):
    link = open_end("client:1")
    greet(hub, link)
    assert hub.identities() == ["client:1"]
    link.close()
    deadline = time.monotonic() + 30
    while hub.identities():
        assert time.monotonic() < deadline
        hub.send(["client:1"], Hello())


# --- threads of one process ------------------------------------------------------------------------------------------


@pytest.fixture
def near_hub():
    hub = Hub(ANY_PORT, KEYS, near=True)
    yield hub
    hub.close()


def far_address(hub):
    """The same address in other words: what a link of another process connects to."""
    return hub.address.replace("127.0.0.1", "localhost")


def near_link(hub, name):
    link = open_link(hub.address, name, KEYS.of(name))
    assert isinstance(link, NearLink)
    return link


def test_a_hub_serves_threads_through_memory_and_others_through_the_network(near_hub):
    near, far = near_link(near_hub, "target-0"), link_to(far_address(near_hub), "target-1")
    greet(near_hub, near, far)
    for record in RECORDS:
        near_hub.send(["target-0", "target-1"], record)
        assert near.receive(30.0) is record
        assert far.receive(30.0) == record
    for number in range(500):
        far.send(Abort(number))
    near.send(Hello())
    before = 0
    while near_hub.receive(30.0) != (near.identity, Hello()):
        before += 1
    assert before < 500, "what others send does not delay the threads"
    assert near_hub.receive(30.0) == (far.identity, Abort(before))
    near.close()
    far.close()


@pytest.mark.parametrize("secret", [bytes(32), KEYS.secret], ids=["another hub", "the key of another"])
def test_a_thread_needs_a_key_too(near_hub, secret):
    link = open_link(near_hub.address, "target-0", HubKeys(secret).of("target-9"))
    assert isinstance(link, Link) and link.is_refused(20.0)
    link.send(Hello())
    assert near_hub.receive(0.05) is None
    link.close()


def test_a_near_link_outlives_its_hub_and_finds_the_next_one_of_its_process():
    hub = Hub(ANY_PORT, KEYS, near=True)
    link = near_link(hub, "target-0")
    greet(hub, link)
    hub.close()
    assert link.receive(0.01) is None
    link.send(Abort(1))
    successor = Hub(hub.address, KEYS, bind_wait_s=30.0, near=True)
    assert successor.receive(30.0) == ("target-0", Abort(1))
    successor.send(["target-0"], Stop("again"))
    assert link.receive(30.0) == Stop("again")
    link.close()
    successor.close()


def test_a_hub_is_closed_once_the_thread_that_receives_is_back():
    """Closing a socket in which another thread waits is not defined: ZeroMQ may end the process. The key is its own: a
    link of another test may still look for its hub, whose port this one has got."""
    hub, received = Hub(ANY_PORT, HubKeys(b"a key of its own".ljust(32))), []

    def receive() -> None:
        with suppress(zmq.ZMQError):
            while True:
                received.append(hub.receive(0.5))

    thread = threading.Thread(target=receive)
    thread.start()
    while not hub._in_use.locked():  # until it receives
        time.sleep(0.005)
    hub.close()
    thread.join()
    assert received[:1] == [None], "the call that was under way ended as if no record had come"


def test_a_thread_that_receives_again_does_not_keep_a_hub_from_closing():
    hub = Hub(ANY_PORT, KEYS)
    closing = threading.Thread(target=hub.close)
    with hub._in_use:  # as while a record is waited for
        closing.start()
        while not hub._is_closing:
            assert closing.is_alive()
        with pytest.raises(zmq.ZMQError):
            hub.receive(0.0)
    closing.join()


LOSE_A_LINK = """
import gc
from actors.transport.channel import Hub, Link
from actors.transport.keys import HubKeys

keys = HubKeys(bytes(32))
hub = Hub("tcp://127.0.0.1:*", keys)
holder = [Link(hub.client_address, "client", keys.of("client"))]
holder.append(holder)
del holder
gc.collect()
hub.close()
"""


def test_a_link_that_is_lost_without_being_closed_does_not_hang_its_process():
    """The context of a link in a cycle is collected before its sockets, for which it would wait."""
    subprocess.run([sys.executable, "-c", LOSE_A_LINK], check=True, timeout=60)
