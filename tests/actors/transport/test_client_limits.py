"""A client costs the hub so much time and so many bytes and no more; it is served again once it keeps to that."""

from __future__ import annotations

import time

import pytest
import zmq

from actors.protocol.membership import Hello, Stop
from actors.protocol.messages import Abort, Report, Request
from actors.transport import channel, client_limits, work_meter
from actors.transport.channel import CODEC, Hub
from actors.transport.client_limits import wire_size
from actors.transport.work_meter import WorkMeter
from tests.actors.service_harness import KEYS, link_to
from tests.actors.transport.test_channel import greet
from tests.actors.transport.test_channel_malformed import until

NAMES = ("client:1", "client:2", "target-0")


def drained(end, count: int) -> list:
    """What comes until nothing does, so many records at least."""
    arrived: list = []
    while (record := end.receive(0.3 if len(arrived) >= count else 20.0)) is not None:
        arrived.append(record)
    return arrived


# --- towards the hub -------------------------------------------------------------------------------------------------


def test_a_record_that_is_longer_than_any_request_is_refused_unread(hub, open_link, monkeypatch):
    hub.limit_clients(1000)
    client, rank = open_link("client:1"), open_link("target-0")
    decoded: list[int] = []
    decode = CODEC.decode
    monkeypatch.setattr(CODEC, "decode", lambda payload: decoded.append(len(payload)) or decode(payload))
    long = Request(1, tuple(range(1000)))
    for link in (client, rank):
        link.send(long)
        link.send(Hello())
    arrived = [hub.receive(20.0) for _ in range(3)]
    assert ("client:1", long) not in arrived and ("target-0", long) in arrived and hub.num_unreadable == 1
    assert sum(size > 1000 for size in decoded) == 1


def test_a_message_of_several_frames_is_refused_however_small(hub, open_link):
    link = open_link("client:1")
    greet(hub, link)
    link._socket.send_multipart([CODEC.encode(Hello()), b""])
    greet(hub, link)
    assert hub.num_unreadable == 1


def test_the_connection_of_a_message_of_ever_more_frames_is_closed(hub, open_link):
    """There is no message before the last one, so the hub cannot read them: they would be kept until memory is full."""
    hub.limit_clients(10_000)
    link, other = open_link("client:1"), open_link("client:2")
    greet(hub, link, other)
    with link._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED) as monitor:
        link._socket.send_multipart([bytes(1 << 20)] * 300, copy=False)
        assert monitor.poll(60_000), "300 MiB were taken"
        link._socket.disable_monitor()
    greet(hub, other)
    assert hub.num_unreadable == 0


@pytest.mark.extended
def test_a_connection_with_all_that_may_wait_is_not_closed(hub, open_link):
    """Its long records wait while the hub does something else; none is lost."""
    hub.limit_clients(60_000)
    link = open_link("client:1")
    greet(hub, link)
    requests = [Request(number, tuple([70_000] * 9000)) for number in range(60)]
    with link._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED) as monitor:
        for request in requests:
            link.send(request)
        assert not monitor.poll(500)
        link._socket.disable_monitor()
    assert drained(hub, len(requests)) == [("client:1", request) for request in requests]


def send_unread(link, num_records: int = 18) -> None:
    for number in range(num_records):
        link.send(Request(number, tuple([70_000] * 2000)))  # 10,000 bytes


@pytest.mark.parametrize(("num_links", "is_too_much"), [(3, False), (6, True)])
def test_connections_of_one_key_may_have_so_much_waiting_together(hub, open_link, monkeypatch, num_links, is_too_much):
    monkeypatch.setattr(client_limits, "MOST_WAITING_BYTES", 200_000)
    hub.limit_clients(12_000)
    links = [open_link(f"client:1:{number}") for number in range(num_links)]
    greet(hub, *links)
    monitors = [link._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED) for link in links]
    for link in links:
        send_unread(link)
    deadline = time.monotonic() + (30 if is_too_much else 0.5)
    while not (is_closed := any(monitor.poll(10) for monitor in monitors)) and time.monotonic() < deadline:
        pass
    assert is_closed == is_too_much
    for link, monitor in zip(links, monitors, strict=True):
        link._socket.disable_monitor()
        monitor.close()


