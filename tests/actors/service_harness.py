"""A conductor in its thread, with a link for every part around it."""

from __future__ import annotations

import threading
import time

from actors.coordinator.clients import CLIENT
from actors.coordinator.service import CoordinatorService, CoordinatorSpec
from actors.protocol.membership import Alive, Hello, Join, Ready, Stop
from actors.transport.channel import Hub, Link

FACTS = {"kv_slots": 400, "max_model_len": 50}
WAIT_S = 10.0


class Stage:
    """A conductor in its thread, and a link for every part around it, spoken from the test."""

    def __init__(self, target_ranks=1, draft_ranks=1, watches=(), **options) -> None:
        pipeline = "sync" if draft_ranks else "plain"
        spec = CoordinatorSpec(pipeline, 4, target_ranks, draft_ranks, (1,), **options)
        self.hub = Hub("tcp://127.0.0.1:*")
        self.ranks = [f"{role}-{rank}" for role, size in spec.sizes.items() for rank in range(size)]
        self.links = {name: Link(self.hub.address, f"{name}#0") for name in self.ranks}
        self.links[CLIENT] = Link(self.hub.address, CLIENT)
        self.ended: list[object] = []
        self.thread = threading.Thread(target=self.conduct, args=(CoordinatorService(spec, self.hub, watches),))
        self.thread.start()

    def conduct(self, conductor) -> None:
        try:
            self.ended.append(conductor.run())
        except Exception as error:
            self.ended.append(error)

    def say(self, name, record) -> None:
        self.links[name].send(record)

    def hear(self, name, timeout_s=WAIT_S, *, vitals=False):
        """The next record; heartbeats of the coordinator only if `vitals`."""
        deadline = time.monotonic() + timeout_s
        while (left := deadline - time.monotonic()) > 0:
            record = self.links[name].receive(left)
            if vitals or not isinstance(record, Alive):
                return record

    def beat(self, name, **state) -> None:
        role, _, rank = name.partition("-")
        self.say(name, Alive(role, int(rank), **{"incarnation": 0, "pid": 7} | state))

    def join(self, *names) -> int:
        """Play ranks that come together; returns the epoch."""
        for name in names:
            self.beat(name)
        for name in names:
            call = self.hear(name)
            assert isinstance(call, Join)
            role, _, rank = name.partition("-")
            self.say(name, Ready(role, int(rank), FACTS, call.epoch))
        return call.epoch

    def get_ready(self) -> list[Ready]:
        for role in ("target", "draft"):
            if members := [name for name in self.ranks if name.startswith(role)]:
                self.join(*members)
        self.say(CLIENT, Hello())
        return [self.hear(CLIENT) for _ in self.ranks]

    def stop(self) -> None:
        if self.thread.is_alive():
            self.say(CLIENT, Stop("the test is over"))
        self.thread.join(WAIT_S)
        for link in self.links.values():
            link.close()
        self.hub.close()
