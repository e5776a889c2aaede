"""Keeps a lease of an engine on one draft pool of those that its configuration names.

Orders the lease about once a second, which renews it. A pool that does not answer, has lost the lease or refuses it
makes way for the next one; with the last, the first is tried again. Every lease has a number of its own, which is that
of the draft rank's process at the coordinator, so what an earlier lease still sends is ignored there.
"""

from __future__ import annotations

import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from actors.protocol.leases import LeaseAnswer, LeaseOrder
from actors.transport.channel import Link
from actors.transport.keys import LinkKey

log = logging.getLogger(__name__)

RENEW_S = 1.0
PATIENCE_S = 3.0
"""Seconds without an answer after which the next pool is asked."""


def host_towards(address: str) -> str:
    """The address of this machine from which tcp://HOST:PORT is reached; nothing is sent."""
    host, port = address.removeprefix("tcp://").rsplit(":", 1)
    try:
        family, *_, place = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(place)
            found = str(probe.getsockname()[0])
    except OSError as error:
        raise ValueError(f"drafter.pools={address}: cannot be reached ({error})") from error
    return f"[{found}]" if ":" in found else found


@dataclass(frozen=True, slots=True)
class PoolPlace:
    """Where a pool is, and the key that it admits."""

    address: str
    key: LinkKey

    @staticmethod
    def read(address: str, key_file: str) -> PoolPlace:
        """ValueError, one line, for a file without a key."""
        try:
            return PoolPlace(address, LinkKey.read(Path(key_file).read_text(encoding="utf-8")))
        except (OSError, ValueError) as error:
            raise ValueError(f"drafter.key_files={key_file}: holds no key of a pool ({error})") from error


class PoolLeases:
    """A thread from construction to `close`. `order` is the lease without its number, as of now."""

    def __init__(self, pools: Sequence[PoolPlace], order: Callable[[], LeaseOrder]) -> None:
        self._pools = pools
        self._order = order
        self._place = 0
        self._number = 1
        self._granted = threading.Event()
        self._stopped = threading.Event()
        self._was_lost = threading.Event()
        self.refusal: LeaseAnswer | None = None
        """The last answer, if it was a refusal."""
        self._thread = threading.Thread(target=self._run, name="pool-leases", daemon=True)
        self._thread.start()

    @property
    def pool(self) -> str:
        """The address of the pool that is asked now."""
        return self._pools[self._place].address

    def wait(self, timeout_s: float) -> bool:
        """Whether a lease was granted by then; at once after a refusal that stays one."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline and not self._granted.wait(0.05):
            if self.refusal is not None and self.refusal.is_final and len(self._pools) == 1:
                break
        return self._granted.is_set()

    def lost(self) -> None:
        """The coordinator has given the draft rank up: another lease is needed. From any thread."""
        self._was_lost.set()

    def close(self) -> None:
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopped.is_set():
            place = self._pools[self._place]
            link = Link(place.address, f"{place.key.peer}:{secrets.token_hex(8)}", place.key)
            try:
                self._hold(link)
            finally:
                link.close()
            self._granted.clear()
            self._place = (self._place + 1) % len(self._pools)
            self._number += 1

    def _hold(self, link: Link) -> None:
        """Order and renew at one pool, until it is no use any more."""
        heard_at = time.monotonic()
        while not self._stopped.is_set():
            link.send(replace(self._order(), number=self._number))
            answer = self._answer(link)
            now = time.monotonic()
            if answer is not None:
                heard_at = now
            if answer is not None and answer.why:
                self._refused(answer)
                return
            if now - heard_at > PATIENCE_S:
                log.warning("%s: does not answer", self.pool)
                return
            if self._was_lost.is_set():
                self._was_lost.clear()
                log.warning("%s: its drafter was lost", self.pool)
                return
            if answer is not None:
                if not self._granted.is_set():
                    shared = f", one of {answer.num_leases}" if answer.num_leases > 1 else ""
                    log.info("%s: lends drafter=%s%s", self.pool, answer.drafter, shared)
                self.refusal = None
                self._granted.set()
            self._stopped.wait(RENEW_S)

    def _answer(self, link: Link) -> LeaseAnswer | None:
        deadline = time.monotonic() + RENEW_S
        while (left_s := deadline - time.monotonic()) > 0:
            record = link.receive(left_s)
            if isinstance(record, LeaseAnswer) and record.number == self._number:
                return record
        return None

    def _refused(self, answer: LeaseAnswer) -> None:
        if self.refusal is None or self.refusal.why != answer.why:
            log.warning("%s: %s", self.pool, answer.why)
        self.refusal = answer
        self._stopped.wait(RENEW_S)
