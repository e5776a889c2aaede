"""A coordinator service in its thread, and a link for each of its ranks and its client."""

from __future__ import annotations

import threading
import time
from typing import Any

from actors.coordinator.clients import CLIENT
from actors.coordinator.service import CoordinatorService
from actors.coordinator.spec import CoordinatorSpec
from actors.protocol.membership import Alive, Hello, Join, Ready, Recall, Stop
from actors.transport.channel import AnyLink, Hub, Link, open_link
from actors.transport.keys import HubKeys, peer_of

FACTS = {"kv_slots": 400, "max_model_len": 50, "vocab_size": 97}
WAIT_S = 30.0
_RANKS = [f"{role}-{rank}" for role in ("target", "draft", "draft2") for rank in range(4)]
KEYS = HubKeys(bytes(range(32)), (*_RANKS, "sender", "another", "client:1", "client:2", "client:other"))


def link_to(address, name, **options) -> Link:
    """A link with the key of its peer."""
    return Link(address, name, KEYS.of(peer_of(name)), **options)


class Stage:
    """A coordinator service in its thread; the test plays its ranks and its client over their links, as other processes
    or, if they are `near`, as threads of its own."""

    def __init__(self, target_ranks=1, draft_ranks=1, watches=(), *, near=False, pipeline="", **options) -> None:
        pipeline = pipeline or ("sync" if draft_ranks else "plain")
        spec = CoordinatorSpec(pipeline, 4, target_ranks, draft_ranks, (1,), **options)
        self.hub = Hub("tcp://127.0.0.1:*", KEYS, near=near)
        self.ranks = [f"{role}-{rank}" for role, size in spec.sizes.items() for rank in range(size)]
        names = {name: f"{name}#0" for name in self.ranks} | {CLIENT: CLIENT}
        self.links: dict[str, AnyLink] = {
            name: open_link(self.hub.address, link, KEYS.of(peer_of(link))) for name, link in names.items()
        }
        self.ended: list[object] = []
        self.ordered: dict[str, Join | Recall] = {}
        service = CoordinatorService(spec, self.hub, watches, ("127.0.0.1", 1) if spec.bridged else None)
        self.thread = threading.Thread(target=self.run_service, args=(service,))
        self.thread.start()

    def run_service(self, service) -> None:
        try:
            self.ended.append(service.run())
        except Exception as error:
            self.ended.append(error)

    def send(self, name, record) -> None:
        self.links[name].send(record)

    def receive(self, name, timeout_s=WAIT_S, *, heartbeats=False):
        """The next record; heartbeats of the coordinator only with `heartbeats`.

        An order that comes again is left out: it is repeated until an answer to it is seen, after 0.3 s.
        """
        deadline = time.monotonic() + timeout_s
        while (left := deadline - time.monotonic()) > 0:
            record = self.links[name].receive(left)
            if isinstance(record, Join | Recall):
                if record == self.ordered.get(name):
                    continue
                self.ordered[name] = record
            if heartbeats or not isinstance(record, Alive):
                return record

    def send_heartbeat(self, name, **state: Any) -> None:
        role, _, rank = name.partition("-")
        state = {"incarnation": 0, "pid": 7} | state
        self.send(name, Alive(role, int(rank), **state))

    def join(self, *names) -> int:
        """Play ranks that join an epoch; returns the epoch."""
        for name in names:
            self.send_heartbeat(name)
        for name in names:
            order = self.receive(name)
            assert isinstance(order, Join)
            role, _, rank = name.partition("-")
            self.send(name, Ready(role, int(rank), FACTS, order.epoch))
        return order.epoch

    def get_ready(self) -> list[Any]:
        for role in ("target", "draft"):
            if members := [name for name in self.ranks if name.startswith(role)]:
                self.join(*members)
        self.send(CLIENT, Hello())
        return [self.receive(CLIENT) for _ in self.ranks]

    def stop(self) -> None:
        if self.thread.is_alive():
            self.send(CLIENT, Stop("the test is over"))
        self.thread.join(WAIT_S)
        for link in self.links.values():
            link.close()
        self.hub.close()