@pytest.mark.extended
def test_a_key_whose_closed_connections_left_much_gets_no_further_one_until_it_is_read(hub, open_link, monkeypatch):
    """Else what is left would grow with each connection that is closed."""
    monkeypatch.setattr(client_limits, "MOST_WAITING_BYTES", 200_000)
    monkeypatch.setattr(channel, "HANDSHAKE_MS", 300)
    hub.limit_clients(12_000)
    links = [link_to(hub.client_address, f"client:1:{number}") for number in range(6)]
    greet(hub, *links)
    (user_id,) = {connection.user_id for connection in hub._guard._connections.values()}
    for link in links:
        send_unread(link)
        link.close()
    until(lambda: hub._guard._is_full(user_id))  # all has arrived, and it is known that they are closed
    further, other = open_link("client:1:further"), open_link("client:2")
    monitors = [link._socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED) for link in (further, other)]
    for link in (further, other):
        link.send(Hello())
    assert monitors[1].poll(10_000) and not monitors[0].poll(700)
    arrived: set[str] = set()
    deadline = time.monotonic() + 20
    while not arrived >= {further.identity, other.identity} and time.monotonic() < deadline:
        arrived |= {identity for identity, _ in iter(lambda: hub.receive(0.1), None)}
    assert monitors[0].poll(0) and further.identity in arrived
    for link, monitor in zip((further, other), monitors, strict=True):
        link._socket.disable_monitor()
        monitor.close()


@pytest.mark.extended
def test_what_messages_take_on_their_way_is_counted_to_the_byte(hub, open_link):
    """Else connections that last would be closed, or be allowed ever more."""
    link = open_link("client:1")
    greet(hub, link)
    (connection,) = hub._guard._connections.values()
    client_limits_left = client_limits._CONNECTED_BYTES
    for number in range(500):
        link.send(Request(number, tuple([70_000] * (number % 100))))
        if number % 20 == 0:
            hub.receive(20.0)
    drained(hub, 500 - 25)
    assert -client_limits_left <= connection.num_waiting(connection.opened_at) < client_limits_left
    for number in range(500):
        hub.send(["client:1"], Request(number, tuple([70_000] * (number % 100))))
    assert len(drained(link, 500)) == 500
    connection.num_waiting(0.0)
    assert 0 <= connection.num_acked - connection.num_posted < client_limits_left


def test_a_client_that_sends_too_much_is_not_read_until_it_sends_less(hub, open_link, monkeypatch):
    monkeypatch.setattr(work_meter, "KEY_BURST_S", 100 * work_meter.RECEIVE_S)
    monkeypatch.setattr(work_meter, "KEY_SHARE", 0.01)
    flood, other = open_link("client:1"), open_link("client:2")
    greet(hub, other)
    for number in range(1000):
        flood.send(Abort(number))
    num_read, deadline = 0, time.monotonic() + 20
    while num_read + hub.num_unreadable < 1000:
        assert time.monotonic() < deadline
        num_read += hub.receive(0.05) is not None
    assert 0 < num_read < 900, "as many as its share of the time so far allows"
    greet(hub, other)
    while hub.receive(0.05) != ("client:1", Hello()):
        assert time.monotonic() < deadline
        flood.send(Hello())


def test_both_links_of_a_client_share_what_it_may_send(hub, open_link, monkeypatch):
    spend_all_on_the_first_record(monkeypatch)
    greet(hub, open_link("client:1"))
    open_link("client:1/out").send(Hello())
    deadline = time.monotonic() + 20
    while not hub.num_unreadable:
        assert hub.receive(0.05) is None and time.monotonic() < deadline
    assert hub.num_unreadable == 1


def test_refused_records_cost_time_too_and_ranks_may_send_anything(hub, open_link, monkeypatch):
    spend_all_on_the_first_record(monkeypatch)
    client, rank = open_link("client:1"), open_link("target-0")
    for link in (client, rank):
        for _ in range(3):
            link._post(b"torn")
        link.send(Hello())
    assert [hub.receive(20.0), hub.receive(0.3)] == [("target-0", Hello()), None]


