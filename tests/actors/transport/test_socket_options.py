"""Every socket of the control line has the limits that the module names, none what ZeroMQ does by default."""

from __future__ import annotations

import pytest
import zmq

from actors.protocol.messages import Request
from actors.transport import channel, client_limits, codec
from actors.transport.channel import CODEC, Hub
from tests.actors.service_harness import KEYS, link_to

COMMON = {
    zmq.LINGER: codec.LINGER_MS,
    zmq.SNDHWM: codec.MOST_QUEUED,
    zmq.RCVHWM: 0,
    zmq.HANDSHAKE_IVL: channel.HANDSHAKE_MS,
}


def check(socket, expected):
    assert {option.name: socket.get(option) for option in expected} == {
        option.name: value for option, value in expected.items()
    }


def test_both_ports_of_a_hub(hub):
    common = COMMON | {zmq.MAXMSGSIZE: codec.LONGEST_TO_HUB, zmq.CURVE_SERVER: 1, zmq.IPV6: 0}
    check(hub._socket, common | {zmq.ZAP_DOMAIN: b"ranks", zmq.AFFINITY: 1})
    of_clients = {zmq.RCVBUF: client_limits.RECEIVE_BUFFER}
    check(hub._client_socket, common | of_clients | {zmq.ZAP_DOMAIN: b"clients", zmq.AFFINITY: 2})


@pytest.mark.parametrize("keeps", ["all", "newest"])
def test_a_link(hub, keeps):
    link = link_to(hub.address, "target-0", keeps=keeps)
    expected = COMMON | {
        zmq.MAXMSGSIZE: codec.LONGEST_TO_LINK,
        zmq.RECONNECT_IVL: codec.RECONNECT_MS,
        zmq.CONNECT_TIMEOUT: channel.CONNECT_MS,
        zmq.HEARTBEAT_IVL: channel.BEAT_MS,
        zmq.HEARTBEAT_TIMEOUT: channel.GIVE_UP_MS,
        zmq.HEARTBEAT_TTL: channel.GIVE_UP_MS,
        zmq.IDENTITY: b"target-0",
        zmq.IPV6: 0,
    }
    check(link._socket, expected)
    link.close()


def test_addresses_of_the_next_version_of_ip(hub):
    link = link_to("tcp://[::1]:9", "target-0")
    assert link._socket.ipv6 == 1
    link.close()
    try:
        six = Hub("tcp://[::1]:*", KEYS)
    except ValueError:
        return  # the machine has none
    assert six.address.startswith("tcp://[::1]:") and six.client_address.startswith("tcp://[::1]:")
    assert six.address != six.client_address
    six.close()


def test_what_may_wait_for_the_hub_follows_from_the_longest_record(hub):
    before = hub._guard.most_waiting
    hub.limit_clients(12_345)
    assert hub._guard.most_waiting == client_limits.MOST_WAITING_BYTES + 2 * 12_345 < before


def test_the_longest_record_of_a_client_is_read_and_one_byte_more_is_not(hub, open_link):
    requests = [Request(1, (5,) * size) for size in (99, 100)]
    hub.limit_clients(len(CODEC.encode(requests[0])))
    link = open_link("client:1")
    for request in requests:
        link.send(request)
    assert hub.receive(20.0) == ("client:1", requests[0]) and hub.receive(0.2) is None and hub.num_unreadable == 1