def spend_all_on_the_first_record(monkeypatch) -> None:
    monkeypatch.setattr(work_meter, "KEY_BURST_S", 1e-9)
    monkeypatch.setattr(work_meter, "KEY_SHARE", 0)


# --- turns --------------------------------------------------------------------------------------------------


@pytest.fixture
def hub_without_time(monkeypatch):
    """Its first record of a client uses up the time of all of them, for ever."""
    monkeypatch.setattr(work_meter, "PORT_BURST_S", 1e-9)
    monkeypatch.setattr(work_meter, "PORT_SHARE", 0)
    hub = Hub("tcp://127.0.0.1:*", KEYS)
    yield hub
    hub.close()


def test_while_clients_have_had_their_time_the_others_are_read(hub_without_time):
    hub = hub_without_time
    one, other, rank = (link_to(*place) for place in zip([hub.client_address] * 2 + [hub.address], NAMES, strict=True))
    greet(hub, one)
    other.send(Hello())
    for _ in range(3):
        greet(hub, rank)
    assert hub.receive(0.3) is None and hub.num_unreadable == 0, "it waits, it is not lost"
    hub._meter = WorkMeter()
    assert hub.receive(20.0) == ("client:2", Hello())
    for link in (one, other, rank):
        link.close()


def test_what_ends_a_wait_does_not_end_the_pause_of_clients(hub, open_link):
    """A hub is woken for every record that another thread sends through it."""
    greet(hub, client := open_link("client:1"))
    client.send(Hello())
    assert hub._client_socket.poll(10_000)
    hub._meter._resume_at = time.monotonic() + 30.0
    hub.wake()
    assert hub.receive(60.0) is None
    hub._meter._resume_at = 0.0
    assert hub.receive(10.0) == ("client:1", Hello())


def test_the_work_for_a_record_counts_until_the_next_is_asked_for(hub, open_link, monkeypatch):
    clock = iter([10.0, 10.25, 20.0, 20.5])
    monkeypatch.setattr(work_meter.time, "thread_time", lambda: next(clock))
    greet(hub, open_link("client:1"))
    greet(hub, open_link("target-0"))
    greet(hub, open_link("client:2"))
    hub.receive(0.0)
    left = {client: bucket._left for client, bucket in hub._meter._keys.items()}
    spent = {client: work_meter.KEY_BURST_S - left_s - work_meter.RECEIVE_S for client, left_s in left.items()}
    assert spent == pytest.approx({"client:1": 0.25, "client:2": 0.5})


def test_ranks_are_read_before_clients(hub, open_link):
    flood, rank = open_link("client:1"), open_link("target-0")
    greet(hub, flood, rank)
    for number in range(2000):
        flood.send(Abort(number))
    rank.send(Hello())
    assert hub._socket.poll(20_000)
    time.sleep(0.2)  # let what is read ahead arrive
    assert hub.receive(20.0) == ("target-0", Hello())


# --- towards the client ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["client:1", "client"])
def test_bytes_wait_for_a_client_that_reads_nothing_only_up_to_a_limit(hub, open_link, monkeypatch, name):
    """The owner of the engine is the control."""
    monkeypatch.setattr(client_limits, "MOST_QUEUED_BYTES", 1 << 20)
    stopped, other = open_link(name), open_link("client:2")
    greet(hub, stopped, other)
    stopped._socket.rcvhwm = 1
    count, record = 300, Report({"x": "y" * 200_000}, ())
    for _ in range(count):
        hub.send([name], record)
    hub.send(["client:2"], Stop("arrived"))
    assert other.receive(20.0) == Stop("arrived")
    received, is_limited = 0, name == "client:1"
    while received < count and stopped.receive(0.5 if is_limited else 20.0) is not None:
        received += 1
    assert (received < count) == is_limited
    deadline = time.monotonic() + 20
    while stopped.receive(0.1) != Stop("again"):
        assert time.monotonic() < deadline
        hub.send([name], Stop("again"))


def test_the_size_of_a_frame_on_its_way_has_two_lengths_of_header():
    assert [wire_size(size) - size for size in (0, 222, 223, 10**6)] == [35, 35, 42, 42]
